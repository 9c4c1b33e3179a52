r"""What one step of IVSP changed: the numbers that the next start and the unit of x are made of.

One step length serves both levels. IVSP chooses the unit of x by the gradients at the start, and
may choose it too long: the merit is then far more curved in x than in y, the line search goes by
x, and y crawls. Each step shows both curvatures (:attr:`Change.stiffness`). With the mean s of
their logarithmic ratio over ten steps, to which a step that shows none adds 0, the unit is
multiplied by :math:`2^{-s/4}`, rounded to a power of two: half of the way to equal curvatures, as
at the start. It is a change of variables, it is never made longer again, and there are at most ten
in a run, so the theorem holds from the last one on.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from lightning_bilevel.core.vectors import dot
from lightning_bilevel.solvers.ivsp.merit import Merit
from lightning_bilevel.solvers.ivsp.point import Point

__all__ = ["EVERY", "MOST", "Change", "change_of", "shortening"]

# The unit is looked at after every so many iterations, and changed at most this often.
EVERY = 10
MOST = 10


class Change(NamedTuple):
    r"""Inner products of a step :math:`\Delta w` and of the change :math:`\Delta v` of direction.

    Each level is summed on its own: x may be one number and y a million. A pair is x's and y's.

    Attributes:
        products: :math:`\langle \Delta w, \Delta v \rangle`.
        squares: :math:`\|\Delta w\|^2`.
        dv_dv: :math:`\|\Delta v\|^2` of both levels.
    """

    products: tuple[float, float]
    squares: tuple[float, float]
    dv_dv: float

    @property
    def dw_dv(self) -> float:
        """The product of both levels."""
        return self.products[0] + self.products[1]

    @property
    def dw_dw(self) -> float:
        """The square of both levels."""
        return self.squares[0] + self.squares[1]

    @property
    def stiffness(self) -> float | None:
        r"""How much more the merit is curved in x than in y, as a logarithm to base 2.

        .. math::
            \log_2 \frac{\langle \Delta x, \Delta v_x \rangle / \|\Delta x\|^2}
              {\langle \Delta y, \Delta v_y \rangle / \|\Delta y\|^2}

        None if one of the levels did not move, or is not convex along the step: that says nothing
        about how long the next one may be.
        """
        if 0.0 in self.squares or min(self.products) <= 0.0:
            return None
        of_x, of_y = (
            math.log2(product) - math.log2(square)
            for product, square in zip(self.products, self.squares, strict=True)
        )
        return of_x - of_y


def change_of(here: Point, there: Point, now: Merit, then: Merit) -> Change:
    r"""Compare two points, each with the direction of its own merit function.

    .. math::
        \Delta v = \gamma_{k+1} (\nabla f^{k+1} - \nabla f^k)
          + \sum_i \phi'_{\mu_{k+1}} \nabla r_i^{k+1} - \phi'_{\mu_k} \nabla r_i^k
    """
    dv = torch.sub(there.grad_f, here.grad_f).mul_(then.gamma)
    dv.add_(then.weight(there) * there.grad_R).sub_(now.weight(here) * here.grad_R)
    for merit, point, sign in ((then, there, 1.0), (now, here, -1.0)):
        for residual, gradient in zip(point.residuals[1:], point.gradients[1:], strict=True):
            dv.add_(gradient, alpha=sign * merit.phi.slope(residual, merit.mu))
    dw = there.w - here.w
    x, y = slice(here.split), slice(here.split, None)
    return Change(
        products=(dot(dw[x], dv[x]), dot(dw[y], dv[y])),
        squares=(dot(dw[x], dw[x]), dot(dw[y], dw[y])),
        dv_dv=dot(dv[x], dv[x]) + dot(dv[y], dv[y]),
    )


def shortening(stiffness: float) -> float:
    r"""Return the factor of the unit: :math:`2^{-s/4}` rounded to a power of two, at most 1.

    Example:
        >>> [shortening(s) for s in (-8.0, 1.9, 2.1, 8.0)]
        [1.0, 1.0, 0.5, 0.25]
    """
    return 2.0 ** -max(round(stiffness / 4), 0)
