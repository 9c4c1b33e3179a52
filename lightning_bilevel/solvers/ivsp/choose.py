r"""Choose the missing constants of IVSP from a few gradients at the start of a run.

The convergence theorem leaves the constants free within conditions; each choice here meets them.
Every choice scales with f, and with g and delta together, so that their units do not matter.

- ``L_yy``: the largest curvature of g(x, .) that is seen by a power iteration at the start and on
  the way from y to its proximal point. It sets the inner step. If the inner loop diverges, L_yy is
  corrected, with the constants that depend on it.
- ``sigma``: L_yy, at most 1/(2 rho). No function with that curvature is less convex.
- ``rho``: 1/(4 L_yy), which keeps rho * sigma below 1 and lets the inner loop converge by 0.4 in
  each iteration; 1/L_yy where g is declared convex by ``sigma=0``.
- ``mu0``: 5 delta, with ``block`` 5: the smoothing starts at the scale of the constraint, and falls
  as the theorem says.
- ``zeta_bar``: such that the first accuracy is delta/10. Later ones never exceed the schedule. They
  are smaller if the gradient's error would be more than half of the gradient mapping.
- ``gamma0``: :math:`\|\nabla R\| / \|\nabla f\|`, so that f and R have equal weight at the start.
  An update of the penalty halves it: the theorem wants a grid that falls to 0 by bounded factors.
- ``L_init``: :math:`\mu_0 (\gamma_0 L_f + L_{yy})`, the curvature of the penalty function; ``c1``,
  ``L_min`` and ``L_max`` are the paper's multiples of it. It is clipped to an L_min or L_max that
  is given.
- ``c2``: :math:`10^{-4} \|\nabla f\| / L_{\text{init}}`: the paper's test strengthens the penalty
  only after the steps have become ten thousand times shorter. Before that the penalty follows the
  multiplier (:meth:`~lightning_bilevel.solvers.ivsp.adaptive.AdaptiveRules.next_penalty`).
- further residuals: ``gamma0`` compares f with the largest of their gradients and that of R, and
  ``L_init`` grows by their squares, the curvature of their smoothing.
- ``L_xy``: :math:`\|\nabla_x g(x, y) - \nabla_x g(x, z)\| / \|y - z\|`.
- ``B_R``: the largest :math:`\|\nabla R\|` so far, with its error.
- the unit of x: a power of two near :math:`\sqrt{\|\nabla_y R\| / \|\nabla_x R\|}`, at least 1: a
  change of variables.

The gradient of R may happen to be small at the start. It is then replaced by an estimate of what it
will be at the boundary of the relaxed constraint, where
:math:`\|y - z\| \approx \sqrt{2\rho\delta}`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_bilevel.core.curvature import coupling, lower_curvature, upper_curvature
from lightning_bilevel.core.moreau import evaluate_gap
from lightning_bilevel.core.problem import BilevelProblem, Upper
from lightning_bilevel.core.prox import inexact_prox
from lightning_bilevel.core.vectors import Metric, norm
from lightning_bilevel.solvers.ivsp.constants import PAPER, IVSPConstants


def choose(
    problem: BilevelProblem, x: Tensor, y: Tensor, given: IVSPConstants, units: tuple[float, float]
) -> tuple[IVSPConstants, float]:
    """Return all constants for a run from (x, y), and the factor of the unit of x."""
    c = replace(given, rules=given.rules or ("own" if given.missing else "paper"))
    if c.L_init is None:
        c = replace(c, L_init=c.fixed_L)
    if c.rules == "paper":
        return _filled(c, **PAPER), 1.0
    c, f, R_x, R_y = _choose_below(problem, x, y, c, units)
    # Half of the way, in powers of two, to the unit in which both gradients are equal. It only
    # makes steps of x longer: the line search brakes a level that moves too far, but nothing speeds
    # up a level that hardly moves.
    unit = 1.0
    if R_x > 0.0:
        unit = 2.0 ** round(0.5 * math.log2(max(R_y / R_x, 1.0)))
    metric = Metric(x.numel(), unit * units[0], units[1])
    L_f = upper_curvature(problem, x, y, metric)
    slope = math.hypot(metric.x * norm(f.grad_x), metric.y * norm(f.grad_y))
    further = [
        math.hypot(*(m * norm(v) for m, v in zip((metric.x, metric.y), levels, strict=True)))
        for gradient in problem.residuals(x, y).gradients
        for levels in [(gradient[: metric.split], gradient[metric.split :])]
    ]
    pull = max((math.hypot(unit * R_x, R_y), *further))
    c = _filled(c, mu0=5 * c.delta, block=5)
    gamma0 = pull / slope if slope > 0.0 else c.L_yy / L_f if L_f > 0.0 else 1.0
    c = _filled(c, zeta_bar=c.delta / 10 / c.mu0**c.q, gamma0=gamma0 or 1.0)
    if c.L_init is None:
        # The smoothed plus of a residual is curved by its squared gradient over mu.
        L_init = c.mu0 * (c.gamma0 * L_f + c.L_yy) + sum(size**2 for size in further)
        # Every start of a line search is between the user's L_min and L_max.
        L_init = max(L_init or 1.0, c.L_min or 0.0)
        c = replace(c, L_init=min(L_init, c.L_max or math.inf))
    c = _filled(c, **{name: PAPER[name] * c.L_init for name in ("c1", "L_min", "L_max")})
    return _filled(c, c2=1e-4 * slope / c.L_init if slope > 0.0 else 1.0), unit


def _filled(c: IVSPConstants, **values: Any) -> IVSPConstants:
    """Return the constants with these values for those that are None."""
    return replace(c, **{name: v for name, v in values.items() if getattr(c, name) is None})


def _choose_below(
    problem: BilevelProblem, x: Tensor, y: Tensor, c: IVSPConstants, units: tuple[float, float]
) -> tuple[IVSPConstants, Upper, float, float]:
    """Choose L_yy, rho, sigma and L_xy; return f and the norms of the gradients of R in x and y."""
    s_x, s_y = units
    given = c
    lower = problem.at(x)
    if given.L_yy is None:
        # A linear g has no curvature, and its inner loop takes any step.
        c = replace(c, L_yy=float(lower_curvature(problem, x, y, unit=s_y) or 1.0))
    while True:
        if given.rho is None:
            factor = 1.0 if given.sigma == 0.0 else 0.25
            c = replace(c, sigma=None, rho=factor / max(c.L_yy, given.sigma or 0.0))
        sigma = min(c.L_yy, 0.5 / c.rho) if given.sigma is None else given.sigma
        c = replace(c, sigma=sigma)
        envelope = c.envelope.in_unit(s_y)
        z, halvings = inexact_prox(
            lower,
            y,
            y,
            c.delta / 10,
            envelope,
            problem.lower_set,
            L_yy=c.L_yy / s_y**2,
            max_inner=c.max_inner,
        )
        # The start may be a point of inflection, so the curvature on the way to z counts too.
        distance = norm(z - y) / s_y
        change = s_y * norm(lower.gradient(z) - lower.gradient(y)) if distance > 0.0 else 0.0
        curvature = max(2.0**halvings * c.L_yy, change / distance if distance > 0.0 else 0.0)
        if given.L_yy is not None or curvature <= 2 * c.L_yy:
            break
        c = replace(c, L_yy=curvature)
    gap = evaluate_gap(lower, y, z, envelope)
    f = problem.upper(x, y)
    boundary = math.sqrt(2 * c.rho * c.delta)
    f_y = s_y * norm(f.grad_y)
    if c.L_xy is None:
        ends = [z]
        if distance < boundary and f_y > 0.0:
            # The start solves the lower level; the gradient of f will move y away from it.
            ends.append(problem.lower_set.project(y - s_y**2 * boundary / f_y * f.grad_y))
        c = replace(c, L_xy=max(s_x * s_y * coupling(problem, x, y, end) for end in ends))
    R_x = max(s_x * norm(gap.grad_x), c.L_xy * boundary)
    R_y = max(s_y * norm(gap.grad_y), c.L_yy * boundary)
    if problem.single_level:
        return replace(c, L_yy=0.0), f, 0.0, 0.0
    return c, f, R_x, R_y
