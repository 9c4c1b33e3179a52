"""Algorithm 1 of the paper: the constants of IVSP, and one outer iteration."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import Product
from lightning_bilevel.solvers.base import Method, Units
from lightning_bilevel.solvers.ivsp.adaptive import AdaptiveRules, corrected, follow, shortened
from lightning_bilevel.solvers.ivsp.choose import choose
from lightning_bilevel.solvers.ivsp.constants import IVSPConstants, safe_L
from lightning_bilevel.solvers.ivsp.linesearch import Search, Trial, barzilai_borwein, secant
from lightning_bilevel.solvers.ivsp.point import Evaluator, Merit, Point
from lightning_bilevel.solvers.ivsp.rules import PaperRules, prox_error
from lightning_bilevel.solvers.ivsp.state import State
from lightning_bilevel.solvers.record import PenaltyInfo, evolve


@dataclass(frozen=True, kw_only=True)
class IVSPMethod(IVSPConstants, Method[State]):
    """The constants of IVSP and its iteration."""

    penalised: ClassVar[bool] = True

    def lr_at(self, k: int) -> float:
        return 0.0

    def in_use(self, s: State | None) -> IVSPConstants:
        return self if s is None else s.constants

    def start(self, problem: BilevelProblem, x: Tensor, y: Tensor, units: Units) -> State:
        """Estimate the missing constants."""
        given = IVSPConstants(**self.plain())  # what a checkpoint makes again
        c, unit = choose(problem, x, y, given, units)
        return State(
            x=x,
            y=y,
            units=(unit * units[0], units[1]),
            constants=c,
            estimated=self.missing,
            own_unit=unit,
            gamma=c.gamma0,
            L_start=float(c.fixed_L or c.L_init),
        )

    def step(self, problem: BilevelProblem, s: State) -> tuple[State, PenaltyInfo]:
        """Do one outer iteration of Algorithm 1."""
        calls = problem.calls.lower
        s, here = _evaluated(problem, shortened(s))
        c, k, metric = s.constants, s.k, s.metric
        C = Product([problem.upper_set, problem.lower_set], [s.x.numel(), s.y.numel()])
        evaluate = Evaluator(problem, c, metric.split, metric.y, s.halvings)

        # Line 3: gamma_k, and what the gradient of the smoothed penalty is made of.
        merit = Merit(s.gamma, c.mu(k), c.phi)
        rules = (AdaptiveRules if c.rules == "own" else PaperRules)(s, evaluate, merit, C)
        refined = rules.refine(here)
        here = refined.point
        zeta = evaluate.accuracy(min(c.zeta(k + 1), refined.zeta))
        error = prox_error(rules, here.zeta, refined.B_R)

        # Line 4: w^{k+1} by backtracking on L from L_{k,0} (Strategy II), or with a fixed L (I).
        search = Search(rules, here, error, zeta)
        accepted, L, trials = search.backtrack(s.L_start)
        there, step = accepted.point, accepted.step
        assert there is not None
        s = _warned(s, search, accepted, trials)

        # Line 5: t_{k+1}; the penalty grows if a violation persists although the step is small.
        gamma = rules.next_penalty(there, step, L)
        updated = gamma < merit.gamma

        # Implementation details: the safeguarded Barzilai-Borwein start L_{k+1,0}.
        then = Merit(gamma, c.mu(k + 1), c.phi)
        L_start, change = s.L_start, None
        if c.fixed_L is None:
            change = secant(here, there, merit, then, metric)
            L_start = barzilai_borwein(change, then.mu, L_start, c, rules.starts_long(trials))

        new = evolve(
            s,
            k=k + 1,
            t=s.t + updated,
            gamma=gamma,
            gamma_changes=s.gamma_changes + (gamma != merit.gamma),
            multiplier=merit.weight(there) / merit.gamma,
            L_start=L_start,
        )
        if c.rules == "own":
            fall = search.start + s.excess - merit.value(there)
            new = follow(new, fall, change, refined, zeta)
        new = _at(new, there)
        info = PenaltyInfo(
            upper=there.f,
            lower=there.lower,
            inner_iterations=problem.calls.lower - calls,
            lr=merit.mu / L,
            step=step,
            residual=there.worst,
            mu=merit.mu,
            zeta=zeta,
            gamma=merit.gamma,
            multiplier=new.multiplier,
            penalty_updated=updated,
            penalty_updates=new.t,
            trials=trials,
            L=L,
            L_start=s.L_start,
            gamma_next=gamma,
            threshold=2 * merit.phi.a * merit.mu,
            step_bound=c.c2 * merit.mu * merit.gamma,
            halvings=new.halvings,
            capped=trials >= c.max_trials or c.L_max <= L,
        )
        if c.keep_proved and problem.share is None:
            new = evolve(new, theorem=new.theorem.keep(there.x, there.y, k + 1, info))
        return new, info

    def check(self, problem: BilevelProblem, s: State) -> None:
        """Raise the cause if a search failed because f or g has changed meanwhile."""
        if s.point is None:
            problem.check(s.x, s.y)
        else:
            problem.check_unchanged(s.x, s.y, s.point.f, s.point.lower)

    def on_new_data(self, s: State) -> State:
        """Keep smoothing, penalty, z and the start of the line search; the theorem counts anew."""
        return evolve(s, theorem=s.theorem.restart(s.k), excess=0.0, weight=1.0)


def _evaluated(problem: BilevelProblem, s: State) -> tuple[State, Point]:
    """Return the current point, evaluated at the start, after a load, or with new data."""
    if s.point is not None:
        return s, s.point
    c, calls = s.constants, problem.calls
    evaluate = Evaluator(problem, c, s.x.numel(), s.units[1], s.halvings)
    w = torch.cat([s.x, s.y])
    zeta = c.zeta(s.k) if s.zeta is None else s.zeta
    if s.z is None:
        point = evaluate.at(w, s.y, zeta)
    else:
        point, same = evaluate.again(w, s.z, zeta, s.f, s.residual)
        if not same and point.differs(s.f, s.residual):
            s = evolve(s, theorem=evolve(s.theorem, changed=s.k))
        if same and s.resumed:
            problem.calls = calls  # not counted: an uninterrupted run would not need these calls
    return evolve(_at(s, point), resumed=False), point


def _at(s: State, point: Point) -> State:
    """Return the state at an accepted point; correct L_yy, or warn, at the first halving."""
    first = point.halvings > s.halvings == 0
    s = s.at(point)
    if not first:
        return s
    factor = 2**point.halvings
    if "L_yy" in s.estimated:
        return corrected(s, factor)
    warnings.warn(
        "The inner loop diverged with its step 1/(L_yy + 1/rho), "
        f"L_yy={s.constants.L_yy:g}: the lower level is more curved than that. The step was "
        f"divided by {factor} and will be divided further if need be, silently.",
        stacklevel=6,
    )
    return s


def _warned(s: State, search: Search, found: Trial, trials: int) -> State:
    """Warn, once a run, of a step with a fixed L that ascends and of a step of length 0."""
    c, here, metric = s.constants, search.here, s.metric
    if c.fixed_L is not None and found.merit > found.bound and "ascent" not in s.warned:
        warnings.warn(
            f"`IVSP(fixed_L={c.fixed_L!r})` is too small: in outer iteration {s.k + 1} the merit "
            f"became {found.merit:.9g}, where a line search asks for at most {found.bound:.9g}. "
            f"Descent is proved only above L_safe, which is {safe_L(c, s.B_R):.3g} or more here: "
            "make fixed_L larger, or leave it out for the line search.",
            stacklevel=6,
        )
        s = evolve(s, warned=s.warned | {"ascent"})
    if found.step > 0.0:
        return s
    search.check_evaluated(trials - 1)
    if "stall" in s.warned:
        return s
    if trials > 1:
        # A step of length 0 is also what a g that changes between calls ends in.
        search.rules.evaluate.problem.check_unchanged(s.x, s.y, here.f, here.lower)
    moved = search.rules.feasible.project(here.w - metric.scaled(search.merit.direction(here), 2))
    mapping, eps = metric.distance(moved, here.w), torch.finfo(here.w.dtype).eps
    if mapping <= math.sqrt(eps) * (1 + metric.norm(here.w)):
        return s
    warnings.warn(
        f"IVSP does not move any more: in outer iteration {s.k + 1} the line search accepted a "
        f"step of length 0 after {trials} trials, where the gradient mapping is {mapping:.3g}. "
        f"The merit is {search.start:.3g}, of which {here.w.dtype} resolves "
        f"{eps * abs(search.start):.1g}: scale f and g down, use float64, or make mu0 larger.",
        stacklevel=6,
    )
    return evolve(s, warned=s.warned | {"stall"})
