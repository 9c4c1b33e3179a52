r"""The Moreau envelope of the lower level, evaluated inexactly, and the gap that it defines.

.. math::
    \psi(z; x, y) = g(x, z) + \tfrac{1}{2\rho}\|z - y\|^2, \qquad
    g_\rho(x, y) = \min_{z \in Y} \psi(z; x, y), \qquad
    H(x, y) = g(x, y) - g_\rho(x, y) \ge 0, \qquad
    R(x, y) = H(x, y) - \delta

H is the Moreau gap, and R the relaxed residual. R <= 0 relaxes the lower-level condition: y is then
near a point z that is nearly stationary for g(x, .). With g(x, .)
sigma-weakly convex and rho * sigma < 1, psi is strongly convex and its minimiser z is unique.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bilevel.core.lower import At, LowerLevel, vector
from lightning_bilevel.core.vectors import squared_distance


@dataclass(frozen=True)
class Envelope:
    r"""The Moreau envelope's parameters and the relaxation.

    Attributes:
        rho: :math:`\rho > 0`, the proximal parameter.
        sigma: :math:`\sigma \ge 0`, the weak-convexity modulus of g(x, .), with
            :math:`\rho\sigma < 1`.
        delta: :math:`\delta > 0`, the relaxation of the gap.
    """

    rho: float
    sigma: float
    delta: float

    def __post_init__(self) -> None:
        for name in ("rho", "delta"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"`{name}={getattr(self, name)}` must be positive and finite.")
        if not 0.0 <= self.sigma < math.inf:
            raise ValueError(
                f"`sigma={self.sigma}` must be nonnegative and finite (0 for a convex lower level)."
            )
        # If rho * sigma is 1 up to rounding, the modulus 1/rho - sigma may be 0 although the
        # product is below 1.
        if self.rho * self.sigma >= 1.0 or self.modulus <= 0.0:
            raise ValueError(
                f"`rho={self.rho}` must be smaller than 1/sigma = {1 / self.sigma:g}: "
                "otherwise the Moreau subproblem is not strongly convex."
            )

    @property
    def modulus(self) -> float:
        r""":math:`m = 1/\rho - \sigma`, the strong-convexity modulus of psi."""
        return 1 / self.rho - self.sigma

    def in_unit(self, unit: float) -> Envelope:
        r"""Return the envelope in y = unit * v of one in v, where :math:`\|v - v'\|` measures.

        :math:`\|v - v'\|^2 / (2\rho) = \|y - y'\|^2 / (2 \rho\,\text{unit}^2)`.
        """
        return Envelope(self.rho * unit**2, self.sigma / unit**2, self.delta)

    def distance_bound(self, violation: float = 0.0) -> float:
        r"""Return :math:`\sqrt{2\rho(\delta + v) / (1 - \rho\sigma)}`, a bound of |y - z|.

        It holds where :math:`R \le v`, because the gap :math:`H = R + \delta` is at least
        :math:`(1 - \rho\sigma) \|y - z\|^2 / (2\rho)`.

        Args:
            violation: v, :math:`[R]_+` of the point; 0 for a feasible one.
        """
        return math.sqrt(2 * self.rho * (self.delta + violation) / (1 - self.rho * self.sigma))

    def stationarity_bound(self, violation: float = 0.0) -> float:
        r"""Return :math:`\sqrt{2(\delta + v) / (\rho(1 - \rho\sigma))}`, a bound of |y - z|/rho.

        Where :math:`R \le v` it bounds how far z, not y, is from stationary for g(x, .) over Y.

        Args:
            violation: v, :math:`[R]_+` of the point; 0 for a feasible one.
        """
        return self.distance_bound(violation) / self.rho


@dataclass(frozen=True)
class MoreauPoint:
    r"""R and its gradient at (x, y), computed from a point z~ that minimises psi up to zeta.

    Attributes:
        z: z~.
        lower: g(x, y).
        residual: :math:`\tilde R = g(x, y) - \psi(\tilde z; x, y) - \delta`, so that
            :math:`\tilde R \le R \le \tilde R + \zeta`.
        grad_x: :math:`\nabla_x g(x, y) - \nabla_x g(x, \tilde z)`.
        grad_y: :math:`\nabla_y g(x, y) - (y - \tilde z)/\rho`.
    """

    z: Tensor
    lower: float
    residual: float
    grad_x: Tensor
    grad_y: Tensor


def gradient_error(
    zeta: float, mu: float, envelope: Envelope, *, L_xy: float, b: float, B_R: float
) -> float:
    r"""Bound the error of the gradient of :math:`\phi_\mu(R)` at a zeta-accurate z~.

    .. math:: E_\mu(\zeta) = \sqrt{L_{xy}^2 + 1/\rho^2} \, \sqrt{2\zeta/m} + b_\phi B_R \zeta / \mu
    """
    of_z = math.hypot(L_xy, 1 / envelope.rho) * math.sqrt(2 * zeta / envelope.modulus)
    return of_z + b * B_R * zeta / mu


def evaluate_gap(
    lower: LowerLevel, at_y: At, at_z: At, envelope: Envelope, grad_y: Tensor | None = None
) -> MoreauPoint:
    r"""Return R and its gradient for a given z~, by one pass of g(x, y) - g(x, z~).

    ``grad_y`` is :math:`\nabla_y g(x, y)`, if it is known.
    """
    gap = lower.gap(at_y, at_z, grad_y)
    y, z = vector(at_y), vector(at_z)
    proximal = squared_distance(y, z) / (2 * envelope.rho)
    residual = gap.value_y - gap.value_z - proximal - envelope.delta
    pull = torch.sub(y, z).div_(envelope.rho)
    grad_y = torch.sub(gap.grad_y, pull, out=pull)
    return MoreauPoint(z, gap.value_y, residual, gap.grad_x, grad_y)


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
