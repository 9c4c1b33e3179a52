"""IVSP, the inexact variable-smoothing penalty method."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lightning_bilevel.core.errors import InnerLoopError, LineSearchError
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import Product
from lightning_bilevel.solvers.arguments import arguments_of
from lightning_bilevel.solvers.ivsp.answers import Answers
from lightning_bilevel.solvers.ivsp.change import EVERY, MOST, change_of, shortening
from lightning_bilevel.solvers.ivsp.choose import choose, explain
from lightning_bilevel.solvers.ivsp.constants import Constants, checked_constants, values_of
from lightning_bilevel.solvers.ivsp.linesearch import barzilai_borwein, next_excess
from lightning_bilevel.solvers.ivsp.penalty import SmoothingName
from lightning_bilevel.solvers.ivsp.point import Evaluator, Point
from lightning_bilevel.solvers.ivsp.rules import Paper, rules_for
from lightning_bilevel.solvers.ivsp.search import (
    Armijo,
    Merit,
    backtrack,
    check_trials,
    warn_of_ascent,
    warn_of_stall,
)
from lightning_bilevel.solvers.proved import keep, restart
from lightning_bilevel.solvers.record import PenaltyInfo

__all__ = ["IVSP", "IVSPInfo"]


@dataclass(frozen=True, kw_only=True)
class IVSPInfo(PenaltyInfo):
    """The record of one outer iteration of IVSP."""


class IVSP(Answers):
    r"""Inexact variable-smoothing penalty method.

    It solves the relaxed problem :math:`\min_{w \in C} f(w)` s.t. :math:`R(w) \le 0`, with the
    Moreau gap R of :mod:`lightning_bilevel.core.moreau`, by one projected-gradient step per
    iteration on a smoothed exact penalty. With :math:`w = (x, y)`, :math:`C = X \times Y` and
    :math:`\tilde z^k`, :math:`\tilde R^k` from an inexact evaluation:

    .. math::
        w_L &= P_C\bigl(w^k - \tfrac{\mu_k}{L} [\gamma_k \nabla f(w^k)
          + \phi'_{\mu_k}(\tilde R^k) \tilde\nabla R(w^k)]\bigr) \\
        \text{accept if}\quad \gamma_k f(w_L) &+ \phi_{\mu_k}(\tilde R_L + \zeta_{k+1})
          \le \gamma_k f(w^k) + \phi_{\mu_k}(\tilde R^k)
          - \tfrac{c_1}{2\mu_k}\|w_L - w^k\|^2 + \tau_{k,L} \\
        t_{k+1} &= t_k + 1 \quad\text{if } \tilde R^{k+1} > 2 a_\phi \mu_k
          \text{ and } \|w^{k+1} - w^k\| \le c_2\mu_k\gamma_k

    If a trial is rejected, L doubles. :math:`\tau_{k,L}` is the allowance for the inexact
    evaluation. The smoothing falls as :math:`\mu_k = \mu_0 (1 + \lfloor k/B \rfloor)^{-r}`, and the
    inverse penalty on a grid: :math:`\gamma_k = \gamma_0 (t_k + 1)^{-1/2}` with the paper's rules.
    With IVSP's own it starts at :math:`\gamma_0`, follows the multiplier and is halved by the test
    above (:meth:`~lightning_bilevel.solvers.ivsp.rules.Own.next_penalty`). L is then not doubled
    but set to the curvature that the rejected trial saw, and trials are compared with an average of
    earlier merits (:func:`~lightning_bilevel.solvers.ivsp.linesearch.next_excess`).

    Constraints :math:`c_i(w) \le 0` beside the lower level (``BilevelProblem(constraints=...)``, or
    a module's ``constraints``) are further residuals: :math:`\sum_i \phi_{\mu_k}(c_i)` is added to
    the penalty function, and the test of the penalty looks at the largest of :math:`\tilde R` and
    :math:`c_i`. Without a lower level (``lower=None``) this is the smoothing exact-penalty method
    sESQM for a single level, with exact evaluations. The theorem below is for R alone; for
    constraints beside it the method is our extension, and sESQM is known to us from its description
    in the paper.

    Assumption on g: g(x, .) is sigma-weakly convex (it may be nonconvex). Guarantee: an epsilon-KKT
    point of the relaxed problem in :math:`\tilde O(\epsilon^{-3})` first-order evaluations, if the
    constraint qualification ENNAMCQ holds. Cost of an iteration with J inner iterations and one
    trial: J gradients of g in y, one pass of g(x, y) - g(x, z) and one of f. With the paper's rules
    a rejected trial costs the same. With IVSP's own a trial whose values of f and g already show
    that it will be rejected costs one pass of f, one gradient and one value of g, and any other
    trial one value of g more.

    Args:
        params: The two parameter groups, see
            :class:`~lightning_bilevel.solvers.base.BilevelOptimizer`.
        rho: :math:`\rho`, the Moreau parameter; ``rho * sigma`` must be below 1.
        sigma: :math:`\sigma`, the weak-convexity modulus of g(x, .); 0 for a convex lower level.
        delta: :math:`\delta`, the relaxation, in the unit of g: the lower level ends nearly
            stationary up to :math:`O(\sqrt\delta)`.
        mu0: :math:`\mu_0`, the first smoothing.
        block: B, how many iterations share one smoothing:
            :math:`\mu_k = \mu_0 (1 + \lfloor k/B \rfloor)^{-r}`.
        r: The power by which the smoothing falls, between 0 and 1; 1/3 balances the rates.
        q: The power of the accuracy :math:`\zeta_k = \bar\zeta \mu_k^q`, above 1/r; None is 1/r +
            0.01.
        gamma0: :math:`\gamma_0`, the first inverse penalty.
        zeta_bar: :math:`\bar\zeta`, the scale of the accuracy.
        c1: :math:`c_1`, the decrease that the line search requires.
        c2: :math:`c_2`, how small a step must be before a remaining violation strengthens the
            penalty.
        L_init: :math:`L_{0,0}`, where the first line search starts.
        bb: Which Barzilai-Borwein step a line search starts from: ``"short"`` (the paper's), or
            ``"long"``, which takes longer steps if a few directions are much stiffer than the
            others. IVSP's choice is the long one as long as it is accepted at once.
        L_min: The smallest start of a line search.
        L_max: The largest start of a line search.
        L_xy: Lipschitz constant of :math:`\nabla_x g(x, \cdot)`.
        L_yy: Lipschitz constant of :math:`\nabla_y g(x, \cdot)`; the inner step is 1/(L_yy +
            1/rho).
        inner: How a Moreau evaluation is made: ``"gradient"`` (the paper's), or ``"accelerated"``,
            which needs about the square root of that many iterations if rho * L_yy is large. IVSP's
            choice is Barzilai-Borwein steps.
        B_R: Bound on the norm of the gradient of R.
        theta_low: :math:`\underline\vartheta`, the lower bound in the allowance :math:`\tau`.
        theta_hat: :math:`\hat\vartheta`, in (0, 2), the upper bound in the allowance, as a multiple
            of L.
        smoothing: The smoothed plus function, ``"huber"`` (centered Huber) or ``"softplus"``.
        fixed_L: A constant L instead of the line search (the paper's Strategy I), which needs no
            L_init. Descent is guaranteed only above :meth:`safe_L`, which the paper's theta_hat and
            B_R make larger than 1e8. A step that fails the test of the line search is taken, with
            one warning.
        max_trials: The cap on the trials of one line search.
        max_inner: The cap on the iterations of one Moreau evaluation.
        rules: ``"paper"`` is the paper's algorithm, which needs rho, sigma, mu0, block, gamma0,
            zeta_bar, L_init (or fixed_L), L_xy and L_yy; a missing one is an error. ``"own"``
            adapts to the run (:mod:`lightning_bilevel.solvers.ivsp.rules` says how). None is the
            paper's if all of these are given, and IVSP's own otherwise.
        keep_proved: Whether the point of the theorem is kept, as :attr:`proved`. It costs the
            memory of two vectors (x, y) and no evaluation.

    A constant that is None is chosen at the first step, from a few gradients there
    (:mod:`lightning_bilevel.solvers.ivsp.choose` says how), and stays fixed afterwards, through
    checkpoints too. The paper's constants besides those per task are c1 = 1e-4, c2 = 1, L_min =
    1e-11, L_max = 1e11, B_R = 1000 and the short step.

    References:
        Alcantara, Inoue, Takeda: Improved KKT Complexity for First-Order Bilevel Optimization under
        Weak Lower-Level Convexity (Algorithms 1 to 3).
    """

    penalised: ClassVar[bool] = True

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
        inner: Literal["gradient", "accelerated"] | None = None,
        B_R: float | None = None,
        theta_low: float = 1e-24,
        theta_hat: float = 1.99,
        smoothing: SmoothingName = "huber",
        fixed_L: float | None = None,
        max_trials: int = 100,
        max_inner: int = 10_000,
        rules: Literal["paper", "own"] | None = None,
        keep_proved: bool = True,
    ) -> None:
        given = checked_constants(arguments_of(locals()))
        super().__init__(params, {"lr": 0.0, "chosen": None, "own_unit": None, **given})
        self.memory.update(penalty_updates=0, halvings=0, multiplier=0.0, changed=0)

    def prepare(self, problem: BilevelProblem, x: Tensor, y: Tensor) -> float:
        """Choose the missing constants at the first step; shorten a unit of x that is too long."""
        if self.param_groups[0]["chosen"] is not None:
            return self._shortened()
        self._set(choose(problem, x, y, self.constants))
        return float(self.constants["own_unit"])

    @torch.no_grad()
    def probe(self, problem: BilevelProblem) -> list[tuple[str, str]]:
        """Return the constants that a run from here would choose, with values and origins."""
        scaled = self._in_units(problem)
        rows = explain(choose(scaled, *self._read(scaled), self.constants))
        problem.calls = scaled.calls
        return rows

    def advance(
        self, problem: BilevelProblem, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, IVSPInfo]:
        # The point that the last iteration returned, if x still is its x.
        known = self._known if self._at is x else None
        try:
            return self._iterate(problem, x, y, known)
        except (InnerLoopError, LineSearchError):
            # If f or g has changed meanwhile, the check raises that as the cause.
            if known is None:
                problem.check(x, y)
            else:
                problem.check_unchanged(x, y, known.f, known.lower)
            raise

    def _iterate(
        self, problem: BilevelProblem, x: Tensor, y: Tensor, known: Point | None
    ) -> tuple[Tensor, Tensor, IVSPInfo]:
        """Do one outer iteration of Algorithm 1; ``known`` is the evaluated current point."""
        memory = self.memory
        calls_before = problem.calls.lower
        k = memory["iteration"]
        t = memory["penalty_updates"]
        C = Product([problem.upper_set, problem.lower_set], [x.numel(), y.numel()])
        here = known or self._evaluated(problem, x, y)
        c, rules = self._settings  # an evaluation may have corrected them
        L_start = memory.get("L_start", float(c.fixed_L or c.L_init))
        evaluate = Evaluator(problem, c, x.numel(), memory["halvings"])
        merit = self._merit()

        here, B_R, needed = rules.sharpen(evaluate, here, merit, C, L_start, memory.get("B_R", 0.0))
        zeta = evaluate.accuracy(min(rules.scheduled_accuracy(k + 1), needed))
        error = rules.error(here.zeta, merit, B_R)
        excess = memory.get("excess", 0.0)
        trial = Armijo(evaluate, here, merit, C, c, rules, error, zeta, excess)
        try:
            accepted, L, trials = backtrack(trial, L_start, c.max_trials)
        except LineSearchError:
            check_trials(trial.failures, c.max_trials)
            raise
        there, step = accepted.point, accepted.step
        assert there is not None
        if c.fixed_L is not None and accepted.merit > accepted.bound and not self._ascended:
            warn_of_ascent(c.fixed_L, self.safe_L(), k + 1, accepted.merit, accepted.bound)
            self._ascended: bool = True
        if step == 0.0:
            check_trials(trial.failures, trials - 1)
            if trials > 1 and not self._stalled:
                # A step of length 0 is also what a g that changes between calls ends in.
                problem.check_unchanged(x, y, here.f, here.lower)
            self._stalled: bool = self._stalled or warn_of_stall(
                k + 1, trials, trial.start, here.w, merit.direction(here), C
            )

        gamma = rules.next_penalty(there, merit, step, L, C, memory.get("changes", t))
        updated = gamma < merit.gamma
        then = rules.merit(k + 1, gamma)
        # The next start is computed now, so the previous point need not be kept.
        memory["L_start"] = L_start
        if c.fixed_L is None:
            change = change_of(here, there, merit, then)
            long = change.dw_dw if rules.starts_long(trials) else None
            memory["L_start"] = barzilai_borwein(
                change.dw_dv, change.dv_dv, then.mu, L_start, c.L_min, c.L_max, dw_dw=long
            )
            if c.rules == "own" and (stiffness := change.stiffness) is not None:
                memory["stiffness"] = memory.get("stiffness", 0.0) + stiffness / EVERY
        memory.update(penalty_updates=t + updated, multiplier=merit.weight(there) / merit.gamma)
        if c.rules == "own":
            fall = trial.start + excess - merit.value(there)
            memory["excess"], memory["weight"] = next_excess(
                fall, memory.get("weight", 1.0), rules.memory
            )
            memory["zeta"] = zeta
            memory["gamma"] = gamma
            memory["changes"] = memory.get("changes", t) + (gamma != merit.gamma)
            if c.B_R is None:
                memory["B_R"] = B_R
        x, y = self._keep(there)
        info = IVSPInfo(
            upper=there.f,
            lower=there.lower,
            inner_iterations=problem.calls.lower - calls_before,
            lr=merit.mu / L,
            step=step,
            residual=there.worst,
            mu=merit.mu,
            zeta=zeta,
            gamma=merit.gamma,
            multiplier=memory["multiplier"],
            penalty_updated=updated,
            penalty_updates=t + updated,
            trials=trials,
            L=L,
            L_start=L_start,
            gamma_next=then.gamma,
            threshold=2 * merit.phi.a * merit.mu,
            step_bound=c.c2 * merit.mu * merit.gamma,
            halvings=memory["halvings"],
            capped=trials >= c.max_trials or c.L_max <= L,
        )
        if c.keep_proved and problem.share is None:
            keep(memory, there.levels, self._units, info)
        return x, y, info

    def _merit(self) -> Merit:
        """Return the smoothed penalty function of the next iteration."""
        memory = self.memory
        _, rules = self._settings
        gamma = memory.get("gamma", rules.inverse_penalty(memory["penalty_updates"]))
        return rules.merit(memory["iteration"], gamma)

    def _forget(self) -> None:
        super()._forget()
        # The evaluated point that the last iteration returned, and its x.
        self._known: Point | None = None
        self._at: Tensor | None = None
        self._stalled = False
        self._ascended = False
        # The constants that were read last, and what was made of them.
        self._values: tuple[Any, ...] | None = None
        self._read_settings: tuple[Constants, Paper]
        # True until the first evaluation after the start, a load or a copy.
        self._loaded = True

    def problem_changed(self) -> None:
        """Forget what is known of the point, and the theorem's point: they were of another problem.

        The theorem's iterations count anew. Smoothing, penalty and z go on, and so does the start
        of the line search, which mixes no gradients of two problems.
        """
        super().problem_changed()
        self._known = None
        self._at = None
        restart(self.memory)
        for name in ("excess", "weight"):
            self.memory.pop(name, None)

    def _shortened(self) -> float:
        """Return the factor by which the unit of x gets shorter before this iteration."""
        memory = self.memory
        if memory["iteration"] % EVERY:
            return 1.0
        factor = shortening(memory.pop("stiffness", 0.0))
        if factor == 1.0 or memory.get("units", 0) == MOST:
            return 1.0
        memory["units"] = memory.get("units", 0) + 1
        self._set({"own_unit": factor * self.constants["own_unit"]})
        # The theorem counts from here. The point is evaluated again, in a resumed run too.
        restart(memory)
        self._loaded = False
        return factor

    @property
    def _settings(self) -> tuple[Constants, Paper]:
        """The constants in the parameter groups as they are now, and their rules."""
        values = values_of(self.param_groups[0])
        if self._values != values:
            constants = Constants.read(self.param_groups[0])
            self._values = values
            self._read_settings = constants, rules_for(constants)
        return self._read_settings

    def _set(self, constants: dict[str, Any]) -> None:
        for group in self.param_groups:
            group.update(constants)

    def _evaluated(self, problem: BilevelProblem, x: Tensor, y: Tensor) -> Point:
        """Evaluate the current point, at the start, after a load, or with new data."""
        c, rules = self._settings
        memory = self.memory
        calls = problem.calls
        evaluate = Evaluator(problem, c, x.numel(), memory["halvings"])
        w = torch.cat([x, y])
        zeta = memory.get("zeta", rules.scheduled_accuracy(memory["iteration"]))
        z = memory.get("z")
        same = False
        if z is None or z.shape != y.shape:
            point = evaluate.at(w, y, zeta)
        else:
            point, same = evaluate.again(w, z, zeta, memory["f"], memory["residual"])
            if not same and _is_another(point, memory["f"], memory["residual"]):
                memory["changed"] = memory["iteration"]
        if same and self._loaded:
            problem.calls = calls  # not counted: an uninterrupted run would not need these calls
        self._loaded = False
        self._keep(point)
        return point

    def _keep(self, point: Point) -> tuple[Tensor, Tensor]:
        """Store an accepted point. Halvings of rejected trials do not apply to it."""
        first_halving = point.halvings > self.memory["halvings"] == 0
        self.memory.update(halvings=point.halvings, z=point.z, f=point.f, residual=point.residual)
        x, y = point.levels
        self._known = point
        self._at = x
        if first_halving:
            self._correct_or_warn(2**point.halvings)
        return x, y

    def _correct_or_warn(self, factor: int) -> None:
        """Correct a chosen L_yy by the factor, or warn that the user's L_yy is too small."""
        c, _ = self._settings
        if "L_yy" in c.chosen:
            # g has become more curved: the constants that depend on its curvature change as well.
            self._set(dict(c.more_curved(factor)))
            self.memory["halvings"] = 0
            self._known = None  # R has another rho now
        else:
            warnings.warn(
                f"The inner loop diverged with its step 1/(L_yy + 1/rho), L_yy={c.L_yy:g}: the "
                f"lower level is more curved than that. The step was divided by {factor} and will "
                "be divided further if need be, without a word.",
                stacklevel=2,
            )


def _is_another(point: Point, f: float, residual: float) -> bool:
    """Tell whether the values at a point differ by more than rounding and inexactness allow."""
    rounding = 30 * torch.finfo(point.w.dtype).eps
    return abs(point.f - f) > rounding * max(abs(f), abs(point.f)) or abs(
        point.residual - residual
    ) > point.zeta + rounding * abs(point.lower)
