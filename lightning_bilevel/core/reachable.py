r"""An envelope whose proximal point a few passes find.

The proximal point minimises :math:`\psi = g(x, \cdot) + \|\cdot - y\|^2/(2\rho)`. Where the
curvature of g(x, .) is at most L in size, psi has curvatures from :math:`1/\rho - L` to
:math:`1/\rho + L`, and the number of gradient steps grows with the quotient of the two. It is 5/3
for

.. math:: \rho = \frac{1}{4L}, \qquad \sigma = L,

which is also what IVSP chooses for itself. L is a weak-convexity modulus of any g with such a
curvature, so nothing is assumed about convexity. With a smaller rho the same gap allows a longer
gradient of g. So delta falls along with it, and a feasible point has the same bound
:math:`\sqrt{2\delta/(\rho(1 - \rho\sigma))}` on how far z is from being stationary.
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
    :math:`4 \rho L \le 1` is returned as it is; otherwise rho, sigma and delta are those above.

    Args:
        problem: f, g and the sets.
        x: The upper-level variables.
        y: The lower-level variables.
        wanted: The envelope to begin with.
        steps: The steps of the power iteration. Each is a gradient of g, and there is one more.
    """
    curvature = lower_curvature(problem, x, y, steps, remember=False)
    if 4 * wanted.rho * curvature <= 1:
        return wanted
    rho = 1 / (4 * curvature)
    share = rho * (1 - rho * curvature) / (wanted.rho * (1 - wanted.rho * wanted.sigma))
    return Envelope(rho=rho, sigma=curvature, delta=share * wanted.delta)
