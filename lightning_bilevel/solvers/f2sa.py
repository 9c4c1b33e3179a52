"""F2SA, the fully first-order method, and F2BA, its form with a fixed penalty and two relatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_bilevel.core.errors import BilevelError, NonFiniteError
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.prox import slope_of_psi
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.solvers.base import BilevelOptimizer, Method, State
from lightning_bilevel.solvers.constants import Power, choice, positive, schedule, whole
from lightning_bilevel.solvers.record import StepInfo

# Two followers of a strongly convex g are a distance of about sigma apart. At this many times the
# size of y, one of them is on its way to infinity.
_FAR = 1e3
_UNBOUNDED = (
    "The central difference with sigma={:g} seems to minimise a function -sigma f + g that is "
    'unbounded below: make `sigma` smaller, Y bounded, or take difference="forward".'
)


@dataclass(frozen=True, kw_only=True)
class FollowerState(State):
    """The state of both methods.

    Attributes:
        z: The follower of the lower level's minimiser; None before the first iteration.
        centers: Of F2BA, those of z and y; None where a follower starts at its centre.
    """

    z: Tensor | None = None
    centers: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class F2SAMethod(Method[FollowerState]):
    """The constants of F2SA and its iteration."""

    alpha: Power = schedule(0.01)
    gamma: Power = schedule(0.01)
    xi: float = positive(1.0)
    lambda0: float = positive(1.0)
    T: int = whole(1)
    multiplier: Literal["growing", "constant"] = choice("growing", "growing", "constant")

    def lr_at(self, k: int) -> float:
        return self.xi * self.alpha.at(k)

    def step(self, problem: BilevelProblem, s: FollowerState) -> tuple[FollowerState, StepInfo]:
        k, Y, here = s.k, problem.lower_set, problem.at(s.x)
        alpha, gamma = self.alpha.at(k), s.rate_y(self.gamma.at(k))
        weight = self.lambda0
        if self.multiplier == "growing":
            weight *= self.alpha.at(0) / alpha
        y, z, upper = s.y, s.y if s.z is None else s.z, 0.0
        for _ in range(self.T):
            z = Y.project(z - gamma * here.gradient(z))
            upper, f_y = problem.upper_y(s.x, y)
            y = Y.project(y - s.rate_y(alpha) * (f_y + weight * here.gradient(y)))
        # x moves with the new y and z.
        lower, gap_x = here.gap_x(y, z)
        d_x = problem.upper_x(s.x, y) + weight * gap_x
        x = problem.upper_set.project(s.x - s.rate_x(self.xi * alpha) * d_x)
        info = StepInfo(upper=upper, lower=lower, inner_iterations=self.T, multiplier=weight)
        return s.after(x, y, z=z), info


class F2SA(BilevelOptimizer):
    r"""Fully first-order method (the paper's stochastic approximation, run on full batches).

    It solves :math:`\min_x \min_y \max_z f(x, y) + \lambda_k (g(x, y) - g(x, z))`, the penalty form
    of the value-function problem, from :math:`z^0 = y^0`. T times within iteration k, and then
    once:

    .. math::
        z &\leftarrow P_Y\bigl(z - \gamma_k \nabla_y g(x^k, z)\bigr), \qquad
          y \leftarrow P_Y\bigl(y - \alpha_k [\nabla_y f(x^k, y)
          + \lambda_k \nabla_y g(x^k, y)]\bigr) \\
        x^{k+1} &= P_X\bigl(x^k - \xi \alpha_k [\nabla_x f(x^k, y^{k+1})
          + \lambda_k (\nabla_x g(x^k, y^{k+1}) - \nabla_x g(x^k, z^{k+1}))]\bigr) \\
        \lambda_k &= \lambda_0 \alpha_0 / \alpha_k

    Assumption on g: g(x, .) is strongly convex. Guarantee: stationarity of the hyper-objective
    :math:`f(x, y^*(x))` up to epsilon in :math:`\tilde O(\epsilon^{-3})` iterations. Cost of an
    iteration: 3T + 3 passes, of which one is saved where f does not depend on x. Upper of the
    record is f at :math:`x^k` and the y before its last step, lower is g at :math:`(x^k, y^{k+1})`:
    where the iteration last evaluates them. Its multiplier is :math:`\lambda_k`.

    Args:
        params: The two parameter groups, see
            :class:`~lightning_bilevel.solvers.base.BilevelOptimizer`.
        alpha: :math:`\alpha_k`, the step of y, and times xi that of x.
        gamma: :math:`\gamma_k`, the step of z.
        xi: :math:`\xi`, the ratio of the steps of x and y.
        lambda0: :math:`\lambda_0`, the first multiplier.
        T: The steps of z and y per iteration.
        multiplier: ``"growing"`` is :math:`\lambda_k = \lambda_0 \alpha_0/\alpha_k`, ``"constant"``
            is :math:`\lambda_k = \lambda_0`; with a constant alpha they agree.

    alpha and gamma are numbers or schedules (:class:`~lightning_bilevel.solvers.constants.Power`).
    The defaults are generic.

    References:
        Kwon, Kwon, Wright, Nowak: A Fully First-Order Method for Stochastic Bilevel Optimization.
            ICML 2023.

    Notes:
        The paper that this library follows does not state the growth of the multiplier.
        ``"growing"`` is the scaling of the method's deterministic theory, a multiplier in
        proportion to 1/alpha; the constant one is nearly as plausible.
    """

    method_type = F2SAMethod


@dataclass(frozen=True, kw_only=True)
class F2BAMethod(Method[FollowerState]):
    """The constants of F2BA and its iteration."""

    eta: float = positive(0.01)
    tau: float = positive(0.1)
    sigma: float = positive(0.1)
    K: int = whole(10)
    difference: Literal["forward", "central"] = choice("forward", "forward", "central")
    rho: float | None = positive(None)
    beta: float = positive(1.0, most=1.0)

    def step(self, problem: BilevelProblem, s: FollowerState) -> tuple[FollowerState, StepInfo]:
        sigma, central = self.sigma, self.difference == "central"
        here, tau = problem.at(s.x), s.rate_y(self.tau)
        y, z, upper = s.y, s.y if s.z is None else s.z, 0.0
        z_bar, y_bar = s.centers or (z, y)

        def follow(follower: Tensor, slope: Tensor, center: Tensor) -> Tensor:
            if self.rho is not None:
                slope = slope_of_psi(slope, follower, center, s.rate_y(self.rho))
            return problem.lower_set.project(follower - tau * slope)

        def slope_of_z() -> Tensor:
            if not central:
                return here.gradient(z)
            try:
                _, f_y = problem.upper_y(s.x, z)
                return here.gradient(z) - sigma * f_y
            except NonFiniteError as error:
                raise NonFiniteError(f"{error} {_UNBOUNDED.format(sigma)}") from error

        for _ in range(self.K):
            z = follow(z, slope_of_z(), z_bar)
            upper, f_y = problem.upper_y(s.x, y)
            y = follow(y, sigma * f_y + here.gradient(y), y_bar)
        if central and not norm(z - y) <= _FAR * (s.units[1] + norm(y)):
            raise BilevelError(f"the follower of -sigma f + g ran away. {_UNBOUNDED.format(sigma)}")
        # x moves with both new followers.
        lower, gap_x = here.gap_x(y, z)
        d_x, weight = problem.upper_x(s.x, y), 1 / sigma
        if central:
            d_x, weight = (d_x + problem.upper_x(s.x, z)) / 2, weight / 2
        x = problem.upper_set.project(s.x - s.rate_x(self.eta) * (d_x + weight * gap_x))
        centers = None
        if self.rho is not None and self.beta < 1:
            centers = (z_bar + self.beta * (z - z_bar), y_bar + self.beta * (y - y_bar))
        info = StepInfo(upper=upper, lower=lower, inner_iterations=self.K, multiplier=weight)
        return s.after(x, y, z=z, centers=centers), info


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

    method_type = F2BAMethod
