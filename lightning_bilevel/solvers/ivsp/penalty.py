r"""The inverse penalty of IVSP: its grid, the test that strengthens it, and what it follows."""

from __future__ import annotations

import sys

from lightning_bilevel.solvers.ivsp.point import Merit, Point


def inverse_penalty(t: int, gamma0: float) -> float:
    r"""Return :math:`\hat\gamma_t = \gamma_0 (t + 1)^{-1/2}`, never rounded to 0.

    The theorem holds for any grid that falls to 0 with :math:`\hat\gamma_t / \hat\gamma_{t+1}`
    bounded.
    """
    return max(float(gamma0 * (t + 1) ** -0.5), sys.float_info.min)


def matching_factor(slope: float) -> float:
    r"""Return what the inverse penalty is multiplied by to match the multiplier.

    Where the smoothed problem is solved, the multiplier is :math:`\lambda = \phi_\mu'(R)/\gamma`.
    Both smoothings have :math:`\phi_\mu'(0) = 1/2`, so with :math:`\gamma = 1/(2\lambda)` the
    constraint holds as it should, R = 0, for any :math:`\mu`. That is the factor
    :math:`1/(2\phi_\mu')`, here between 1/2 and 2. A constraint without a multiplier changes
    nothing.

    Args:
        slope: :math:`\phi_\mu'` of the constraint.
    """
    return min(max(0.5 / slope, 0.5), 2.0) if slope > 0.0 else 1.0


def must_update(there: Point, step: float, merit: Merit, c2: float) -> bool:
    r"""Tell whether a violation beyond the smoothing scale persists although the step is small.

    .. math::
        \tilde R^{k+1} > 2 a_\phi \mu_k \quad\text{and}\quad
        \|w^{k+1} - w^k\| \le c_2 \mu_k \gamma_k
    """
    small = step <= c2 * merit.mu * merit.gamma
    return small and there.worst > 2 * merit.phi.a * merit.mu
