r"""The unit of x, shortened where the run shows that it is too long.

One step length serves both levels. IVSP chooses the unit of x by the gradients at the start, and
may choose it too long: the merit is then far more curved in x than in y, the line search goes by
x, and y crawls. Each step shows both curvatures
(:attr:`~lightning_bilevel.solvers.ivsp.change.Change.stiffness`). With the mean s of their
logarithmic ratio over ten steps, to which a step that shows none adds 0, the unit is multiplied by
:math:`2^{-s/4}`, rounded to a power of two: half of the way to equal curvatures, as at the start.
It is a change of variables, it is never made longer again, and there are at most ten in a run, so
the theorem holds from the last one on.
"""

from __future__ import annotations

__all__ = ["EVERY", "MOST", "shortening"]

# The unit is looked at after every so many iterations, and changed at most this often.
EVERY = 10
MOST = 10


def shortening(stiffness: float) -> float:
    r"""Return the factor of the unit: :math:`2^{-s/4}` rounded to a power of two, at most 1.

    Example:
        >>> [shortening(s) for s in (-8.0, 1.9, 2.1, 8.0)]
        [1.0, 1.0, 0.5, 0.25]
    """
    return 2.0 ** -max(round(stiffness / 4), 0)
