"""The certificate of the current point, evaluated once, and the time that certificates take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.core.certificate import Certificate, certify
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem, Start
from lightning_bilevel.solvers.record import StepInfo

__all__ = ["Certifier", "Question"]


class Question(NamedTuple):
    """What a certificate is asked for, besides the point.

    Attributes:
        problem: f and g.
        envelope: The Moreau envelope.
        tolerance: The accuracy of the proximal point.
        multiplier: The multiplier that belongs to the point.
        evaluated_on: What f and g are evaluated on, if that is not all data.
    """

    problem: BilevelProblem
    envelope: Envelope
    tolerance: float | None
    multiplier: float | None
    evaluated_on: str


class _Answer(NamedTuple):
    question: Question
    point: tuple[Tensor, Tensor]
    certificate: Certificate
    iteration: int


@dataclass
class Certifier:
    """Certifies the points of a run.

    Attributes:
        start: The gradients that the run started with: what later ones are compared to.
        multiplier: The multiplier of a restored point; None is the solver's.
        seconds: The time that certificates have taken.
        last: The certificate that was evaluated last. It holds for the same question at the same
            point.
    """

    start: Start | None = None
    multiplier: float | None = None
    seconds: float = 0.0
    last: _Answer | None = None

    def certify(
        self,
        question: Question,
        point: tuple[Tensor, Tensor],
        qualification: str | Callable[[Envelope], str],
        step: StepInfo | None,
    ) -> Certificate:
        """Return the certificate of a point.

        Args:
            question: What is asked.
            point: x and y.
            qualification: Why the constraint qualification holds.
            step: The last step of the run.
        """
        known = self.last
        if (
            known is not None
            and known.question == question
            and all(map(torch.equal, known.point, point))
        ):
            return known.certificate
        problem, envelope, tolerance, multiplier, evaluated_on = question
        began = time.perf_counter()
        certificate = certify(
            problem,
            *point,
            envelope,
            multiplier=multiplier,
            tolerance=tolerance,
            qualification=qualification
            if isinstance(qualification, str)
            else qualification(envelope),
            start=self.start,
            evaluated_on=evaluated_on,
        )
        # Agreed among the processes: it decides whether the next certificate, a collective, is
        # evaluated.
        self.seconds += problem.mean_over_ranks(time.perf_counter() - began, point[0])
        self.last = _Answer(question, point, certificate, 0 if step is None else step.iteration)
        return certificate

    def may_evaluate(self, share: float, step: StepInfo) -> bool:
        """Tell whether certificates have taken no more than a share of the optimisation time up to
        a step.

        The first one may always be evaluated, and one that is known already costs nothing.
        """
        if self.last is None or self.last.iteration == step.iteration:
            return True
        return self.seconds <= share * step.optimization_time
