"""The points of a run and their certificates, as a bilevel module shows them."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_bilevel.core.certificate import Certificate
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.plugin.buffers import write_buffers
from lightning_bilevel.plugin.declared import DeclaredLevels
from lightning_bilevel.plugin.run import RESTORED
from lightning_bilevel.solvers.theorem import TheoremPoint
from lightning_bilevel.solvers.record import StreamInfo

__all__ = ["CertifiedPoints"]


class CertifiedPoints(DeclaredLevels):
    """The current point, the theorem's point and earlier ones, each with its certificate."""

    @property
    def proved(self) -> TheoremPoint | None:
        """The point of the run that the convergence theorem speaks of, if the solver keeps it.

        ``certify(proved=True)`` certifies it. It stays where it is: ``restore((p.x, p.y),
        p.multiplier)`` makes a point p the result of the run.
        """
        return self._run.solver.proved

    @property
    def on_mini_batches(self) -> bool:
        """Whether the run is on mini-batches. Its certificate is then of all data."""
        return self.mini_batches is not None

    @property
    def written_buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers that training writes to, such as running statistics, by name."""
        return self._run.buffers.copies(self._module())

    @property
    def evaluation_time(self) -> float:
        """Seconds that certificates have taken since the start of fit."""
        return self._run.certifier.seconds

    def restore(
        self,
        point: tuple[Tensor, Tensor],
        multiplier: float,
        buffers: dict[str, Tensor] | None = None,
    ) -> None:
        """Write an earlier point of the run into the module, as its result.

        A checkpoint that is saved afterwards still goes on from the last point of the run.

        Args:
            point: x and y.
            multiplier: The multiplier of that point.
            buffers: The buffers of that point, see :attr:`written_buffers`.
        """
        x, y = self.point
        if self._run.last is None:
            self._run.last = deepcopy(dict(self._module().state_dict()))
        self._run.certifier.multiplier = multiplier
        self.point = point[0].to(x), point[1].to(y)
        self._run.shown = RESTORED
        write_buffers(self._module(), buffers or {})

    def certify(
        self,
        *,
        batch: Any = None,
        envelope: Envelope | None = None,
        tolerance: float | None = None,
        proved: bool = False,
        sample: bool = False,
        batches: int = 1000,
        passes: int = 20,
    ) -> Certificate | None:
        """Return the certificate of the current point; None without an envelope.

        After a run on mini-batches f and g are evaluated in eval mode on all data, which the
        training loaders are asked for once more. Where the lower level is solved on each batch
        there is no certificate, because no y belongs to all data.

        Args:
            batch: The training batch to evaluate f and g on; None is the last one, and after a run
                on mini-batches or a growing sample all data.
            envelope: The Moreau envelope; None is the module's. After a run on mini-batches the rho
                of a solver such as StreamingIVSP is often so large that the proximal point takes
                hundreds of passes. Then None takes a smaller one, from the curvature of g, with a
                delta of the same meaning, and the certificate says so;
                ``envelope=module.envelope`` insists on the solver's.
            tolerance: The accuracy of the proximal point; None is 1e-9 in float64 and 1e-5 in
                float32, and after a run on mini-batches 1e-3.
            proved: Certify :attr:`proved`, the point of the theorem, instead of the current one.
            sample: On mini-batches: look at the first few batches of the run only, and leave the
                loaders alone, as monitors do in the middle of an epoch.
            batches: On mini-batches: the most batches of a level. More data are a sample, and the
                certificate says so.
            passes: On mini-batches: the most passes of g for the proximal point. If they do not
                suffice, the certificate says how accurate it is.
        """
        declared, run = self._declared(), self._run
        stream, solver = self.mini_batches, run.solver
        # Monitors look at a sample: their curve needs one rho from beginning to end.
        reachable = stream is not None and envelope is None and not sample
        reachable = reachable and self.envelope != declared.envelope
        envelope = envelope or self.envelope
        iteration = 0 if self.last_step is None else self.last_step.iteration
        point, multiplier = self.point, run.certifier.multiplier
        if stream is None:
            problem, data = self._exact_problem(batch), ""
            name = run.point_name(declared.norms())
            multiplier = solver.multiplier if multiplier is None else multiplier
        elif self.batch_gradients is not None:
            return None
        if envelope is None:
            return None
        if stream is not None:
            problem, data = stream.evaluated(batch, sample, batches)
            name = run.shown or f"the last iterate, step {iteration}"
            tracked = declared.method is not None and declared.method.envelope is not None
            if multiplier is None and tracked and isinstance(self.last_step, StreamInfo):
                multiplier = float(self.last_step.multiplier)
        if proved:
            kept = self._proved()
            # Its bounds are those of the solver's own relaxation.
            name = str(kept) if envelope == solver.envelope else kept.name
            point, iteration = (kept.x, kept.y), 0
            multiplier = kept.multiplier
        with nullcontext() if stream is None else stream.evaluating():
            return run.certifier.certify(
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

    def may_evaluate(self, share: float) -> bool:
        """Compare the time of certificates so far with a share of the optimisation time.

        The first certificate is always allowed. So is one that is known already: it costs nothing.
        """
        step = self.last_step
        return step is not None and self._run.certifier.may_evaluate(
            share, step.iteration, step.optimization_time
        )

    def _exact_problem(self, batch: Any) -> BilevelProblem:
        known = self._run.batches.whole or self._run.batches.current
        current = known if batch is None else self._problem_on(batch)
        if current is None:
            raise RuntimeError(
                f"`{type(self).__name__}.certify()` needs a training batch: call it after "
                "`Trainer.fit` in the same process, or give it one, `certify(batch=...)`."
            )
        return current.problem

    def _proved(self) -> TheoremPoint:
        kept = self.proved
        if kept is None:
            raise MisconfigurationException(
                f"`{type(self).__name__}.certify(proved=True)` has no point to certify: "
                f"{self._run.solver.unproved}."
            )
        return kept
