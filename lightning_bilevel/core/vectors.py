"""Scalar products and norms, summed in float64 for vectors of any dtype."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["by_pieces", "dot", "norm", "squared_distance", "squared_distance_on_device"]

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


def squared_distance_on_device(a: Tensor, b: Tensor) -> Tensor:
    r"""Return :math:`\|a - b\|^2` as a scalar tensor, without a transfer to the host."""
    return _in_pieces(lambda a, b: (a - b).square_().sum(dtype=torch.float64), a, b)


def by_pieces(*vectors: Tensor) -> list[tuple[Tensor, ...]]:
    """Return the vectors piece by piece, for arithmetic that does the same to each coordinate.

    On a CPU a piece stays in the cache while several operations go over it. Elsewhere, and if they
    are short, the vectors are one piece.

    Example:
        >>> [len(a) for a, b in by_pieces(torch.ones(100_000), torch.ones(100_000))]
        [65536, 34464]
    """
    if vectors[0].numel() <= _PIECE or vectors[0].device.type != "cpu":
        return [vectors]
    return list(zip(*(torch.split(v, _PIECE) for v in vectors), strict=True))


def _in_pieces(summed: Callable[..., Tensor], *vectors: Tensor) -> Tensor:
    pieces = by_pieces(*vectors)
    if len(pieces) == 1:
        return summed(*vectors)
    return torch.stack([summed(*piece) for piece in pieces]).sum()
