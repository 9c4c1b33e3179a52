"""The error and the warnings of IVSP for steps that lead nowhere."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.sets import ConvexSet
from lightning_bilevel.core.vectors import norm

__all__ = ["check_trials", "warn_of_ascent", "warn_of_stall"]


def check_trials(failures: Sequence[BilevelError], trials: int) -> None:
    """Raise the last failure if none of the trials could be evaluated.

    It says more than that the trials were rejected.
    """
    if failures and len(failures) >= trials:
        last = failures[-1]
        raise type(last)(
            f"in each of {trials} trials of the line search, in the last: {last}"
        ) from last


def warn_of_ascent(fixed_L: float, safe: float, iteration: int, merit: float, bound: float) -> None:
    """Warn of a step with a fixed L that fails the test of the line search.

    Args:
        fixed_L: The L.
        safe: What L_safe is at least.
        iteration: The number of the iteration.
        merit: The merit of the new point.
        bound: What the test asks it to be at most.
    """
    warnings.warn(
        f"`IVSP(fixed_L={fixed_L!r})` is too small: in outer iteration {iteration} the merit "
        f"became {merit:.9g}, where a line search asks for at most {bound:.9g}. Descent is proved "
        f"only above L_safe, which is {safe:.3g} or more here: make fixed_L larger, or leave it "
        "out for the line search.",
        stacklevel=4,
    )


def warn_of_stall(
    iteration: int, trials: int, merit: float, w: Tensor, direction: Tensor, feasible: ConvexSet
) -> bool:
    """Warn of a step of length zero at a point that is not stationary.

    Returns:
        Whether it warned.
    """
    measure = norm(feasible.project(w - direction) - w)
    stalled = measure > math.sqrt(torch.finfo(w.dtype).eps) * (1 + norm(w))
    if stalled:
        warnings.warn(
            f"IVSP does not move any more: in outer iteration {iteration} the line search accepted "
            f"a step of length 0 after {trials} trials, where the gradient mapping is "
            f"{measure:.3g}. The merit is {merit:.3g}, of which {w.dtype} resolves "
            f"{torch.finfo(w.dtype).eps * abs(merit):.1g}: scale f and g down, use float64, or "
            "make mu0 larger.",
            stacklevel=4,
        )
    return stalled
