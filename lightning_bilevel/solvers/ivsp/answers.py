"""What a run of IVSP can be asked: its envelope, its multiplier, the theorem's point, L_safe."""

from __future__ import annotations

from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.ivsp.choose import explain
from lightning_bilevel.solvers.ivsp.constants import (
    PAPER,
    missing_constants,
)
from lightning_bilevel.solvers.ivsp.keep import best
from lightning_bilevel.solvers.ivsp.penalty import (
    smoothing_function,
)
from lightning_bilevel.solvers.ivsp.safe import safe_curvature
from lightning_bilevel.solvers.proved import ProvedPoint

__all__ = ["Answers"]


class Answers(BilevelOptimizer):
    """The part of IVSP that reads its constants and its state, and changes neither."""

    @property
    def chosen(self) -> list[tuple[str, str]]:
        """The constants that this run has chosen itself, each with its value and its origin."""
        return explain(self.constants) if self.constants["chosen"] is not None else []

    @property
    def envelope(self) -> Envelope | None:
        """The envelope in the user's y; None before the first step has chosen its constants."""
        c = self.constants
        square = self.param_groups[1]["unit"] ** 2
        if c["rho"] is None or c["sigma"] is None:
            return None
        # |v - v'|^2/(2 rho) in the unit of y is |y - y'|^2/(2 rho unit^2).
        return Envelope(rho=c["rho"] * square, sigma=c["sigma"] / square, delta=c["delta"])

    @property
    def multiplier(self) -> float:
        """The multiplier of the last point."""
        return float(self.memory["multiplier"])

    @property
    def proved(self) -> ProvedPoint | None:
        r"""The point that the theorem speaks of, after the iterations so far.

        It is of the second half of the run, of an iteration that did not update the penalty and
        has the smallest :math:`\omega_{k+1} = \|w^{k+1} - w^k\|/\mu_k` of the last iterations, of
        more than half of the second half (:mod:`lightning_bilevel.solvers.ivsp.keep` says which,
        and why the theorem's rates hold for it). The last iterate may be better or worse: nothing
        is proved for it. None if there is no such point; :attr:`unproved` then says why.
        """
        # Where the data have grown, the run that the theorem speaks of is the last stage.
        began = self.memory.get("began", 0)
        n = self.memory["iteration"] - began
        kept = best(self.memory, n)
        if kept is None or self._changed_lately:
            return None
        split = sum(p.numel() for p in self.param_groups[0]["params"])
        x_unit, y_unit = self._units
        return ProvedPoint(
            x=kept.w[:split] * x_unit,
            y=kept.w[split:] * y_unit,
            multiplier=kept.multiplier,
            iteration=began + kept.iteration,
            iterations=began + n,
            omega=kept.omega,
            feasibility_bound=kept.feasibility_bound,
            complementarity_bound=kept.complementarity_bound,
        )

    @property
    def unproved(self) -> str:
        """Why :attr:`proved` is None, in words."""
        n = self.memory["iteration"]
        if not self.constants["keep_proved"]:
            return "`IVSP(keep_proved=False)` does not keep the point of its theorem"
        if n == 0:
            return "IVSP has made no step yet"
        if self._changed_lately:
            return (
                f"the theorem is about one problem and a run that was not touched, but f, g or the "
                f"point changed after iteration {self.memory['changed']} of {n}: give all "
                "iterations the same data, or run as long again"
            )
        return "the last iterations were on a sample, or all updated the penalty: run longer"

    @property
    def _changed_lately(self) -> bool:
        """Whether f, g or the point changed from outside in the second half of the run."""
        began = self.memory.get("began", 0)
        return bool(self.memory["changed"] - began > (self.memory["iteration"] - began) // 2)

    def safe_L(
        self, L_f: float = 0.0, L_R: float = 0.0, *, theta_hat: float | None = None
    ) -> float:
        r"""Return :math:`L_{\text{safe}}`: every step with an L above it descends.

        :mod:`lightning_bilevel.solvers.ivsp.safe` has the formula. A constant that IVSP chooses is
        known after the first step.

        Args:
            L_f: Lipschitz constant of the gradient of f, in the solver's units. With 0, the result
                is only a lower bound of :math:`L_{\text{safe}}`.
            L_R: Lipschitz constant of the gradient of R, likewise;
                :func:`~lightning_bilevel.solvers.ivsp.safe.gap_lipschitz` computes one from that of
                g.
            theta_hat: Another :math:`\hat\vartheta` than the solver's. For a fixed L any between 0
                and 2 is valid.
        """
        c = self.constants
        known = {**PAPER, **{name: value for name, value in c.items() if value is not None}}
        missing = missing_constants(c) if c["chosen"] is None else ()
        if missing:
            raise ValueError(
                f"`IVSP.safe_L()` needs {', '.join(missing)}, which IVSP chooses at its first "
                "step: call it after that, or give all constants of the task."
            )
        return safe_curvature(
            L_f=L_f,
            L_R=L_R,
            B_R=self.memory.get("B_R", known["B_R"]) if c["B_R"] is None else c["B_R"],
            gamma0=known["gamma0"],
            mu0=known["mu0"],
            c1=known["c1"],
            b=smoothing_function(c["smoothing"]).b,
            theta_low=c["theta_low"],
            theta_hat=c["theta_hat"] if theta_hat is None else theta_hat,
        )
