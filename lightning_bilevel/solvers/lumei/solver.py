"""Lu and Mei's first-order penalty method for convex lower levels."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_bilevel.core.lower import LowerLevel
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import ConvexSet
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.solvers.arguments import checked_arguments
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.lumei.saddle import Saddle, solve_saddle
from lightning_bilevel.solvers.record import MultiplierInfo
from lightning_bilevel.solvers.steps import plain

__all__ = ["LuMei"]


class LuMei(BilevelOptimizer):
    r"""First-order penalty method of Lu and Mei, by proximal-point steps on a minimax problem.

    It solves, with :math:`u = (x, y)` and :math:`\rho = 1/\varepsilon`,

    .. math:: \min_{u \in X \times Y} \max_{z \in Y}
        P(u, z) = f(x, y) + \rho \bigl(g(x, y) - g(x, z)\bigr)

    by an inexact proximal-point method. At the first iteration y moves to :math:`y^0` with
    :math:`g(x^0, y^0) \le \min_u g(x^0, u) + \varepsilon`, by
    :math:`\lceil D \sqrt{2 L_g/\varepsilon} \rceil` accelerated gradient steps, and
    :math:`z^0 = y^0`. Iteration k solves the strongly-convex-strongly-concave problem

    .. math::
        (u^{k+1}, z^{k+1}) \approx \arg\min_u \max_z P(u, z)
          - \tfrac{\varepsilon}{4 D} \|z - z^0\|^2 + L_h \|u - u^k\|^2,
          \qquad L_h = L_f + 2 \rho L_g

    up to a residual of :math:`\varepsilon^{3/2}/(k + 1)` by a method of optimal order (anchored
    extragradient steps within accelerated ones). The published method stops when
    :math:`\|u^{k+1} - u^k\| \le \varepsilon/(4 L_h)`: :attr:`finished` tells, and a run goes on.

    Assumption on g: g(x, .) is **convex** (nothing strong), Y is compact. Guarantee: an
    epsilon-KKT point of the penalty problem in :math:`\tilde O(\varepsilon^{-4})` evaluations. Cost
    of an iteration: 6 passes per extragradient step and 9 per step around them, **hundreds to
    hundreds of thousands in all**: this is a reference for theory and for tiny problems, slow for
    anything else. Upper and lower of the record are f and g at the new point, the multiplier is
    :math:`\rho`, inner iterations are extragradient steps.

    It does not run on mini-batches, and takes no torch optimisers: its steps are the method.

    Args:
        params: The two parameter groups, see
            :class:`~lightning_bilevel.solvers.base.BilevelOptimizer`.
        eps: :math:`\varepsilon`, the accuracy.
        L_f: The Lipschitz constant of the gradient of f.
        L_g: The Lipschitz constant of the gradient of g.
        D: The diameter of Y.
        max_inner: The cap on the extragradient steps of an iteration. An iteration that ends by it
            is short of its accuracy, so that a short step then means nothing: the first time, there
            is a warning, and :attr:`finished` stays False.

    The constants are those of the problem and have no good default: 1, 1 and 10 are generic. The
    cap is that of the published code.

    References:
        Lu, Mei: First-Order Penalty Methods for Bilevel Optimization. SIAM Journal on Optimization
            34(2), 2024 (Algorithms 2, 5 and 6).

    Notes:
        The updates are those of published code that follows the paper's algorithms by number; the
        paper's text was not at hand. Sets take the place of its nonsmooth proximal terms, and its
        functional constraints on the lower level (Algorithm 4) are not part of this. The code adds
        1e-8 to the inner stopping rule; here the slack is the rounding of the terms, because a
        fixed one ends all progress far above rounding. The code's cap is for the loop within, here
        it is for the whole iteration.
    """

    for_mini_batches = "F2SA"

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        eps: float = 0.1,
        L_f: float = 1.0,
        L_g: float = 1.0,
        D: float = 10.0,
        max_inner: int = 10_000,
    ) -> None:
        given = {"eps": eps, "L_f": L_f, "L_g": L_g, "D": D, "max_inner": max_inner}
        constants = checked_arguments(
            "LuMei", given, positive=("eps", "L_f", "L_g", "D"), whole=("max_inner",)
        )
        super().__init__(params, {"lr": 1 / (2 * (L_f + 2 * L_g / eps)), **constants})
        self.memory.update(finished=False, capped=False)

    @property
    def finished(self) -> bool:
        """Whether the last iteration met the published stopping rule, at its full accuracy."""
        return bool(self.memory["finished"])

    def advance(
        self, problem: BilevelProblem, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, MultiplierInfo]:
        c = self.constants
        k = self.memory["iteration"]
        eps = c["eps"]
        L_h = c["L_f"] + 2 * c["L_g"] / eps
        s_z = eps / (2 * c["D"])
        steps = 0
        if "z" not in self.memory:
            steps = math.ceil(c["D"] * math.sqrt(2 * c["L_g"] / eps))
            y = _accelerated(problem.at(x), y, 1 / c["L_g"], steps, problem.lower_set)
        z = self.memory.get("z", y)
        z_first = self.memory.get("z_first", y)
        proximal = _Proximal(problem, torch.cat([x, y]), z_first, x.numel(), eps, L_h, s_z)
        saddle = Saddle(
            proximal.F, proximal.project, x.numel() + y.numel(), L_h, s_z, 3 * L_h + s_z
        )
        found = solve_saddle(saddle, torch.cat([x, y, z]), eps**1.5 / (k + 1), c["max_inner"])
        x_new, y_new, z_new = proximal.split(found.w)
        moved = norm(torch.cat([x_new - x, y_new - y]))
        self.memory["z"] = z_new.clone()
        self.memory["z_first"] = z_first
        self.memory["finished"] = found.reached and moved <= eps / (4 * L_h)
        if not found.reached and not self.memory["capped"]:
            self.memory["capped"] = True
            warnings.warn(
                f"LuMei ended outer iteration {k + 1} at its cap of {c['max_inner']} steps with a "
                f"residual of {found.residual:.3g}, above {eps**1.5 / (k + 1):.3g}. Make `eps` "
                "larger or `max_inner` larger; the lower level must be convex, and `L_f` and `L_g` "
                "at least the curvature of f and g.",
                stacklevel=3,
            )
        info = MultiplierInfo(
            upper=proximal.upper,
            lower=proximal.lower,
            inner_iterations=steps + found.steps,
            multiplier=1 / eps,
        )
        return x_new.clone(), y_new.clone(), info


class _Proximal:
    """The saddle-point problem of an iteration, of w = (x, y, z).

    Attributes:
        upper: f where F was last evaluated.
        lower: g(x, y), likewise.
    """

    def __init__(
        self,
        problem: BilevelProblem,
        center: Tensor,
        z_first: Tensor,
        size_x: int,
        eps: float,
        L_h: float,
        s_z: float,
    ) -> None:
        self._problem = problem
        self._center = center
        self._z_first = z_first
        self._sizes = [size_x, z_first.numel(), z_first.numel()]
        self._rho = 1 / eps
        self._L_h = L_h
        self._s_z = s_z
        self.upper = math.nan
        self.lower = math.nan

    def split(self, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, y, z = torch.split(w, self._sizes)
        return x, y, z

    def project(self, w: Tensor) -> Tensor:
        x, y, z = self.split(w)
        Y = self._problem.lower_set
        return torch.cat([self._problem.upper_set.project(x), Y.project(y), Y.project(z)])

    def F(self, w: Tensor) -> Tensor:
        """Return the gradient in (x, y), and minus that in z; 3 passes."""
        x, y, z = self.split(w)
        f = self._problem.upper(x, y)
        gap = self._problem.at(x, remember=False).full_gap(y, z)
        self.upper = f.value
        self.lower = gap.value_y
        away = torch.cat([x, y]) - self._center
        of_u = torch.cat([f.grad_x + self._rho * gap.grad_x, f.grad_y + self._rho * gap.grad_y])
        of_z = self._rho * gap.grad_z + self._s_z * (z - self._z_first)
        return torch.cat([of_u + 2 * self._L_h * away, of_z])


def _accelerated(
    lower: LowerLevel, y: Tensor, step: float, steps: int, lower_set: ConvexSet
) -> Tensor:
    """Return y after Nesterov's accelerated projected gradient steps for convex functions."""
    ahead = y
    t = 1.0
    for _ in range(steps):
        new = plain(ahead, lower.gradient(ahead), step, lower_set)
        t_new = (1 + math.sqrt(1 + 4 * t * t)) / 2
        ahead = new + (t - 1) / t_new * (new - y)
        y = new
        t = t_new
    return y
