"""The certificate of the current point, evaluated once, and the time that certificates take."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_bilevel.core.certificate import Certificate, certify
from lightning_bilevel.core.curvature import reachable_envelope
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem, Start
from lightning_bilevel.solvers.record import StreamInfo

__all__ = ["Certifier"]

# The accuracy of the proximal point in a certificate after mini-batches, as in the paper.
_MINI_BATCH_TOLERANCE = 1e-3


@dataclass
class Certifier:
    """Certifies the points of a run.

    Attributes:
        start: The gradients at the start of the run. Later gradients are compared with them.
        seconds: The time that certificates have taken.
        last: The latest certificate, with what was asked, the point and the iteration. It is
            returned again for the same question at the same point.
    """

    start: Start | None = None
    seconds: float = 0.0
    last: tuple[Any, tuple[Tensor, Tensor], int, Certificate] | None = None

    def of_module(
        self,
        module: Any,
        run: Any,
        *,
        batch: Any,
        envelope: Envelope | None,
        proved: bool,
        sample: bool,
        batches: int,
        passes: int,
        tolerance: float | None,
    ) -> Certificate | None:
        """Return what :meth:`BilevelMixin.certify` returns, in either mode."""
        declared, stream = module._declared(), module.mini_batches
        if stream is not None and module.batch_gradients is not None:
            return None
        # Monitors look at a sample: their curve needs one rho from beginning to end.
        reachable = stream is not None and envelope is None and not sample
        reachable = reachable and module.envelope != declared.envelope
        envelope = envelope or module.envelope
        if envelope is None:
            return None
        iteration = 0 if run.step is None else run.step.iteration
        point, multiplier = module.point, run.multiplier
        if stream is None:
            problem, data = run.problem_to_certify(module, batch), ""
            name = run.point_name(declared.norms())
            multiplier = run.solver.multiplier if multiplier is None else multiplier
        else:
            problem, data = stream.evaluated(batch, sample, batches)
            name = run.shown or f"the last iterate, step {iteration}"
            tracked = declared.method is not None and declared.method.envelope is not None
            if multiplier is None and tracked and isinstance(run.step, StreamInfo):
                multiplier = float(run.step.multiplier)
        if proved:
            kept = run.solver.proved
            if kept is None:
                raise MisconfigurationException(
                    f"`{type(module).__name__}.certify(proved=True)` has no point to certify: "
                    f"{run.solver.unproved}."
                )
            # Its bounds are those of the solver's own relaxation.
            name = str(kept) if envelope == run.solver.envelope else kept.name
            point, multiplier, iteration = (kept.x, kept.y), kept.multiplier, 0
        with nullcontext() if stream is None else stream.evaluating():
            return self.certify(
                problem,
                point,
                envelope,
                iteration,
                reachable=reachable,
                multiplier=multiplier,
                tolerance=tolerance,
                qualification=declared.qualification,
                kinks=declared.kinks(),
                evaluated_on=data,
                point=name,
                passes=None if stream is None else passes,
            )

    def certify(
        self,
        problem: BilevelProblem,
        point: tuple[Tensor, Tensor],
        envelope: Envelope,
        iteration: int,
        /,
        *,
        reachable: bool = False,
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
        asked = problem, envelope, reachable, dict(options)
        if self.last is not None:
            known, where, _, certificate = self.last
            if known == asked and all(map(torch.equal, where, point)):
                return certificate
        limit = options["passes"]
        if limit is not None and options["tolerance"] is None:
            options["tolerance"] = _MINI_BATCH_TOLERANCE
        began = time.perf_counter()
        found, searched = envelope, 0
        if reachable:
            calls = problem.calls
            with problem.uncounted():
                found = reachable_envelope(problem, *point, envelope)
                searched = (problem.calls - calls).passes
        if found != envelope:
            # The multiplier of the solver belongs to its own envelope.
            options["multiplier"] = None
            options["evaluated_on"] += (
                f"; rho = {found.rho:.2g} from the curvature of g and delta = {found.delta:.2g} of "
                f"the same meaning, because the solver's rho = {envelope.rho:g} would take too "
                "many passes"
            )
        certificate = certify(problem, *point, found, start=self.start, **options)
        words = certificate.evaluated_on
        if limit is not None and certificate.tolerance > options["tolerance"]:
            error = certificate.tolerance**2 / (2 * found.modulus)
            words += (
                f"; z to {certificate.tolerance:.1e} after {limit} passes, so R may be larger by "
                f"{error:.1e}"
            )
        certificate = replace(certificate, passes=searched + certificate.passes, evaluated_on=words)
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
