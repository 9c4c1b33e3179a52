r"""The curvature above which every step of IVSP descends: what a fixed L has to be.

With a fixed L (the paper's Strategy I) no trial is tested. The paper proves the descent of its
merit function for

.. math::
    L \ge L_{\text{safe}} = \max\Bigl\{\frac{\underline\vartheta}{\hat\vartheta},\;
      \frac{c_1 + \gamma_0 \mu_0 L_f + L_G}{2 - \hat\vartheta}\Bigr\}, \qquad
    L_G = b_\phi B_R^2 + \mu_0 L_R

where :math:`L_f` and :math:`L_R` are Lipschitz constants of the gradients of f and R, and
:math:`B_R` bounds the gradient of R. A smaller L may descend too, but nothing is proved for it.
"""

from __future__ import annotations

import math

from lightning_bilevel.core.moreau import Envelope

__all__ = ["gap_lipschitz", "safe_curvature"]


def safe_curvature(
    *,
    L_f: float,
    L_R: float,
    B_R: float,
    gamma0: float,
    mu0: float,
    c1: float,
    b: float,
    theta_low: float,
    theta_hat: float,
) -> float:
    r"""Return :math:`L_{\text{safe}}`.

    Args:
        L_f: Lipschitz constant of the gradient of f on C.
        L_R: Lipschitz constant of the gradient of R on C, see :func:`gap_lipschitz`.
        B_R: Bound on the norm of the gradient of R on C.
        gamma0: :math:`\gamma_0`, the first inverse penalty.
        mu0: :math:`\mu_0`, the first smoothing.
        c1: :math:`c_1`, the decrease that is asked for.
        b: :math:`b_\phi` of the smoothing.
        theta_low: :math:`\underline\vartheta`.
        theta_hat: :math:`\hat\vartheta`, in (0, 2). Only the line search uses it. For a fixed L it
            is a constant of the proof alone, and 1 instead of the paper's 1.99 makes
            :math:`L_{\text{safe}}` a hundred times smaller.
    """
    L_G = b * B_R**2 + mu0 * L_R
    return max(theta_low / theta_hat, (c1 + gamma0 * mu0 * L_f + L_G) / (2 - theta_hat))


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
