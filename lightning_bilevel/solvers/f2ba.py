"""F2BA, the fully first-order bilevel method with a fixed penalty, and two of its relatives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

from torch import Tensor

from lightning_bilevel.core.errors import BilevelError, NonFiniteError
from lightning_bilevel.core.lower import LowerLevel
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.prox import slope_of_psi
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.solvers.arguments import constants_of
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.record import MultiplierInfo
from lightning_bilevel.solvers.steps import plain

__all__ = ["F2BA"]

Difference = Literal["forward", "central"]

# Two followers of a strongly convex g are a distance of about sigma apart. At this many times the
# size of y, one of them is on its way to infinity.
_FAR = 1e3


class F2BA(BilevelOptimizer):
    r"""Fully first-order bilevel approximation, its central difference, and its proximal form.

    It descends on the hyper-objective :math:`f(x, y^*(x))`. With
    :math:`h_s(x, \cdot) = s f(x, \cdot) + g(x, \cdot)` and :math:`y_s(x) = \arg\min_{u \in Y}
    h_s(x, u)`, the hypergradient is the derivative of :math:`\nabla_x h_s(x, y_s(x))` in s at
    s = 0, and a difference quotient takes its place. Two followers z and y are kept, from
    :math:`z^0 = y^0`. K times within an iteration, and then once:

    .. math::
        z &\leftarrow P_Y\bigl(z - \tau \nabla_y g(x^k, z)\bigr), \qquad
          y \leftarrow P_Y\bigl(y - \tau [\sigma \nabla_y f(x^k, y) + \nabla_y g(x^k, y)]\bigr) \\
        x^{k+1} &= P_X\bigl(x^k - \eta [\nabla_x f(x^k, y^{k+1})
          + (\nabla_x g(x^k, y^{k+1}) - \nabla_x g(x^k, z^{k+1}))/\sigma]\bigr)

    This is the forward difference (F2BA). In the **central** one (F2SA-p with p = 2) z follows
    :math:`h_{-\sigma}` in place of g, and x moves by the mean of both gradients of f:

    .. math::
        z &\leftarrow P_Y\bigl(z - \tau [-\sigma \nabla_y f(x^k, z) + \nabla_y g(x^k, z)]\bigr) \\
        x^{k+1} &= P_X\bigl(x^k - \eta [(\nabla_x f(x^k, y^{k+1}) + \nabla_x f(x^k, z^{k+1}))/2
          + (\nabla_x g(x^k, y^{k+1}) - \nabla_x g(x^k, z^{k+1}))/(2 \sigma)]\bigr)

    With :math:`\rho` given (**Prox-F2BA**) each follower also has a proximal term: :math:`(z -
    \bar z)/\rho` and :math:`(y - \bar y)/\rho` are added to the brackets of the inner steps, and
    after the K steps the centres move, :math:`\bar z \leftarrow (1 - \beta) \bar z + \beta z` and
    :math:`\bar y \leftarrow (1 - \beta) \bar y + \beta y`.

    Assumption on g: g(x, .) is strongly convex, or h_s satisfies the Polyak-Lojasiewicz (PL)
    condition for all small s >= 0; with the proximal term a proximal error bound for all small s,
    which is PL if there are no constraints; for the central difference also higher smoothness of f
    and g. Guarantee: the x step does not shrink with sigma, and the hyper-objective is stationary
    up to epsilon in :math:`\tilde O(\epsilon^{-2})` iterations with sigma of order epsilon; the
    bias is of order sigma for the forward and :math:`\sigma^2` for the central difference.
    Prox-F2BA: :math:`\tilde O(\epsilon^{-3})`, the only one of the three whose theorem covers
    constraints on y (Y compact). Cost of an iteration: 3K + 3 passes, of which one is saved where f
    does not depend on x; central 4K + 4, of which two are. Upper of the record is f at
    :math:`x^k` and the y before its last step, lower is g at :math:`(x^k, y^{k+1})`: where the
    iteration last evaluates them. Its multiplier is the weight of the gap, :math:`1/\sigma` or
    :math:`1/(2\sigma)`.

    Args:
        params: The two parameter groups, see
            :class:`~lightning_bilevel.solvers.base.BilevelOptimizer`.
        eta: :math:`\eta`, the step of x.
        tau: :math:`\tau`, the step of y and z; below 1/(Lipschitz constant of the gradient of
            :math:`h_\sigma`, and of 1/rho more with the proximal term).
        sigma: :math:`\sigma`, the distance of the difference quotient (:math:`\nu` for the central
            one, :math:`1/\lambda` in the penalty form).
        K: The steps of y and z per iteration.
        difference: ``"forward"`` or ``"central"``.
        rho: :math:`\rho`, the proximal parameter of Prox-F2BA, below 1/(2 x Lipschitz constant of
            the gradient of g(x, .)); None for no proximal term.
        beta: :math:`\beta`, the share by which the centres follow, at most 1; counts with rho only.

    The default sigma is the official code's penalty of 10, K is 10 and the steps are generic.

    Raises:
        BilevelError: The follower of :math:`-\sigma f + g` runs away: the function is unbounded
            below. A sum :math:`\sigma f + g` is safe for any f that is bounded below, a difference
            is not, unless g dominates or Y is bounded.

    References:
        - Chen, Ma, Zhang: Near-Optimal Nonconvex-Strongly-Convex Bilevel Optimization with Fully
          First-Order Oracles. JMLR.
        - Chen, Xu, Zhang: On Finding Small Hyper-Gradients in Bilevel Optimization: Hardness
          Results and Improved Analysis. COLT 2024 (F2BA under PL).
        - arXiv 2509.02937 (F2SA-p; Algorithm 1 with p = 2).
        - Kwon, Kwon, Wright, Nowak: On Penalty Methods for Nonconvex Bilevel Optimization and
          First-Order Stochastic Approximation. ICLR 2024 (Prox-F2BA).

    Notes:
        The official code of F2BA differs from its papers in two points: it takes the gradient of g
        for the step of y at z, and it resets z to y in each iteration. Both are errors, and here
        the papers are followed. F2SA-p normalises the direction of x, for the stochastic case;
        here the step is plain. Of Prox-F2BA the abstract and another paper's description were at
        hand, its update lines are from memory; whether the y that is reported is the follower (as
        here) or its centre is not known. No source has the proximal term with the central
        difference: it is allowed, without a theorem. Projections are the natural insertion where a
        source has no constraints.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        eta: float = 0.01,
        tau: float = 0.1,
        sigma: float = 0.1,
        K: int = 10,
        difference: Difference = "forward",
        rho: float | None = None,
        beta: float = 1.0,
    ) -> None:
        if beta > 1:
            raise ValueError(
                f"`F2BA(beta={beta!r})` must be at most 1: it is the share by which a centre "
                "follows."
            )
        constants = constants_of(
            locals(),
            lr="eta",
            positive=("eta", "tau", "sigma", "beta", "rho"),
            whole=("K",),
            optional=("rho",),
            choices={"difference": get_args(Difference)},
        )
        super().__init__(params, constants)

    def advance(
        self, problem: BilevelProblem, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, MultiplierInfo]:
        c = self.constants
        sigma = c["sigma"]
        central = c["difference"] == "central"
        here = problem.at(x)
        y_new = y
        z = self.memory.get("z", y)
        z_center = self._center("z", z)
        y_center = self._center("y", y)
        upper = 0.0
        for _ in range(c["K"]):
            if central:
                z = self._backwards(problem, here, z, z_center)
            else:
                z = self._step(problem, z, here.gradient(z), z_center)
            upper, f_y = problem.upper_y(x, y_new)
            slope = sigma * f_y + here.gradient(y_new)
            y_new = self._step(problem, y_new, slope, y_center)
        if central:
            _refuse_far(z, y_new, sigma)
        # x moves with both new followers.
        lower, gap_x = here.gap_x(y_new, z)
        d_x = problem.upper_x(x, y_new)
        weight = 1 / sigma
        if central:
            d_x = (d_x + problem.upper_x(x, z)) / 2
            weight /= 2
        x_new = plain(x, d_x + weight * gap_x, c["eta"], problem.upper_set)
        self.memory["z"] = z
        if c["rho"] is not None and c["beta"] < 1:
            self.memory["z_center"] = z_center + c["beta"] * (z - z_center)
            self.memory["y_center"] = y_center + c["beta"] * (y_new - y_center)
        info = MultiplierInfo(
            upper=upper, lower=lower, inner_iterations=c["K"], lr=c["eta"], multiplier=weight
        )
        return x_new, y_new, info

    def _center(self, name: str, follower: Tensor) -> Tensor:
        """Return the centre of a follower; with beta = 1 it is where the follower starts."""
        if self.constants["beta"] == 1:
            return follower
        center: Tensor = self.memory.get(f"{name}_center", follower)
        return center

    def _step(
        self,
        problem: BilevelProblem,
        follower: Tensor,
        slope: Tensor,
        center: Tensor,
    ) -> Tensor:
        """Return the follower after a step, with the proximal term if there is one."""
        rho = self.constants["rho"]
        if rho is not None:
            slope = slope_of_psi(slope, follower, center, rho)
        return plain(follower, slope, self.constants["tau"], problem.lower_set)

    def _backwards(
        self, problem: BilevelProblem, here: LowerLevel, z: Tensor, center: Tensor
    ) -> Tensor:
        """Return z after a step on -sigma f + g, which may have no minimum."""
        sigma = self.constants["sigma"]
        try:
            _, f_y = problem.upper_y(here.x, z)
            slope = here.gradient(z) - sigma * f_y
        except NonFiniteError as error:
            raise NonFiniteError(f"{error} {_unbounded(sigma)}") from error
        return self._step(problem, z, slope, center)


def _refuse_far(z: Tensor, y: Tensor, sigma: float) -> None:
    far = norm(z - y)
    size = 1.0 + norm(y)
    if not far <= _FAR * size:
        raise BilevelError(
            f"the follower of -sigma f + g is at a distance of {far:.3g} from that of sigma f + g, "
            f"whose norm is {size - 1:.3g}. {_unbounded(sigma)}"
        )


def _unbounded(sigma: float) -> str:
    return (
        f"The central difference with sigma={sigma:g} also minimises -sigma f + g, which seems to "
        "be unbounded below, unless `tau` is too long or f or g is wrong there: make `sigma` "
        'smaller, give the lower level a bounded set such as `Box`, or take difference="forward".'
    )
