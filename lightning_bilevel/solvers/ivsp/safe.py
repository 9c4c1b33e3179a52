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
from lightning_bilevel.solvers.ivsp.constants import PAPER, IVSPConstants

__all__ = ["gap_lipschitz", "safe_L"]


def safe_L(
    c: IVSPConstants,
    seen: float = 0.0,
    L_f: float = 0.0,
    L_R: float = 0.0,
    theta_hat: float | None = None,
) -> float:
    r"""Return :math:`L_{\text{safe}}` of the constants.

    Args:
        c: The constants of a run.
        seen: The largest norm of the gradient of R so far, which counts if B_R is None.
        L_f: Lipschitz constant of the gradient of f on C.
        L_R: Lipschitz constant of the gradient of R on C, see :func:`gap_lipschitz`.
        theta_hat: :math:`\hat\vartheta`, in (0, 2); None is that of the constants. Only the line
            search uses it. For a fixed L it is a constant of the proof alone, and 1 instead of the
            paper's 1.99 makes :math:`L_{\text{safe}}` a hundred times smaller.
    """
    if c.missing:
        raise ValueError(
            f"`IVSP.safe_L()` needs {', '.join(c.missing)}, which IVSP chooses at its first step: "
            "call it after that, or give all constants of the task."
        )
    B_R = c.B_R if c.B_R is not None else seen or PAPER["B_R"]
    c1 = PAPER["c1"] if c.c1 is None else c.c1
    theta = c.theta_hat if theta_hat is None else theta_hat
    L_G = c.phi.b * B_R**2 + c.mu0 * L_R
    return max(c.theta_low / theta, (c1 + c.gamma0 * c.mu0 * L_f + L_G) / (2 - theta))


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
