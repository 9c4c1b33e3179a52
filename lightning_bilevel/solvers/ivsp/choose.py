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
  multiplier (:meth:`~lightning_bilevel.solvers.ivsp.rules.Own.next_penalty`).
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
from typing import Any

from torch import Tensor

from lightning_bilevel.core.curvature import coupling, lower_curvature, upper_curvature
from lightning_bilevel.core.moreau import Envelope, evaluate_gap
from lightning_bilevel.core.problem import BilevelProblem, Upper
from lightning_bilevel.core.prox import inexact_prox
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.solvers.ivsp.constants import PAPER, missing_constants

__all__ = ["choose", "explain"]


def choose(problem: BilevelProblem, x: Tensor, y: Tensor, given: dict[str, Any]) -> dict[str, Any]:
    """Return all constants for a run from (x, y): a choice replaces each None."""
    missing = missing_constants(given)
    rules = given["rules"] or ("own" if missing else "paper")
    c: dict[str, Any] = {**given, "rules": rules, "chosen": missing}
    if c["L_init"] is None:
        c["L_init"] = c["fixed_L"]
    if rules == "paper":
        filled = {name: PAPER.get(name) if value is None else value for name, value in c.items()}
        return {**filled, "own_unit": 1.0}
    delta = given["delta"]
    f, R_x, R_y = _choose_below(problem, x, y, given, c)
    if problem.single_level:
        c["L_yy"] = R_x = R_y = 0.0
    if c["own_unit"] is None:
        # Half of the way, in powers of two, to the unit in which both gradients are equal. It only
        # makes steps of x longer: the line search brakes a level that moves too far, but nothing
        # speeds up a level that hardly moves.
        c["own_unit"] = 2.0 ** round(0.5 * math.log2(max(R_y / R_x, 1.0))) if R_x > 0.0 else 1.0
    unit = c["own_unit"]
    scaled = problem.in_units(upper=unit)
    L_f = upper_curvature(scaled, x / unit, y)
    if scaled is not problem:
        problem.calls = problem.calls + scaled.calls
    slope = math.hypot(unit * norm(f.grad_x), norm(f.grad_y))
    split = x.numel()
    further = [
        math.hypot(unit * norm(gradient[:split]), norm(gradient[split:]))
        for gradient in problem.residuals(x, y).gradients
    ]
    pull = max((math.hypot(unit * R_x, R_y), *further))
    if c["mu0"] is None:
        c["mu0"] = 5 * delta
    if c["block"] is None:
        c["block"] = 5
    if c["zeta_bar"] is None:
        c["zeta_bar"] = delta / 10 / c["mu0"] ** c["q"]
    if c["gamma0"] is None:
        if slope > 0.0:
            c["gamma0"] = pull / slope or 1.0
        else:
            c["gamma0"] = c["L_yy"] / L_f or 1.0 if L_f > 0.0 else 1.0
    if c["L_init"] is None:
        L_init = c["mu0"] * (c["gamma0"] * L_f + c["L_yy"])
        # The smoothed plus of a residual is curved by its squared gradient over mu.
        L_init += sum(size**2 for size in further)
        c["L_init"] = L_init or 1.0
        # Every start of a line search is between the user's L_min and L_max.
        if given["L_min"] is not None:
            c["L_init"] = max(c["L_init"], given["L_min"])
        if given["L_max"] is not None:
            c["L_init"] = min(c["L_init"], given["L_max"])
    for name in ("c1", "L_min", "L_max"):
        if c[name] is None:
            c[name] = PAPER[name] * c["L_init"]
    if c["c2"] is None:
        c["c2"] = 1e-4 * slope / c["L_init"] if slope > 0.0 else 1.0
    return c


def _choose_below(
    problem: BilevelProblem, x: Tensor, y: Tensor, given: dict[str, Any], c: dict[str, Any]
) -> tuple[Upper, float, float]:
    """Choose L_yy, rho, sigma and L_xy; return f and the norms of the gradients of R in x and y."""
    delta = given["delta"]
    lower = problem.at(x)
    chooses_L_yy = given["L_yy"] is None
    if chooses_L_yy:
        # A linear g has no curvature, and its inner loop takes any step.
        c["L_yy"] = float(lower_curvature(problem, x, y) or 1.0)
    while True:
        if given["rho"] is None:
            factor = 1.0 if given["sigma"] == 0.0 else 0.25
            c["rho"] = factor / max(c["L_yy"], given["sigma"] or 0.0)
        if given["sigma"] is None:
            c["sigma"] = min(c["L_yy"], 0.5 / c["rho"])
        envelope = Envelope(rho=c["rho"], sigma=c["sigma"], delta=delta)
        z, halvings = inexact_prox(
            lower,
            y,
            y,
            delta / 10,
            envelope,
            problem.lower_set,
            L_yy=c["L_yy"],
            max_inner=c["max_inner"],
        )
        # The start may be a point of inflection, so the curvature on the way to z counts too.
        distance = norm(z - y)
        secant = norm(lower.gradient(z) - lower.gradient(y)) / distance if distance > 0.0 else 0.0
        curvature = max(2.0**halvings * c["L_yy"], secant)
        if not chooses_L_yy or curvature <= 2 * c["L_yy"]:
            break
        c["L_yy"] = curvature
    gap = evaluate_gap(lower, y, z, envelope)
    f = problem.upper(x, y)
    boundary = math.sqrt(2 * c["rho"] * delta)
    if c["L_xy"] is None:
        ends = [z]
        if distance < boundary and norm(f.grad_y) > 0.0:
            # The start solves the lower level; the gradient of f will move y away from it.
            ends.append(problem.lower_set.project(y - boundary / norm(f.grad_y) * f.grad_y))
        c["L_xy"] = max(coupling(problem, x, y, end) for end in ends)
    R_x = max(norm(gap.grad_x), c["L_xy"] * boundary)
    R_y = max(norm(gap.grad_y), c["L_yy"] * boundary)
    return f, R_x, R_y


def explain(c: dict[str, Any]) -> list[tuple[str, str]]:
    """Return each chosen constant with its value and the reason, in words."""
    reasons = {
        "L_yy": "curvature of the lower level",
        "sigma": "as nonconvex as that curvature allows",
        "rho": "1/(4 L_yy), or 1/L_yy for a convex lower level",
        "mu0": "5 delta",
        "block": "iterations per smoothing",
        "zeta_bar": "first accuracy delta/10, then half of what a step promises",
        "gamma0": "f and the gap pull alike at the start",
        "L_init": "curvature of the penalty function",
        "L_xy": "how the lower level's gradient in x changes with y",
    }
    chosen = [
        (name, f"{c[name]:.4g} ({reason})")
        for name, reason in reasons.items()
        if name in c["chosen"]
    ]
    if not chosen:
        return []
    unit = f"{c['own_unit']:g} (from the gradients of the gap in x and y)"
    return [*chosen, ("unit of x", unit)]
