"""Scalar products and norms, summed in float64 for vectors of any dtype."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["dot", "norm", "squared_distance"]

# On a CPU longer vectors are summed piece by piece. The memory of a longer product comes from the
# system page by page, which takes longer than the sum, while a piece stays in the cache.
_PIECE = 1 << 16
# float32 products below this lose digits, and below 1e-45 they are 0. Such sums are computed again
# in float64.
_SMALL = 1e-30


def dot(a: Tensor, b: Tensor) -> float:
    r"""Return :math:`\langle a, b \rangle`."""
    value = float(_in_pieces(lambda a, b: (a * b).sum(dtype=torch.float64), a, b))
    if abs(value) < _SMALL and a.dtype != torch.float64:
        return float(_in_pieces(lambda a, b: (a.double() * b.double()).sum(), a, b))
    return value


def norm(a: Tensor) -> float:
    r"""Return :math:`\|a\|`."""
    return math.sqrt(dot(a, a))


def squared_distance(a: Tensor, b: Tensor) -> float:
    r"""Return :math:`\|a - b\|^2`."""
    value = float(_in_pieces(lambda a, b: (a - b).square_().sum(dtype=torch.float64), a, b))
    if value < _SMALL and a.dtype != torch.float64:
        return float(_in_pieces(lambda a, b: (a - b).double().square_().sum(), a, b))
    return value


def _in_pieces(summed: Callable[..., Tensor], *vectors: Tensor) -> Tensor:
    if vectors[0].numel() <= _PIECE or vectors[0].device.type != "cpu":
        return summed(*vectors)
    pieces = zip(*(torch.split(v, _PIECE) for v in vectors), strict=True)
    return torch.stack([summed(*piece) for piece in pieces]).sum()
