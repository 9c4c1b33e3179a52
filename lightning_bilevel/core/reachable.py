r"""An envelope whose proximal point a few passes find.

The proximal point minimises :math:`\psi = g(x, \cdot) + \|\cdot - y\|^2/(2\rho)`. Where the
curvature of g(x, .) is at most L in size, psi has curvatures from :math:`1/\rho - L` to
:math:`1/\rho + L`, and the number of gradient steps grows with the quotient of the two. It is 3 for

.. math:: \rho = \frac{1}{2L}, \qquad \sigma = L,

and in the many directions in which g is nearly flat, one step suffices. L is a weak-convexity
modulus of any g with such a curvature, so nothing is assumed about convexity.
"""

from __future__ import annotations

from torch import Tensor

from lightning_bilevel.core.curvature import lower_curvature
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem

__all__ = ["reachable_envelope"]


def reachable_envelope(
    problem: BilevelProblem, x: Tensor, y: Tensor, wanted: Envelope, steps: int = 5
) -> Envelope:
    r"""Return the wanted envelope, or one with a smaller rho if its proximal point is far to find.

    L is the curvature of g(x, .) at y, as a power iteration estimates it. An envelope with
    :math:`2 \rho L \le 1` is returned as it is; otherwise rho and sigma are those above, and delta
    stays. A smaller rho is a weaker statement: the same gap then allows a longer gradient of g,
    which the bounds of the certificate show.

    Args:
        problem: f, g and the sets.
        x: The upper-level variables.
        y: The lower-level variables.
        wanted: The envelope to begin with.
        steps: The steps of the power iteration. Each is a gradient of g, and there is one more.
    """
    curvature = lower_curvature(problem, x, y, steps, remember=False)
    if 2 * wanted.rho * curvature <= 1:
        return wanted
    return Envelope(rho=1 / (2 * curvature), sigma=curvature, delta=wanted.delta)
