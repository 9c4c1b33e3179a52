"""The certificate of the current point, evaluated once, and the time that certificates take."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_bilevel.core.certificate import Certificate, certify
from lightning_bilevel.core.curvature import reachable_envelope
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem, Start

__all__ = ["Certifier"]

# The accuracy of the proximal point in a certificate after mini-batches, as in the paper.
_MINI_BATCH_TOLERANCE = 1e-3


@dataclass
class Certifier:
    """Certifies the points of a run.

    Attributes:
        start: The gradients at the start of the run. Later gradients are compared with them.
        multiplier: The multiplier of a restored point; None is the solver's.
        seconds: The time that certificates have taken.
        last: The latest certificate, with what was asked, the point and the iteration. It is
            returned again for the same question at the same point.
    """

    start: Start | None = None
    multiplier: float | None = None
    seconds: float = 0.0
    last: tuple[Any, tuple[Tensor, Tensor], int, Certificate] | None = None

    def certify(
        self,
        problem: BilevelProblem,
        point: tuple[Tensor, Tensor],
        envelope: Envelope,
        iteration: int,
        /,
        *,
        reachable: bool,
        **options: Any,
    ) -> Certificate:
        """Return the certificate of a point.

        Args:
            problem: f and g.
            point: x and y.
            envelope: The Moreau envelope.
            iteration: The iteration of the run.
            reachable: Whether an envelope whose proximal point takes too many passes gives way to
                one with a smaller rho.
            options: Those of :func:`~lightning_bilevel.core.certificate.certify`.
        """
        asked = problem, envelope, reachable, options
        if self.last is not None:
            known, where, _, certificate = self.last
            if known == asked and all(map(torch.equal, where, point)):
                return certificate
        options = dict(options)
        limit = options["passes"]
        if limit is not None and options["tolerance"] is None:
            options["tolerance"] = _MINI_BATCH_TOLERANCE
        began = time.perf_counter()
        calls = problem.calls
        if reachable:
            with problem.uncounted():
                found = reachable_envelope(problem, *point, envelope)
                searched = (problem.calls - calls).passes
        else:
            found, searched = envelope, 0
        if found != envelope:
            # The multiplier of the solver belongs to its own envelope.
            options["multiplier"] = None
            options["evaluated_on"] += (
                f"; rho = {found.rho:.2g} from the curvature of g and delta = {found.delta:.2g} of "
                f"the same meaning, because the solver's rho = {envelope.rho:g} would take too "
                "many passes"
            )
        certificate = certify(problem, *point, found, start=self.start, **options)
        certificate = replace(certificate, passes=searched + certificate.passes)
        if limit is not None and certificate.tolerance > options["tolerance"]:
            error = certificate.tolerance**2 / (2 * found.modulus)
            words = (
                f"; z to {certificate.tolerance:.1e} after {limit} passes, so R may be larger by "
                f"{error:.1e}"
            )
            certificate = replace(certificate, evaluated_on=certificate.evaluated_on + words)
        # All processes must hold the same time: it decides whether they evaluate the next
        # certificate, which they do together.
        self.seconds += problem.mean_over_ranks(time.perf_counter() - began, point[0])
        self.last = asked, point, iteration, certificate
        return certificate

    def may_evaluate(self, share: float, iteration: int, optimization_time: float) -> bool:
        """Compare the time of certificates with a share of the optimisation time.

        The first certificate is always allowed. So is one that is known already: it costs nothing.
        """
        if self.last is None or self.last[2] == iteration:
            return True
        return self.seconds <= share * optimization_time
