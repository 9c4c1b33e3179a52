"""Numbers that are computed from vectors, accumulated in float64 whatever the vectors' dtype."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["dot", "norm"]


def dot(a: Tensor, b: Tensor) -> float:
    r"""Return :math:`\langle a, b \rangle`."""
    return float((a * b).sum(dtype=torch.float64))


def norm(a: Tensor) -> float:
    r"""Return :math:`\|a\|`."""
    return math.sqrt(dot(a, a))
