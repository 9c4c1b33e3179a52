"""The numbers of a line search: its safeguarded start, its allowance and its reference."""

from __future__ import annotations

import math

__all__ = ["allowance", "barzilai_borwein", "next_excess"]


def barzilai_borwein(
    dw_dv: float,
    dv_dv: float,
    mu: float,
    previous_start: float,
    L_min: float,
    L_max: float,
    *,
    dw_dw: float | None = None,
) -> float:
    r"""Return the first curvature of the next line search.

    .. math::
        L^{\text{short}} = \mu \|\Delta v\|^2 / |\langle \Delta w, \Delta v \rangle|, \qquad
        L^{\text{long}} = \mu |\langle \Delta w, \Delta v \rangle| / \|\Delta w\|^2

    The long one is used if ``dw_dw`` is given. The guess is safe if
    :math:`|\langle \Delta w, \Delta v \rangle| > 10^{-24}` and L_min <= L <= L_max. Otherwise half
    the previous start replaces it, clipped to [L_min, L_max]. The names are those of the steps
    :math:`\mu/L`; the short one gives stiff directions more weight.
    """
    if abs(dw_dv) > 1e-24:
        guess = mu * dv_dv / abs(dw_dv) if dw_dw is None else mu * abs(dw_dv) / dw_dw
        if L_min <= guess <= L_max:
            return guess
    return min(L_max, max(L_min, previous_start / 2))


def allowance(
    step: float, L: float, mu: float, error: float, *, theta_low: float, theta_hat: float
) -> float:
    r"""Return the allowance of the Armijo test for a gradient error of at most ``error``.

    .. math::
        \frac{\mu E^2}{2\vartheta}, \qquad
        \vartheta = \max\{\min\{\mu E / \|w_L - w\|, \hat\vartheta L\}, \underline\vartheta\}

    with an infinite ratio where the step is zero.
    """
    ratio = mu * error / step if step > 0.0 else math.inf
    theta = max(min(ratio, theta_hat * L), theta_low)
    return mu * error**2 / (2 * theta)


def next_excess(fall: float, weight: float, share: float) -> tuple[float, float]:
    r"""Return how far the line search's reference is above the new merit, and the new weight.

    The reference is an average C of the merits m so far (Zhang and Hager's):

    .. math::
        C_{k+1} = \frac{\eta Q_k C_k + m_{k+1}}{Q_{k+1}}, \qquad Q_{k+1} = \eta Q_k + 1

    A trial may be above the current merit, but not above C. Barzilai-Borwein steps need that: most
    of what they gain, they gain by steps that are not monotone. Where a step passes the test,
    :math:`C_{k+1} \le C_k - (1 - \eta)(\tfrac{c_1}{2\mu}\|w^{k+1} - w^k\|^2 - \tau)`, because
    :math:`Q \le 1/(1 - \eta)`: the sums of the theorem are those of a monotone run up to the factor
    :math:`1/(1 - \eta)`. The excess :math:`C_{k+1} - m_{k+1}` stays when the smoothing or the
    penalty changes, so C is shifted as the merit is.

    Args:
        fall: :math:`C_k - m_{k+1}`.
        weight: :math:`Q_k`, 1 at the start.
        share: :math:`\eta`, below 1; 0 is the monotone search of the paper.
    """
    before = share * weight
    return max(before / (before + 1) * fall, 0.0), before + 1
