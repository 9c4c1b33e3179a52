"""The certificate of the current point, evaluated once, and the time that certificates take."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.core.certificate import Certificate, certify
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem, Start
from lightning_bilevel.core.reachable import reachable_envelope
from lightning_bilevel.plugin.declaration import Declaration
from lightning_bilevel.solvers.record import StepInfo

__all__ = ["MINI_BATCH_TOLERANCE", "Certifier", "Question"]

# The accuracy of the proximal point in a certificate after mini-batches, as in the paper.
MINI_BATCH_TOLERANCE = 1e-3


class Question(NamedTuple):
    """What a certificate depends on, besides the point.

    Attributes:
        problem: f and g.
        envelope: The Moreau envelope.
        tolerance: The accuracy of the proximal point; None is what its dtype allows, or 1e-3 where
            passes are limited.
        multiplier: The multiplier that belongs to the point.
        evaluated_on: The data that f and g are evaluated on; empty for all data.
        point: Which point of the run it is, in words; empty for the current one.
        passes: The most passes of g for the proximal point; None for no such limit.
        reachable: Whether an envelope whose proximal point takes too many passes gives way to one
            with a smaller rho.
    """

    problem: BilevelProblem
    envelope: Envelope
    tolerance: float | None
    multiplier: float | None
    evaluated_on: str
    point: str = ""
    passes: int | None = None
    reachable: bool = False

    def settled(self, point: tuple[Tensor, Tensor]) -> Question:
        """Return the question with the envelope and the accuracy that it is answered with."""
        asked = self._within_reach(point) if self.reachable else self
        if asked.tolerance is None and asked.passes is not None:
            return asked._replace(tolerance=MINI_BATCH_TOLERANCE)
        return asked

    def _within_reach(self, point: tuple[Tensor, Tensor]) -> Question:
        found = reachable_envelope(self.problem, *point, self.envelope)
        if found == self.envelope:
            return self
        words = (
            f"; rho = {found.rho:.2g} from the curvature of g and delta = {found.delta:.2g} of the "
            f"same meaning, because the solver's rho = {self.envelope.rho:g} would take too many "
            "passes"
        )
        # The multiplier of the solver belongs to its own envelope.
        return self._replace(
            envelope=found,
            multiplier=None,
            evaluated_on=f"{self.evaluated_on}{words}",
        )


def _limited(certificate: Certificate, question: Question) -> Certificate:
    """Say that the allowed passes did not suffice for the proximal point."""
    error = certificate.tolerance**2 / (2 * question.envelope.modulus)
    words = (
        f"; z to {certificate.tolerance:.1e} after {question.passes} passes, so R may be larger by "
        f"{error:.1e}"
    )
    return replace(certificate, evaluated_on=f"{question.evaluated_on}{words}")


class _Answer(NamedTuple):
    question: Question
    point: tuple[Tensor, Tensor]
    certificate: Certificate
    iteration: int


@dataclass
class Certifier:
    """Certifies the points of a run.

    Attributes:
        start: The gradients at the start of the run. Later gradients are compared with them.
        multiplier: The multiplier of a restored point; None is the solver's.
        seconds: The time that certificates have taken.
        last: The latest certificate. It is returned again for the same question at the same point.
    """

    start: Start | None = None
    multiplier: float | None = None
    seconds: float = 0.0
    last: _Answer | None = None

    def certify(
        self,
        question: Question,
        point: tuple[Tensor, Tensor],
        declared: Declaration,
        step: StepInfo | None,
    ) -> Certificate:
        """Return the certificate of a point.

        Args:
            question: What the certificate depends on, besides the point.
            point: x and y.
            declared: What the module declared, for the assumptions of the theorem.
            step: The last step of the run.
        """
        last = self.last
        if (
            last is not None
            and last.question == question
            and all(map(torch.equal, last.point, point))
        ):
            return last.certificate
        problem = question.problem
        began = time.perf_counter()
        calls = problem.calls
        with problem.uncounted():
            asked = question.settled(point)
            before = (problem.calls - calls).passes
        certificate = certify(
            problem,
            *point,
            asked.envelope,
            multiplier=asked.multiplier,
            tolerance=asked.tolerance,
            qualification=declared.qualification,
            kinks=declared.kinks(),
            start=self.start,
            evaluated_on=asked.evaluated_on,
            point=asked.point,
            passes=asked.passes,
        )
        certificate = replace(certificate, passes=before + certificate.passes)
        if asked.tolerance is not None and certificate.tolerance > asked.tolerance:
            certificate = _limited(certificate, asked)
        # All processes must hold the same time: it decides whether they evaluate the next
        # certificate, which they do together.
        self.seconds += problem.mean_over_ranks(time.perf_counter() - began, point[0])
        iteration = 0 if step is None else step.iteration
        self.last = _Answer(question, point, certificate, iteration)
        return certificate

    def may_evaluate(self, share: float, step: StepInfo) -> bool:
        """Tell whether certificates took at most a share of the optimisation time up to a step.

        The first certificate is always allowed. So is one that is known already: it costs nothing.
        """
        if self.last is None or self.last.iteration == step.iteration:
            return True
        return self.seconds <= share * step.optimization_time
