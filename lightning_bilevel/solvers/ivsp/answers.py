r"""What a run of IVSP can be asked: its envelope, its multiplier, the theorem's point, L_safe.

L_safe is the curvature above which every step of IVSP descends: what a fixed L has to be.

With a fixed L (the paper's Strategy I) no trial is tested. The paper proves the descent of its
merit function for

.. math::
    L \ge L_{\text{safe}} = \max\Bigl\{\frac{\underline\vartheta}{\hat\vartheta},\;
      \frac{c_1 + \gamma_0 \mu_0 L_f + L_G}{2 - \hat\vartheta}\Bigr\}, \qquad
    L_G = b_\phi B_R^2 + \mu_0 L_R

where :math:`L_f` and :math:`L_R` are Lipschitz constants of the gradients of f and R, and
:math:`B_R` bounds the gradient of R. A smaller L may descend too, but nothing is proved for it.
"""

from __future__ import annotations

import math

import torch

from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.ivsp.choose import choose, explain
from lightning_bilevel.solvers.ivsp.constants import PAPER, missing_constants
from lightning_bilevel.solvers.ivsp.penalty import smoothing_function
from lightning_bilevel.solvers.proved import ProvedPoint, best, changed_lately

__all__ = ["Answers", "gap_lipschitz", "safe_curvature"]


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
        more than half of the second half (:mod:`lightning_bilevel.solvers.proved` says which, and
        why the theorem's rates hold for it). The last iterate may be better or worse: nothing
        is proved for it. None if there is no such point; :attr:`unproved` then says why.
        """
        return best(self.memory)

    @property
    def unproved(self) -> str:
        """Why :attr:`proved` is None, in words."""
        memory = self.memory
        if not self.constants["keep_proved"]:
            return "`IVSP(keep_proved=False)` does not keep the point of its theorem"
        if changed_lately(memory):
            return (
                f"the theorem is about one problem and a run that was not touched, but f, g or the "
                f"point changed after iteration {memory['changed']} of {memory['iteration']}: give "
                "all iterations the same data, or run as long again"
            )
        return "no recent iteration was on all data and left the penalty alone: run longer"

    @torch.no_grad()
    def probe(self, problem: BilevelProblem) -> list[tuple[str, str]]:
        """Return the constants that a run from here would choose, with values and origins."""
        scaled = self._in_units(problem)
        rows = explain(choose(scaled, *self._read(scaled), self.constants))
        problem.calls = scaled.calls
        return rows

    def safe_L(
        self, L_f: float = 0.0, L_R: float = 0.0, *, theta_hat: float | None = None
    ) -> float:
        r"""Return :math:`L_{\text{safe}}`: every step with an L above it descends.

        :func:`safe_curvature` has the formula. A constant that IVSP chooses is known after the
        first step.

        Args:
            L_f: Lipschitz constant of the gradient of f, in the solver's units. With 0, the result
                is only a lower bound of :math:`L_{\text{safe}}`.
            L_R: Lipschitz constant of the gradient of R, likewise; :func:`gap_lipschitz` computes
                one from that of g.
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


def safe_curvature(
    *,
    L_f: float,
    L_R: float,
    B_R: float,
    gamma0: float,
    mu0: float,
    c1: float,
    b: float,
    theta_low: float,
    theta_hat: float,
) -> float:
    r"""Return :math:`L_{\text{safe}}`.

    Args:
        L_f: Lipschitz constant of the gradient of f on C.
        L_R: Lipschitz constant of the gradient of R on C, see :func:`gap_lipschitz`.
        B_R: Bound on the norm of the gradient of R on C.
        gamma0: :math:`\gamma_0`, the first inverse penalty.
        mu0: :math:`\mu_0`, the first smoothing.
        c1: :math:`c_1`, the decrease that is asked for.
        b: :math:`b_\phi` of the smoothing.
        theta_low: :math:`\underline\vartheta`.
        theta_hat: :math:`\hat\vartheta`, in (0, 2). Only the line search uses it. For a fixed L it
            is a constant of the proof alone, and 1 instead of the paper's 1.99 makes
            :math:`L_{\text{safe}}` a hundred times smaller.
    """
    L_G = b * B_R**2 + mu0 * L_R
    return max(theta_low / theta_hat, (c1 + gamma0 * mu0 * L_f + L_G) / (2 - theta_hat))


def gap_lipschitz(L_g: float, envelope: Envelope) -> float:
    r"""Return a Lipschitz constant of the gradient of R for a given one of the gradient of g.

    .. math::
        L_R = L_g \bigl(1 + \sqrt{1 + K_z^2}\bigr) + (1 + K_z)/\rho, \qquad
        K_z = \frac{\sqrt{1 + \rho^2 L_g^2}}{1 - \rho\sigma}

    The paper proves that :math:`w \mapsto z(w)` is :math:`K_z`-Lipschitz, and that some
    :math:`L_R` follows. This one is the sum of the three terms of

    .. math::
        \nabla R(w) = \nabla g(x, y) - (\nabla_x g(x, z(w)), 0) - (0, (y - z(w))/\rho)
    """
    K_z = math.hypot(1.0, envelope.rho * L_g) / (1 - envelope.rho * envelope.sigma)
    return L_g * (1 + math.hypot(1.0, K_z)) + (1 + K_z) / envelope.rho
