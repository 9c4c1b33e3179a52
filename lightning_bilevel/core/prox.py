r"""The two inner loops that minimise psi.

.. math:: \psi(z; x, y) = g(x, z) + \tfrac{1}{2\rho}\|z - y\|^2

One is for solvers, which know constants of g. The other is for evaluations, which know none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bilevel.core.errors import InnerLoopError, NonFiniteError
from lightning_bilevel.core.lower import At, LowerLevel, LowerPoint, vector
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.sets import ConvexSet
from lightning_bilevel.core.vectors import dot, norm, squared_distance

# With the right step a projected-gradient residual never grows. A loop whose residual has grown by
# this factor is diverging.
_DIVERGED = 10.0
_MAX_HALVINGS = 60
# A gradient that changes this many times as fast as 1/eta allows shows that the step is too long.
_TOO_STEEP = 1.5
# After this many iterations without a new smallest residual, the loop looks for the reason.
_STALLED = 100
# A gradient is exact up to some tens of roundings of its largest terms.
_NOISE = 50.0
# A shorter step avoids points where g is not defined. After this many attempts the start itself is
# too near to them.
_MAX_UNDEFINED = 3


def inexact_prox(
    lower: LowerLevel,
    y: Tensor,
    z: At,
    zeta: float,
    envelope: Envelope,
    lower_set: ConvexSet,
    *,
    L_yy: float,
    halvings: int = 0,
    max_inner: int = 10_000,
    accelerated: bool = False,
    spectral: bool = False,
    first: Tensor | None = None,
) -> tuple[Tensor, int]:
    r"""Minimise psi up to zeta by projected gradient from z (the paper's Algorithm 2).

    .. math::
        z^+ = P_Y(z - \eta [\nabla_y g(x, z) + (z - y)/\rho]), \qquad
        \|z - z^+\|^2 / \eta^2 \le 2 m \zeta \;\Rightarrow\; \psi(z^+) - g_\rho \le \zeta

    with :math:`\eta = 1/(L_{yy} + 1/\rho)`. The implication holds from any z in Y, if L_yy is at
    least the Lipschitz constant of the gradient of g(x, .) on Y, and sigma at least its
    weak-convexity modulus. L_yy is too small for g here if the residual grows tenfold, or if it no
    longer falls while the curvature is above :math:`1/\eta`. The step is then halved and the loop
    starts again.

    With ``accelerated``, the next iteration starts from
    :math:`z^+ + \beta (z^+ - z^+_{\text{before}})` with
    :math:`\beta = (1 - \sqrt{m\eta})/(1 + \sqrt{m\eta})` (Nesterov's method for strongly convex
    functions). Where rho L_yy is large, the number of iterations falls to about its square root.
    The stopping rule is the same. Such a point may lie outside Y, so the rule then needs that
    L_yy and sigma hold there too.

    With ``spectral``, the next iteration starts from a step of the Barzilai-Borwein length
    :math:`\langle s, v\rangle/\|v\|^2` instead of :math:`\eta`, where s and v are the last changes
    of z and of :math:`\nabla\psi`. For a psi with the given constants that length is between
    :math:`\eta` and 1/m, and it is clipped to that. After a residual above twice the smallest one
    the step is :math:`\eta` again, and L_yy is too small if v is longer than
    :math:`1.5 \|s\|/\eta`. The stopping rule is still that of the step :math:`\eta` from a
    point of Y, whose gradient is known: it costs no gradient.

    If only rounding is left of the residual before the rule is met, the loop ends too, without a
    word. The accuracy is then the one that the dtype allows, and zeta is not guaranteed.

    Args:
        lower: g(x, .).
        y: The centre of the proximal term.
        z: The start; a handle is released after its gradient.
        zeta: The accuracy.
        envelope: rho, sigma and delta.
        lower_set: Y.
        L_yy: The Lipschitz constant of the gradient of g(x, .).
        halvings: How often the step has been halved so far.
        max_inner: The cap on iterations.
        accelerated: Whether to use Nesterov's momentum.
        spectral: Whether to use Barzilai-Borwein steps.
        first: The gradient of g(x, .) at the start, if it is known.

    Returns:
        The point, and how often the step has been halved.
    """
    eta = 0.5**halvings / (L_yy + 1 / envelope.rho)
    tolerance = math.sqrt(2 * envelope.modulus * zeta)
    at = z
    start = before = z = vector(z)
    residual = math.inf
    watch = _Watch(y, envelope.rho)
    last: tuple[Tensor, Tensor] | None = None  # the last point and the gradient of psi there
    done = undefined = 0
    while done < max_inner and halvings <= _MAX_HALVINGS:
        done += 1
        try:
            slope = lower.gradient(at) if first is None else first
            first = None
            if isinstance(at, LowerPoint):
                at.release()
        except NonFiniteError:
            undefined += 1
            if z is start or undefined > _MAX_UNDEFINED:
                raise
            too_long = True
        else:
            direction = slope_of_psi(slope, z, y, envelope.rho)
            new = projected_step(z, direction, eta, lower_set)
            residual = math.sqrt(squared_distance(z, new)) / eta
            if residual <= tolerance or residual * eta <= _rounding(z):
                return new, halvings
            too_long = watch.too_long(residual, eta, z, slope, direction)
            if last is not None:
                steepness, spectral_step = _secant(z, direction, last)
                too_long = too_long or steepness * eta > _TOO_STEEP
            if watch.rounded and not too_long:
                return new, halvings
            if accelerated:
                root = math.sqrt(envelope.modulus * eta)
                z = torch.sub(new, before).mul_((1 - root) / (1 + root)).add_(new)
            elif spectral:
                length = eta
                if last is not None and residual <= 2 * watch.best:
                    length = min(max(spectral_step, eta), 1 / envelope.modulus)
                last = (z, direction)
                z = new if length == eta else projected_step(z, direction, length, lower_set)
            else:
                z = new
            before = new
            # The next gradient needs the most memory, and neither of these.
            del slope, direction
        if too_long:
            halvings += 1
            eta /= 2
            z = before = start
            last = None
            watch = _Watch(y, envelope.rho)
        at = z
    raise InnerLoopError(
        f"the inner loop made {done} iterations and its residual is {residual:.3g}, above "
        f"{tolerance:.3g} (accuracy zeta={zeta:.3g}, step {eta:.3g}, halved {halvings} times). If "
        f"L_yy={L_yy:g} is far larger than the curvature of the lower level, make it smaller; if "
        "zeta is needlessly small, make `zeta_bar` larger. A kink near its minimiser (ReLU, "
        "absolute value, max) has no such curvature: smooth it. On mini-batches, "
        "batch normalisation makes g another function at every step."
    )


@dataclass
class _Watch:
    """Judges the step by the residuals: with the right step they fall every time.

    Attributes:
        best: The smallest residual.
        rounded: Whether only rounding is left of the residual: no step makes it smaller.
    """

    y: Tensor
    rho: float
    first: float | None = None
    best: float = math.inf
    rounded: bool = False
    since_best: int = 0
    previous: tuple[Tensor, Tensor] | None = None

    def too_long(
        self, residual: float, eta: float, z: Tensor, slope: Tensor, direction: Tensor
    ) -> bool:
        """Judge a step eta from z; the gradient of g is ``slope``, that of psi ``direction``."""
        self.since_best = 0 if residual < self.best else self.since_best + 1
        self.best = min(residual, self.best)
        self.first = residual if self.first is None else self.first
        if not residual <= _DIVERGED * self.first:
            return True
        too_curved = False
        if self.since_best >= _STALLED:
            self.since_best = 0
            # Rounding comes first: it spoils the curvature too.
            terms = norm(slope) + norm(z - self.y) / self.rho
            self.rounded = residual <= _NOISE * torch.finfo(z.dtype).eps * terms
            if self.previous is not None and not self.rounded:
                too_curved = _curvature(z, direction, *self.previous) * eta > 1.0 + 1e-3
        # Only a stall needs the previous vectors.
        self.previous = (z, direction) if self.since_best >= _STALLED - 1 else None
        return too_curved


def _secant(z: Tensor, slope: Tensor, last: tuple[Tensor, Tensor]) -> tuple[float, float]:
    r"""Return :math:`\|v\|/\|s\|` and :math:`\langle s, v\rangle/\|v\|^2` of the last changes.

    The Lipschitz constant of the gradient is at least the first. The second is the short
    Barzilai-Borwein step.
    """
    s, v = z - last[0], slope - last[1]
    squared = dot(v, v)
    return math.sqrt(squared) / max(norm(s), 1e-300), dot(s, v) / max(squared, 1e-300)


def precise_prox(
    lower: LowerLevel,
    y: Tensor,
    rho: float,
    lower_set: ConvexSet,
    *,
    tolerance: float = 1e-3,
    max_iterations: int = 20_000,
    best_effort: bool = False,
) -> Tensor:
    r"""Minimise psi by projected gradient with backtracking from z = y.

    Every method is measured by this evaluation, so it uses no constant of g or of a solver, and
    nothing that a solver computed. It shares the formulas of psi and R with the solvers.
    With :math:`d = z^+ - z`, a step :math:`\eta` is accepted if
    :math:`\langle \nabla\psi(z^+) - \nabla\psi(z), d \rangle \le \|d\|^2/\eta`. For a convex psi
    this implies :math:`\psi(z^+) \le \psi(z)`, so the backtracking is monotone as the paper's;
    otherwise values may rise. Unlike a comparison of values, the test does not drown in rounding
    near the minimiser. The loop stops when the gradient mapping :math:`\|d\|/\eta` is at most
    ``tolerance``, or when only rounding is left of it.
    """
    if max_iterations < 1:
        raise ValueError(
            f"`precise_prox(max_iterations={max_iterations})` must be at least 1: without an "
            "iteration z is y."
        )
    z = y
    eta = rho
    slope = lower.gradient(z)
    direction = slope  # the proximal term has no gradient at z = y
    noise = _NOISE * torch.finfo(y.dtype).eps
    for _ in range(max_iterations):
        new = projected_step(z, direction, eta, lower_set)
        length = math.sqrt(squared_distance(new, z))
        if length <= max(tolerance * eta, _rounding(z)):
            return z
        rounding = noise * (norm(slope) + norm(z - y) / rho)
        if length <= rounding * eta and _mapping(z, direction, length, lower_set) <= rounding:
            return z
        new_slope = lower.gradient(new)
        new_direction = slope_of_psi(new_slope, new, y, rho)
        if _curvature(new, new_direction, z, direction) <= 1 / eta:
            z, slope, direction = new, new_slope, new_direction
        else:
            eta /= 2
    if best_effort:
        return z
    raise InnerLoopError(
        f"the evaluation of the Moreau gap made {max_iterations} iterations with rho={rho:g} and "
        f"its gradient mapping is {length / eta:.3g}: allow more than {tolerance:g}, or reduce rho."
    )


def _mapping(z: Tensor, direction: Tensor, length: float, lower_set: ConvexSet) -> float:
    r"""Return the gradient mapping :math:`\|P_Y(z - \eta d) - z\|/\eta` of a step within a length.

    A long step that Y cuts off is short whatever its direction: it says nothing about rounding.
    """
    eta = length / norm(direction)
    new = projected_step(z, direction, eta, lower_set)
    return math.sqrt(squared_distance(new, z)) / eta


def slope_of_psi(slope: Tensor, z: Tensor, y: Tensor, rho: float) -> Tensor:
    r"""Return :math:`\nabla_z \psi = \nabla_y g(x, z) + (z - y)/\rho` for a given first term."""
    # One new vector only: fresh memory costs more than the arithmetic in it.
    away = torch.sub(z, y)
    return torch.add(slope, away, alpha=1 / rho, out=away)


def projected_step(z: Tensor, direction: Tensor, eta: float, lower_set: ConvexSet) -> Tensor:
    r"""Return :math:`P_Y(z - \eta d)`."""
    return lower_set.project(torch.sub(z, direction, alpha=eta))


def _curvature(z: Tensor, slope: Tensor, previous_z: Tensor, previous_slope: Tensor) -> float:
    """Return the curvature of psi between two points, <difference of slopes, step> / |step|^2."""
    step = z - previous_z
    return dot(slope - previous_slope, step) / max(dot(step, step), 1e-300)


def _rounding(z: Tensor) -> float:
    """Return the length of the shortest step from z that the dtype resolves."""
    return torch.finfo(z.dtype).eps * norm(z)
