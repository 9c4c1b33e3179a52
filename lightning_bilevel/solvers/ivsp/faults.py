"""The error and the warning of IVSP for a line search that leads nowhere."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.sets import ConvexSet
from lightning_bilevel.core.vectors import norm

__all__ = ["check_trials", "warn_of_stall"]


def check_trials(failures: Sequence[BilevelError], trials: int) -> None:
    """Raise the last failure if none of the trials could be evaluated.

    It says more than that the trials were rejected.
    """
    if failures and len(failures) >= trials:
        last = failures[-1]
        raise type(last)(
            f"in each of {trials} trials of the line search, in the last: {last}"
        ) from last


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
