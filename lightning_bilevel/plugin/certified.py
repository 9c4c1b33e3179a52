"""The points of a run and their certificates, as a bilevel module shows them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_bilevel.core.certificate import Certificate
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.plugin.buffers import write_buffers
from lightning_bilevel.plugin.certifier import Question
from lightning_bilevel.plugin.checkpoints import (
    LastPoint,
)
from lightning_bilevel.plugin.declared import DeclaredLevels
from lightning_bilevel.plugin.polish import polished
from lightning_bilevel.solvers.base import SolverCallable
from lightning_bilevel.solvers.ivsp.solver import IVSP
from lightning_bilevel.solvers.proved import ProvedPoint
from lightning_bilevel.solving import Solution

__all__ = ["CertifiedPoints"]


class CertifiedPoints(DeclaredLevels):
    """The current point, the theorem's point and earlier ones, each with its certificate."""

    @property
    def proved(self) -> ProvedPoint | None:
        """The point of the run that the convergence theorem speaks of, if the solver keeps it.

        ``certify(proved=True)`` certifies it. It stays where it is: ``restore((p.x, p.y),
        p.multiplier)`` makes a point p the result of the run.
        """
        return self._run.solver.proved

    @property
    def on_mini_batches(self) -> bool:
        """Whether the run is on mini-batches. Its certificate is then of all data."""
        return self._run.stream is not None

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
        last = LastPoint(*self.point, self.written_buffers)
        self._run.last = last
        self._run.certifier.multiplier = multiplier
        self.point = point[0].to(last.upper), point[1].to(last.lower)
        self._run.shown = "an earlier point of the run, which was restored"
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
        training loaders are asked for once more. Where the lower level belongs to the batch
        (``adaptation``) there is no certificate, because no y belongs to all data.

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
        declared = self._declared()
        run = self._run
        stream = run.stream
        # Monitors look at a sample: their curve needs one rho from beginning to end.
        reachable = stream is not None and envelope is None and not sample
        reachable = reachable and run.solver.envelope is not None
        envelope = envelope or self.envelope
        if stream is not None and declared.adaptation is not None:
            return None
        problem: BilevelProblem | None = None
        if stream is not None and envelope is not None:
            problem, label = stream.evaluated(batch, sample, batches)
        elif stream is None:
            known = run.batches.whole or run.batches.current
            current = known if batch is None else self._problem_on(batch)
            problem, label = None if current is None else current.problem, ""
            if problem is None:
                raise RuntimeError(
                    f"`{type(self).__name__}.certify()` needs a training batch: call it after "
                    "`Trainer.fit` in the same process, or give it one, `certify(batch=...)`."
                )
        if envelope is None or problem is None:
            return None
        if proved:
            kept = self._proved()
            # Its bounds are those of the solver's own relaxation.
            name = str(kept) if envelope == run.solver.envelope else kept.name
            point = (kept.x, kept.y)
            multiplier: float | None = kept.multiplier
            step = None
        else:
            name = run.point_name(declared.norms())
            point = self.point
            multiplier = run.certifier.multiplier
            if multiplier is None:
                multiplier = run.solver.multiplier
            step = self.last_step
        limit = None if stream is None else passes
        question = Question(problem, envelope, tolerance, multiplier, label, name, limit, reachable)
        with nullcontext() if stream is None else stream.evaluating():
            return run.certifier.certify(question, point, declared, step)

    def polish(
        self,
        max_steps: int = 20,
        solver: SolverCallable = IVSP,
        *,
        batches: int = 1000,
        envelope: Envelope | None = None,
        tolerance: float | None = None,
        epsilon: float | None = None,
    ) -> Solution:
        """Make exact iterations on all data, from the point of a run on mini-batches.

        f and g are those of the certificate: all data that the training loaders yield, in chunks
        and in eval mode. So running statistics are constants, and there is no dropout. The module
        keeps its point; ``module.restore((s.x, s.y), s.certificate.multiplier)`` makes a solution s
        its result. Each iteration of IVSP takes some passes over all data.

        Args:
            max_steps: The number of outer iterations.
            solver: Makes the solver, which starts anew: IVSP chooses its constants at this point.
            batches: The most batches of a level. More data are a sample, and the certificate says
                so.
            envelope: The Moreau envelope of the certificate; None is that of the solver.
            tolerance: The accuracy of the certificate's proximal point; None is 1e-3.
            epsilon: End the iterations when all three KKT residuals are at most that.

        Returns:
            The last iterate with its certificate, and the point of the theorem with its own.
        """
        return polished(
            type(self).__name__,
            self._run.stream,
            self._declared(),
            self.point,
            solver,
            max_steps,
            batches=batches,
            envelope=envelope,
            tolerance=tolerance,
            epsilon=epsilon,
        )

    def may_evaluate(self, share: float) -> bool:
        """Tell whether certificates took at most a share of the optimisation time so far.

        The first certificate is always allowed. So is one that is known already: it costs nothing.
        """
        if self.last_step is None:
            return False
        return self._run.certifier.may_evaluate(share, self.last_step)

    def _proved(self) -> ProvedPoint:
        kept = self.proved
        if kept is None:
            raise MisconfigurationException(
                f"`{type(self).__name__}.certify(proved=True)` has no point to certify: "
                f"{self._run.solver.unproved}. Leave `proved` out for the current point."
            )
        return kept
