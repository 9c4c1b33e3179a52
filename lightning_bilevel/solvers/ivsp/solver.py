"""IVSP, the inexact variable-smoothing penalty method."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.core.errors import BilevelError, InnerLoopError, LineSearchError, NonFiniteError
from lightning_bilevel.core.lower import LowerLevel
from lightning_bilevel.core.moreau import Envelope, evaluate_gap, gradient_error
from lightning_bilevel.core.problem import BilevelProblem, Upper
from lightning_bilevel.core.prox import inexact_prox
from lightning_bilevel.core.sets import ConvexSet, Product
from lightning_bilevel.core.vectors import dot, norm, squared_distance
from lightning_bilevel.solvers.base import BilevelOptimizer, StepInfo
from lightning_bilevel.solvers.ivsp.choose import PER_TASK, adapted_accuracy, choose, corrected, explain
from lightning_bilevel.solvers.ivsp.constants import check_constants
from lightning_bilevel.solvers.ivsp.faults import check_trials, warn_of_stall
from lightning_bilevel.solvers.ivsp.linesearch import allowance, backtrack, barzilai_borwein
from lightning_bilevel.solvers.ivsp.penalty import (
    SmoothingName,
    inverse_penalty,
    needs_update,
    prox_accuracy,
    smoothing_function,
    smoothing_parameter,
)

__all__ = ["IVSP", "IVSPInfo"]

# Trials of one line search whose inner loop may fail before the search gives up: each costs max_inner gradients.
_MAX_FAILURES = 5
# With rho = 1/(4 L_yy) the inner loop's error falls by 0.4 in each iteration: one that takes so many is at a point where g is
# far more curved, which a shorter step keeps clear of.
_MAX_INNER = 200
# The grid of inverse penalties where IVSP chooses for itself: an update halves.
_RATIO = 0.5
# Times the rounding of g: an evaluation cannot be more accurate than that.
_FLOOR = 4.0


@dataclass(frozen=True)
class IVSPInfo(StepInfo):
    r"""What one outer iteration of IVSP did.

    Attributes:
        residual: :math:`\tilde R^{k+1}`, the relaxed Moreau gap at the new point.
        mu: :math:`\mu_k`, the smoothing.
        zeta: :math:`\zeta_{k+1}`, the accuracy of the Moreau evaluation at the new point.
        gamma: :math:`\gamma_k`, the inverse penalty.
        multiplier: :math:`\tilde\lambda_{k+1} = \phi'_{\mu_k}(\tilde R^{k+1}) / \gamma_k`.
        penalty_updated: Whether this iteration strengthened the penalty.
        penalty_updates: How often that has happened, :math:`t_{k+1}`.
        trials: Trials of the line search.
        L: The accepted :math:`L_k`.
        L_start: The first trial's :math:`L_{k,0}`.
        gamma_next: :math:`\gamma_{k+1}`, the inverse penalty of the next iteration.
        threshold: :math:`2 a_\phi \mu_k`, above which a residual strengthens the penalty,
        step_bound: :math:`c_2 \mu_k \gamma_k`, if the step is at most that.
        halvings: How often the step of the inner loop has been halved.
        capped: Whether the line search used up its trials or ended at L_max.
    """

    residual: float
    mu: float
    zeta: float
    gamma: float
    multiplier: float
    penalty_updated: bool
    penalty_updates: int
    trials: int
    L: float
    L_start: float
    gamma_next: float
    threshold: float
    step_bound: float
    halvings: int
    capped: bool

    NAMES: ClassVar[dict[str, str]] = {
        **StepInfo.NAMES,
        "residual": "bilevel/moreau_gap",
        "mu": "bilevel/smoothing",
        "gamma": "bilevel/penalty",
        "penalty_updates": "bilevel/penalty_updates",
        "multiplier": "bilevel/multiplier",
        "trials": "bilevel/trials",
    }
    SHOWN: ClassVar[tuple[str, ...]] = ("bilevel/upper", "bilevel/moreau_gap", "bilevel/penalty")

    @property
    def violation(self) -> float:
        """How far the relaxed gap constraint is violated, as the solver sees it."""
        return max(self.residual, 0.0)


@dataclass(frozen=True)
class _Point:
    """All that is known at w = (x, y)."""

    w: Tensor
    f: float
    grad_f: Tensor
    z: Tensor
    lower: float
    residual: float
    grad_R: Tensor
    halvings: int

    def direction(self, gamma: float, weight: float) -> Tensor:
        """Return gamma grad f + weight grad R, made where it is needed: it is not held while a trial is evaluated."""
        return (gamma * self.grad_f).add_(self.grad_R, alpha=weight)


class _Parameters(NamedTuple):
    """mu, zeta and gamma of an outer iteration."""

    mu: float
    zeta: float
    gamma: float


@dataclass(frozen=True)
class _Trial:
    accepted: bool
    merit: float
    bound: float
    step: float
    point: _Point | None

    def __str__(self) -> str:
        return f"the last trial has merit {self.merit:.9g}, to be at most {self.bound:.9g}, after a step of {self.step:.3g}."


class IVSP(BilevelOptimizer):
    r"""Inexact variable-smoothing penalty method.

    It solves the relaxed problem :math:`\min_{w \in C} f(w)` s.t. :math:`R(w) \le 0`, with the Moreau gap R of
    :mod:`lightning_bilevel.core.moreau`, by one projected-gradient step per iteration on a smoothed exact penalty. With
    :math:`w = (x, y)`, :math:`C = X \times Y` and :math:`\tilde z^k`, :math:`\tilde R^k` from an inexact evaluation:

    .. math::
        w_L &= P_C\bigl(w^k - \tfrac{\mu_k}{L} [\gamma_k \nabla f(w^k) + \phi'_{\mu_k}(\tilde R^k) \tilde\nabla R(w^k)]\bigr) \\
        \text{accept if}\quad \gamma_k f(w_L) &+ \phi_{\mu_k}(\tilde R_L + \zeta_{k+1})
          \le \gamma_k f(w^k) + \phi_{\mu_k}(\tilde R^k) - \tfrac{c_1}{2\mu_k}\|w_L - w^k\|^2 + \tau_{k,L} \\
        t_{k+1} &= t_k + 1 \quad\text{if } \tilde R^{k+1} > 2 a_\phi \mu_k \text{ and } \|w^{k+1} - w^k\| \le c_2\mu_k\gamma_k

    otherwise L doubles. :math:`\tau_{k,L}` is the allowance for the inexact evaluation.

    Assumption on g: g(x, .) is sigma-weakly convex (it may be nonconvex). Guarantee: an epsilon-KKT point of the relaxed
    problem in :math:`\tilde O(\epsilon^{-3})` first-order evaluations, if the constraint qualification ENNAMCQ holds.
    Cost of an iteration with J inner iterations and one trial: J gradients of g in y, one pass of g(x, y) - g(x, z) and one
    of f.

    Args:
        params: The two parameter groups, see :class:`~lightning_bilevel.solvers.base.BilevelOptimizer`.
        rho: :math:`\rho`, the Moreau parameter; ``rho * sigma`` must be below 1.
        sigma: :math:`\sigma`, the weak-convexity modulus of g(x, .); 0 for a convex lower level.
        delta: :math:`\delta`, the relaxation, in the unit of g: the lower level ends nearly stationary up to
            :math:`O(\sqrt\delta)`.
        mu0: :math:`\mu_0`, the first smoothing.
        block: B, how many iterations share one smoothing: :math:`\mu_k = \mu_0 (1 + \lfloor k/B \rfloor)^{-r}`.
        r: The power by which the smoothing falls, between 0 and 1; 1/3 balances the rates.
        q: The power of the accuracy :math:`\zeta_k = \bar\zeta \mu_k^q`, above 1/r; None is 1/r + 0.01.
        gamma0: :math:`\gamma_0`, the first inverse penalty: :math:`\gamma_t = \gamma_0 (t + 1)^{-1/2}`, or
            :math:`\gamma_0 2^{-t}` where IVSP chooses constants for itself.
        zeta_bar: :math:`\bar\zeta`, the scale of the accuracy.
        c1: :math:`c_1`, the decrease that the line search asks for.
        c2: :math:`c_2`, how small a step must be before a remaining violation strengthens the penalty.
        L_init: :math:`L_{0,0}`, where the first line search starts.
        bb: Which Barzilai-Borwein step a line search starts from: ``"short"`` (the paper's), or ``"long"``, which is less
            timid where a few directions are much stiffer than the others. IVSP's choice is the long one as long as it is
            accepted at once.
        L_min: The smallest start of a line search.
        L_max: The largest start of a line search.
        L_xy: Lipschitz constant of :math:`\nabla_x g(x, \cdot)`.
        L_yy: Lipschitz constant of :math:`\nabla_y g(x, \cdot)`; the inner step is 1/(L_yy + 1/rho).
        inner: How a Moreau evaluation is made: ``"gradient"`` (the paper's), or ``"accelerated"``, which takes about the square
            root of as many iterations where rho * L_yy is large.
        B_R: Bound on the norm of the gradient of R.
        theta_low: :math:`\underline\vartheta`, the lower bound in the allowance :math:`\tau`.
        theta_hat: :math:`\hat\vartheta`, in (0, 2), the upper bound in the allowance, as a multiple of L.
        smoothing: The smoothed plus function, ``"huber"`` (centered Huber) or ``"softplus"``.
        fixed_L: A constant L instead of the line search (the paper's Strategy I).
        max_trials: The cap on the trials of one line search.
        max_inner: The cap on the iterations of one Moreau evaluation.

    A constant that is None is chosen at the first step, from a few gradients there
    (:mod:`lightning_bilevel.solvers.ivsp.choose` says how), and is constant from then on, through checkpoints too. With rho,
    sigma, mu0, block, gamma0, zeta_bar, L_init, L_xy and L_yy all given, nothing is chosen: this is the paper's algorithm,
    with its constants c1 = 1e-4, c2 = 1, L_min = 1e-11, L_max = 1e11, B_R = 1000 and the short step.

    References:
        Alcantara, Inoue, Takeda: Improved KKT Complexity for First-Order Bilevel Optimization under Weak Lower-Level
        Convexity (Algorithms 1 to 3).
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        rho: float | None = None,
        sigma: float | None = None,
        delta: float = 1e-3,
        mu0: float | None = None,
        block: int | None = None,
        r: float = 1 / 3,
        q: float | None = None,
        gamma0: float | None = None,
        zeta_bar: float | None = None,
        c1: float | None = None,
        c2: float | None = None,
        L_init: float | None = None,
        bb: Literal["short", "long"] | None = None,
        L_min: float | None = None,
        L_max: float | None = None,
        L_xy: float | None = None,
        L_yy: float | None = None,
        inner: Literal["gradient", "accelerated"] = "gradient",
        B_R: float | None = None,
        theta_low: float = 1e-24,
        theta_hat: float = 1.99,
        smoothing: SmoothingName = "huber",
        fixed_L: float | None = None,
        max_trials: int = 100,
        max_inner: int = 10_000,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "params", "__class__")}
        check_constants(given)
        given["q"] = 1 / r + 0.01 if q is None else q
        # What is left out is chosen at the first step, which knows the problem, and then as constant as what was given.
        left_out = [name for name in PER_TASK if given[name] is None]
        super().__init__(params, {"lr": 0.0, "unit": None, "estimated": " ".join(left_out), **given})
        self.memory.update(penalty_updates=0, halvings=0, multiplier=0.0)

    def _forget(self) -> None:
        super()._forget()
        self._known: _Point | None = None
        self._scaled: tuple[BilevelProblem, BilevelProblem] | None = None
        self._stalled = False
        # Whether the state is that of a checkpoint, or of a solver that was copied.
        self._loaded = True

    @property
    def adaptive(self) -> bool:
        """Whether IVSP chooses constants for itself: one that the paper chooses per task was left out."""
        return bool(self.constants["estimated"])

    @property
    def chosen(self) -> list[tuple[str, str]]:
        """The constants that this run has chosen for itself, each with its value and where that comes from."""
        return explain(self.constants) if self.constants["unit"] is not None else []

    @property
    def envelope(self) -> Envelope | None:
        """rho, sigma and delta; None as long as they have to be chosen at the first step."""
        c = self.constants
        return None if c["rho"] is None or c["sigma"] is None else Envelope(rho=c["rho"], sigma=c["sigma"], delta=c["delta"])

    @property
    def multiplier(self) -> float:
        return float(self.memory["multiplier"])

    def record(self, **known: Any) -> IVSPInfo:
        return IVSPInfo(**known)

    def advance(self, problem: BilevelProblem, x: Tensor, y: Tensor, unchanged: bool) -> tuple[Tensor, Tensor, dict[str, Any]]:
        if self.constants["unit"] is None:
            self._choose(problem, x, y)
        unit = self.constants["unit"]
        if unit == 1.0:
            return self._iterate_or_tell(problem, x, y, unchanged)
        if self._scaled is None or self._scaled[0] is not problem:
            self._scaled = problem, problem.in_units(upper=unit)
        scaled = self._scaled[1]
        scaled.calls = problem.calls
        try:
            # A unit is a power of two: neither way rounds.
            x, y, facts = self._iterate_or_tell(scaled, x / unit, y, unchanged)
        finally:
            problem.calls = scaled.calls
        return unit * x, y, facts

    @torch.no_grad()
    def probe(self, problem: BilevelProblem, x: Tensor, y: Tensor) -> list[tuple[str, str]]:
        """Return the constants that would be chosen for a run from (x, y), each with its value and where that comes from."""
        return explain(choose(problem, x, y, self.constants))

    def _choose(self, problem: BilevelProblem, x: Tensor, y: Tensor) -> None:
        chosen = choose(problem, x, y, self.constants)
        for group in self.param_groups:
            group.update({name: value for name, value in chosen.items() if name not in ("params", "level")})
        self.memory["L_start"] = float(chosen["fixed_L"] or chosen["L_init"])

    def _iterate_or_tell(
        self, problem: BilevelProblem, x: Tensor, y: Tensor, unchanged: bool
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        known = self._known if unchanged else None
        try:
            return self._iterate(problem, x, y, unchanged)
        except (InnerLoopError, LineSearchError):
            # Where f or g has changed meanwhile, that is the cause.
            if known is None:
                problem.check(x, y)
            else:
                problem.check_unchanged(x, y, known.f, known.lower)
            raise

    def _iterate(self, problem: BilevelProblem, x: Tensor, y: Tensor, unchanged: bool) -> tuple[Tensor, Tensor, dict[str, Any]]:
        c, memory, inner = self.constants, self.memory, problem.calls.lower
        k, t, L_start = memory["iteration"], memory["penalty_updates"], memory["L_start"]
        phi, now, zeta_next = smoothing_function(c["smoothing"]), self._parameters(k, t), self._parameters(k + 1, t).zeta
        split, C = x.numel(), Product([problem.upper_set, problem.lower_set], [x.numel(), y.numel()])
        if self.adaptive:
            now = now._replace(zeta=memory.get("zeta", now.zeta))

        here = self._current(problem, x, y, now.zeta, unchanged)
        E = self._error(here, now)
        if self.adaptive:
            here, now, E, needed = self._adapted(problem, here, now, E, C)
            zeta_next = min(zeta_next, needed)
        weight = phi.slope(here.residual, now.mu)
        merit = now.gamma * here.f + phi.value(here.residual, now.mu)
        failures: list[BilevelError] = []

        def trial(L: float) -> _Trial:
            # w_L = P_C(w - (mu/L) [gamma grad f + G])
            moved = here.direction(now.gamma, weight).mul_(now.mu / L)
            w = C.project(torch.sub(here.w, moved, out=moved))
            del moved
            d = math.sqrt(sum(squared_distance(a, b) for a, b in ((w[:split], here.w[:split]), (w[split:], here.w[split:]))))
            try:
                there = self._evaluate(problem, w, split, here.z, zeta_next, trial=True)
            except (NonFiniteError, InnerLoopError) as error:
                # A shorter step may lead to where g can be evaluated; an inner loop that fails again and again cannot.
                if not failures and isinstance(error, InnerLoopError):
                    # Before further trials fail likewise: with f or g that change, all of them would.
                    problem.check_unchanged(x, y, here.f, here.lower)
                failures.append(error)
                costly = not self._conditioned and sum(isinstance(e, InnerLoopError) for e in failures) > _MAX_FAILURES
                if c["fixed_L"] is not None or costly:
                    raise
                return _Trial(False, math.inf, merit, d, None)
            # gamma f(w_L) + phi(R_L + zeta+) <= gamma f(w) + phi(R) - c1/(2 mu) |w_L - w|^2 + tau
            value = now.gamma * there.f + phi.value(there.residual + zeta_next, now.mu)
            tau = allowance(d, L, now.mu, E, theta_low=c["theta_low"], theta_hat=c["theta_hat"]) + now.zeta + zeta_next
            bound = merit - c["c1"] / (2 * now.mu) * d**2 + tau + self._rounding(here, there, now.gamma)
            return _Trial(c["fixed_L"] is not None or value <= bound, value, bound, d, there)

        try:
            accepted, L, trials = backtrack(trial, L_start, c["max_trials"])
        except LineSearchError:
            check_trials(failures, c["max_trials"])
            raise
        there = accepted.point
        assert there is not None
        if accepted.step == 0.0:
            check_trials(failures, trials - 1)
            self._stalled = self._stalled or warn_of_stall(k + 1, trials, merit, here.w, here.direction(now.gamma, weight), C)
        updated = needs_update(there.residual, accepted.step, mu=now.mu, gamma=now.gamma, a=phi.a, c2=c["c2"])
        then = self._parameters(k + 1, t + updated)
        if c["fixed_L"] is None:
            # The next start is known already now, so nothing of the previous point needs keeping.
            dv = torch.sub(there.grad_f, here.grad_f).mul_(then.gamma)
            dv.add_(phi.slope(there.residual, then.mu) * there.grad_R).sub_(weight * here.grad_R)
            dw_dv, dv_dv = _dot(there.w - here.w, dv, split), _dot(dv, dv, split)
            # Left out, it is the long step as long as that is accepted at once.
            long = c["bb"] == "long" or (c["bb"] is None and trials == 1)
            dw_dw = accepted.step**2 if long else None
            memory["L_start"] = barzilai_borwein(dw_dv, dv_dv, then.mu, L_start, c["L_min"], c["L_max"], dw_dw=dw_dw)
        for group in self.param_groups:
            group["lr"] = now.mu / L
        memory.update(penalty_updates=t + updated, multiplier=phi.slope(there.residual, now.mu) / now.gamma)
        if self.adaptive:
            memory["zeta"] = zeta_next
        self._keep(there)
        facts = {"upper": there.f, "lower": there.lower, "residual": there.residual, "multiplier": memory["multiplier"]}
        facts |= {"mu": now.mu, "zeta": zeta_next, "gamma": now.gamma, "L": L, "L_start": L_start, "step": accepted.step}
        facts |= {"penalty_updated": updated, "penalty_updates": t + updated, "trials": trials, "gamma_next": then.gamma}
        facts |= {"threshold": 2 * phi.a * now.mu, "step_bound": c["c2"] * now.mu * now.gamma, "halvings": memory["halvings"]}
        facts |= {"capped": trials >= c["max_trials"] or c["L_max"] <= L}
        return there.w[:split], there.w[split:], {**facts, "inner_iterations": problem.calls.lower - inner}

    def _parameters(self, k: int, t: int) -> _Parameters:
        c = self.constants
        mu = smoothing_parameter(k, c["mu0"], c["block"], c["r"])
        return _Parameters(
            mu, prox_accuracy(mu, c["zeta_bar"], c["q"]), inverse_penalty(t, c["gamma0"], _RATIO if self.adaptive else None)
        )

    @property
    def _L_xy(self) -> float:
        """The constant in the unit that x is measured in."""
        return float(self.constants["unit"] * self.constants["L_xy"])

    @property
    def _envelope(self) -> Envelope:
        envelope = self.envelope
        assert envelope is not None  # from the first step on
        return envelope

    def _error(self, here: _Point, now: _Parameters) -> float:
        """Bound the error of the gradient of the smoothed penalty, with B_R given or the largest seen so far."""
        c, b, L_xy = self.constants, smoothing_function(self.constants["smoothing"]).b, self._L_xy
        B_R = c["B_R"]
        if B_R is None:
            error = gradient_error(now.zeta, now.mu, self._envelope, L_xy=L_xy, b=0.0, B_R=0.0)
            B_R = self.memory["B_R"] = max(self.memory.get("B_R", 0.0), norm(here.grad_R) + error)
        return gradient_error(now.zeta, now.mu, self._envelope, L_xy=L_xy, b=b, B_R=B_R)

    def _mapping(self, here: _Point, now: _Parameters, C: ConvexSet) -> float:
        """The gradient mapping that the first trial will have."""
        scale = float(now.mu / self.memory["L_start"])
        weight = smoothing_function(self.constants["smoothing"]).slope(here.residual, now.mu)
        moved = here.direction(now.gamma, weight).mul_(scale)
        return math.sqrt(squared_distance(C.project(torch.sub(here.w, moved, out=moved)), here.w)) / scale

    def _accuracy(self, mapping: float, here: _Point, now: _Parameters) -> float:
        """The accuracy at which the gradient's error is a tenth of the mapping, or what rounding leaves of it."""
        b, B_R = smoothing_function(self.constants["smoothing"]).b, float(self.constants["B_R"] or self.memory["B_R"])
        wanted = adapted_accuracy(mapping, now.mu, self._envelope, L_xy=self._L_xy, b=b, B_R=B_R)
        return max(wanted, _FLOOR * torch.finfo(here.w.dtype).eps * abs(here.lower))

    def _adapted(
        self, problem: BilevelProblem, here: _Point, now: _Parameters, E: float, C: ConvexSet
    ) -> tuple[_Point, _Parameters, float, float]:
        """Evaluate R at the current point again where its error E is more than a fifth of the step's promise.

        Returns:
            The point with its parameters and its error, and the accuracy that the step from it needs.
        """
        mapping = self._mapping(here, now, C)
        needed = self._accuracy(mapping, here, now)
        if mapping / 5 >= E or needed >= now.zeta:
            return here, now, E, needed
        split = here.w.numel() - here.z.numel()
        lower, y = problem.at(here.w[:split]), here.w[split:]
        z, halvings = self._prox(problem, lower, y, here.z, needed)
        gap = evaluate_gap(lower, y, z, self._envelope)
        grad_R = torch.cat([gap.grad_x, gap.grad_y])
        here = replace(here, z=z, lower=gap.lower, residual=gap.residual, grad_R=grad_R, halvings=halvings)
        now = now._replace(zeta=needed)
        E = self._error(here, now)
        return here, now, E, self._accuracy(self._mapping(here, now, C), here, now)

    def _current(self, problem: BilevelProblem, x: Tensor, y: Tensor, zeta: float, unchanged: bool) -> _Point:
        """Return what is known at the current point: from the last iteration, from a checkpoint, or evaluated anew."""
        if unchanged and self._known is not None:
            return self._known
        here = self._known_or_new(problem, x, y, zeta)
        self._keep(here)
        self._loaded = False
        return here

    def _known_or_new(self, problem: BilevelProblem, x: Tensor, y: Tensor, zeta: float) -> _Point:
        w, z, calls, lower = torch.cat([x, y]), self.memory.get("z"), problem.calls, problem.at(x)
        if z is None or z.shape != y.shape:
            return self._evaluate(problem, w, x.numel(), y, zeta)
        # What is known is z and the values that it gave. If f and R are still those, the data are the same, z is as accurate as
        # it was, and the run goes on exactly as if nothing had come between.
        f = problem.upper(lower.x, y)
        if f.value == self.memory["f"]:
            saved = self._measure(problem, lower, w, y, z, self.memory["halvings"], f)
            if saved.residual == self.memory["residual"]:
                if self._loaded:
                    problem.calls = calls  # a run that was not stopped knows all this
                return saved
        z, halvings = self._prox(problem, lower, y, z, zeta)
        return self._measure(problem, lower, w, y, z, halvings, f)

    @property
    def _conditioned(self) -> bool:
        """Whether rho was chosen such that the inner loop converges fast."""
        return {"rho", "L_yy"} <= set(self.constants["estimated"].split())

    def _evaluate(self, problem: BilevelProblem, w: Tensor, split: int, z: Tensor, zeta: float, *, trial: bool = False) -> _Point:
        """Evaluate f and, up to zeta, R at w = (x, y), from the warm start z."""
        lower, y = problem.at(w[:split]), w[split:]
        z, halvings = self._prox(problem, lower, y, z, zeta, trial=trial)
        return self._measure(problem, lower, w, y, z, halvings)

    def _prox(
        self, problem: BilevelProblem, lower: LowerLevel, y: Tensor, z: Tensor, zeta: float, *, trial: bool = False
    ) -> tuple[Tensor, int]:
        c = self.constants
        return inexact_prox(
            lower,
            y,
            z,
            zeta,
            self._envelope,
            problem.lower_set,
            L_yy=c["L_yy"],
            halvings=self.memory["halvings"],
            max_inner=min(c["max_inner"], _MAX_INNER) if trial and self._conditioned else c["max_inner"],
            accelerated=c["inner"] == "accelerated",
        )

    def _keep(self, point: _Point) -> None:
        """Remember the point that was reached; what a rejected trial found out about g does not hold here."""
        first = point.halvings > self.memory["halvings"] == 0
        self.memory.update(halvings=point.halvings, z=point.z, f=point.f, residual=point.residual)
        self._known = point
        if first and "L_yy" in self.constants["estimated"]:
            # g has become more curved than it was: so has everything that was chosen from its curvature.
            for group in self.param_groups:
                group.update(corrected(group, 2**point.halvings))
            self.memory["halvings"] = 0
            self._known = None  # R has another rho now
        elif first:
            warnings.warn(
                f"The inner loop diverged with its step 1/(L_yy + 1/rho), L_yy={self.constants['L_yy']:g}: the lower level is "
                f"more curved than that. The step was divided by {2**point.halvings} and will be divided further if need be, "
                "without a word.",
                stacklevel=2,
            )

    def _rounding(self, here: _Point, there: _Point, gamma: float) -> float:
        """The rounding error that the Armijo test has to allow for."""
        dtype = here.w.dtype
        size = gamma * (abs(here.f) + abs(there.f)) + 2 * (abs(here.lower) + abs(there.lower))
        if self.adaptive:
            return float(torch.finfo(dtype).eps * size)
        # The paper's 1e-12 is for float64.
        return 1e-12 + (0.0 if dtype == torch.float64 else torch.finfo(dtype).eps * size)

    def _measure(
        self,
        problem: BilevelProblem,
        lower: LowerLevel,
        w: Tensor,
        y: Tensor,
        z: Tensor,
        halvings: int,
        f: Upper | None = None,
    ) -> _Point:
        # The gap first: it needs more memory than f, and so has not to hold the gradient of f as well.
        gap = evaluate_gap(lower, y, z, self._envelope)
        at_y, residual, grad_R = gap.lower, gap.residual, torch.cat([gap.grad_x, gap.grad_y])
        del gap
        f = problem.upper(lower.x, y) if f is None else f
        grad_f = torch.cat([f.grad_x, f.grad_y])
        return _Point(w=w, f=f.value, grad_f=grad_f, z=z, lower=at_y, residual=residual, grad_R=grad_R, halvings=halvings)


def _dot(a: Tensor, b: Tensor, split: int) -> float:
    """<a, b> over w = (x, y), each level summed on its own: x may be one number and y a million."""
    return dot(a[:split], b[:split]) + dot(a[split:], b[split:])
