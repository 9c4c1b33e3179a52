"""Weights for data as an upper level: one per sample, per source or per class."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_bilevel.core.sets import Box, ConvexSet
from lightning_bilevel.modules.weight_figures import draw_bars, draw_histogram
from lightning_bilevel.modules.weight_files import Row, write_rows
from lightning_bilevel.solvers.table_rms import TableRMS
from lightning_bilevel.solvers.torch_rule import OptimizerCallable

__all__ = ["ClassWeights", "SampleWeights", "SourceWeights"]


class _Table(nn.Module):
    """One logit per item, which starts at 0.

    Args:
        argument: The argument that says how many there are, for messages.
        n: The number of items.
        least: The least number that makes sense.
        bound: The bound of the logits.
        optimizer: The torch optimiser that suits them.
    """

    item: ClassVar[str]
    entry: ClassVar[int]

    def __init__(
        self, argument: str, n: int, least: int, bound: float, optimizer: OptimizerCallable
    ) -> None:
        super().__init__()
        call = type(self).__name__
        if isinstance(n, bool) or not isinstance(n, int) or n < least:
            raise ValueError(
                f"`{call}({argument}={n!r})` must be a whole number of at least {least}."
            )
        if not 0 < bound < float("inf"):
            raise ValueError(f"`{call}(bound={bound!r})` must be positive and finite.")
        self.logits = nn.Parameter(torch.zeros(n))
        self.feasible: ConvexSet = Box(-bound, bound)
        self.optimizer = optimizer

    def values(self) -> Tensor:
        """Return all weights, without gradients."""
        return self._weights(self.logits.detach())

    def rows(self, ids: Sequence[Hashable] | None = None) -> list[Row]:
        """Return ``{"id": ..., "weight": ...}`` for each item, which data frames are made of.

        Args:
            ids: Your name of each item, in the order of its number; None takes the numbers.
        """
        weights = self.values().tolist()
        names = range(len(weights)) if ids is None else self._checked(ids)
        return [{"id": name, "weight": w} for name, w in zip(names, weights, strict=True)]

    def export(self, path: str | Path, ids: Sequence[Hashable] | None = None) -> None:
        """Write the weights to a file, as a whole or not at all.

        Args:
            path: The file: ``.csv``, with the columns id and weight, or ``.jsonl``.
            ids: Your name of each item, in the order of its number; None takes the numbers.
        """
        write_rows(f"{type(self).__name__}.export", Path(path), self.rows(ids))

    def _weights(self, logits: Tensor) -> Tensor:
        raise NotImplementedError

    def _chosen(self, values: Tensor, index: Tensor) -> Tensor:
        """Return the values of these items."""
        call = type(self).__name__
        if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32):
            kind = index.dtype if isinstance(index, Tensor) else type(index).__name__
            raise TypeError(
                f"`{call}` was given {kind}: it needs the number of each sample's {self.item}, as "
                "a tensor of whole numbers."
            )
        try:
            # The backward pass of plain indexing takes longer than the whole forward pass.
            return values.index_select(0, index.reshape(-1))
        except IndexError as error:
            n = len(values)
            bad = int(index[(index < 0) | (index >= n)][0])
            raise IndexError(
                f"`{call}` was given the {self.item} number {bad}: it has {n:,} weights, numbered "
                f"from 0 to {n - 1:,}."
            ) from error

    def _checked(self, ids: Sequence[Hashable]) -> list[Hashable]:
        call = f"{type(self).__name__}.export"
        names = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        n = len(self.logits)
        if len(names) != n:
            raise ValueError(
                f"`{call}(ids=...)` has {len(names):,} names for {n:,} weights: one for each "
                f"{self.item} is needed, in the order of its number."
            )
        places: dict[Hashable, int] = {}
        for i, name in enumerate(names):
            if name is None or name == "":
                raise ValueError(f"`{call}(ids=...)` has no name at place {i}: each must have one.")
            if name in places:
                raise ValueError(
                    f"`{call}(ids=...)` has {name!r} at the places {places[name]} and {i}: each "
                    "name must be there once."
                )
            places[name] = i
        return names


class SampleWeights(_Table):
    r"""One weight per training sample, :math:`w_i = \sigma(x_i)` with :math:`x_i` in [-8, 8].

    All weights start at 1/2. On mini-batches a weight moves when its sample is in the batch and at
    no other time; by default :class:`~lightning_bilevel.solvers.table_rms.TableRMS` decides how
    far, which depends neither on the number of samples nor on the size of a batch.

    The table cannot tell anything of samples that it has no row for. For data that are seen once
    take :class:`~lightning_bilevel.modules.weight_net.WeightNet`.

    Args:
        n: The number of samples.
        bound: The bound of x. At 8 a weight is 0 or 1 to three digits.

    Attributes:
        entry: The place in a training batch of what ``forward`` takes: (inputs, labels, number).
        feasible: The set of the logits.
        optimizer: Makes the torch optimiser that suits them.

    Example:
        >>> weights = SampleWeights(4)
        >>> weights(torch.tensor([2, 0])).detach()
        tensor([0.5000, 0.5000])
    """

    item = "sample"
    entry = 2

    def __init__(self, n: int, bound: float = 8.0) -> None:
        super().__init__("n", n, 1, bound, partial(TableRMS, lr=3.0))

    def forward(self, index: Tensor) -> Tensor:
        """Return the weights of the samples with these numbers."""
        return self._chosen(self.logits, index).sigmoid()

    def touched(self, index: Tensor) -> Tensor:
        """Return the numbers of the weights that a batch speaks of: those of its samples."""
        return index

    def figure(self) -> Any:
        """Draw how many samples have which weight, as a matplotlib figure."""
        return draw_histogram(self.values())

    def _weights(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()


class _Shares(_Table):
    r"""A few weights that compete: :math:`w_j = k \operatorname{softmax}(x)_j`, with mean 1."""

    def __init__(self, argument: str, k: int, bound: float) -> None:
        # Weight decay would pull the weights together.
        optimizer = partial(AdamW, lr=1e-2, weight_decay=0.0)
        super().__init__(argument, k, 2, bound, optimizer)

    def forward(self, index: Tensor) -> Tensor:
        """Return for each sample the weight of the item with its number."""
        return self._chosen(self._weights(self.logits), index)

    def shares(self) -> Tensor:
        """Return the weights as shares, which are positive and sum to 1."""
        return self.logits.detach().softmax(0)

    def figure(self, names: Sequence[Any] | None = None) -> Any:
        """Draw the weights as bars, as a matplotlib figure.

        Args:
            names: What stands below the bars; None takes the numbers.
        """
        labels = range(len(self.logits)) if names is None else self._checked(names)
        return draw_bars(self.values(), [str(label) for label in labels], self.item)

    def _weights(self, logits: Tensor) -> Tensor:
        return len(logits) * logits.softmax(0)


class SourceWeights(_Shares):
    r"""One weight per source of data, such as a corpus or an annotator.

    .. math:: w_j = k \operatorname{softmax}(x)_j, \qquad x \in [-8, 8]^k

    so that the mean of the k weights is 1, as it is at the start.

    Args:
        k: The number of sources.
        bound: The bound of x.

    Attributes:
        entry: The place in a training batch of what ``forward`` takes: the last,
            (inputs, labels, source) or (inputs, labels, number, source).
        feasible: The set of the logits.
        optimizer: Makes the torch optimiser that suits them: AdamW with a rate of 1e-2. A logit
            moves by about the rate in each step, so a run needs some hundreds of steps.

    Example:
        >>> SourceWeights(3)(torch.tensor([0, 2, 2])).detach()
        tensor([1., 1., 1.])
    """

    item = "source"
    entry = -1

    def __init__(self, k: int, bound: float = 8.0) -> None:
        super().__init__("k", k, bound)


class ClassWeights(_Shares):
    r"""One weight per class, for classes out of balance.

    .. math:: w_q = c \operatorname{softmax}(x)_q, \qquad x \in [-8, 8]^c

    Args:
        c: The number of classes.
        bound: The bound of x.

    Attributes:
        entry: The place in a training batch of what ``forward`` takes: that of the labels,
            (inputs, labels).
        feasible: The set of the logits.
        optimizer: Makes the torch optimiser that suits them: AdamW with a rate of 1e-2.
    """

    item = "class"
    entry = 1

    def __init__(self, c: int, bound: float = 8.0) -> None:
        super().__init__("c", c, bound)
