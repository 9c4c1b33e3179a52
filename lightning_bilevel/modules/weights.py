"""Weights for data as an upper level: per sample, source or class, or a curve of the loss."""

from __future__ import annotations

import csv
import io
from collections.abc import Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_bilevel.core.sets import Box, ConvexSet, Free
from lightning_bilevel.modules.figures import axes
from lightning_bilevel.output import write_whole
from lightning_bilevel.stochastic.table_rms import TableRMS

__all__ = ["ClassWeights", "SampleWeights", "SourceWeights", "WeightNet"]


# The logit of a weight stays between -8 and 8, where a weight is 0 or 1 to three digits.
_BOUND = 8.0
# The curve is shown for losses up to here, at so many points.
_LARGEST = 10.0
_POINTS = 101


class _Table(nn.Module):
    """One logit per item, which starts at 0.

    Args:
        n: The number of items.
        bound: The bound of the logits. At 8 a sigmoid is 0 or 1 to three digits.
    """

    entry: ClassVar[int]
    optimizer: OptimizerCallable

    def __init__(self, n: int, bound: float = _BOUND) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(n))
        self.feasible: ConvexSet = Box(-bound, bound)

    def values(self) -> Tensor:
        """Return all weights, without gradients."""
        return self._weights(self.logits.detach())

    def rows(self, ids: Sequence[Hashable] | None = None) -> list[dict[str, Any]]:
        """Return ``{"id": ..., "weight": ...}`` for each item, which data frames are made of.

        Args:
            ids: Your name of each item, in the order of its number; None takes the numbers.
        """
        weights = self.values().tolist()
        names = range(len(weights)) if ids is None else ids
        return [{"id": name, "weight": w} for name, w in zip(names, weights, strict=True)]

    def export(self, path: str | Path, ids: Sequence[Hashable] | None = None) -> None:
        """Write the weights to a CSV file, as a whole or not at all.

        Args:
            path: The file, with the columns id and weight.
            ids: Your name of each item, in the order of its number; None takes the numbers.
        """
        text = io.StringIO()
        table = csv.DictWriter(text, ["id", "weight"], lineterminator="\n")
        table.writeheader()
        table.writerows(self.rows(ids))
        write_whole(Path(path), text.getvalue().encode())

    def _weights(self, logits: Tensor) -> Tensor:
        raise NotImplementedError


class SampleWeights(_Table):
    r"""One weight per training sample, :math:`w_i = \sigma(x_i)` with :math:`x_i` in [-8, 8].

    All weights start at 1/2. On mini-batches a weight moves when its sample is in the batch and at
    no other time; by default :class:`~lightning_bilevel.stochastic.table_rms.TableRMS` decides how
    far, which depends neither on the number of samples nor on the size of a batch.

    The table cannot tell anything of samples that it has no row for. For data that are seen once
    take :class:`~lightning_bilevel.modules.weights.WeightNet`.

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

    entry = 2
    optimizer = partial(TableRMS, lr=3.0)

    def forward(self, index: Tensor) -> Tensor:
        """Return the weights of the samples with these numbers."""
        # The backward pass of plain indexing takes longer than the whole forward pass.
        return self.logits.index_select(0, index.reshape(-1)).sigmoid()

    def figure(self) -> Any:
        """Draw how many samples have which weight, as a matplotlib figure."""
        figure, axis = axes("weight", "samples")
        axis.hist(self.values().cpu().numpy(), bins=50, range=(0.0, 1.0))
        return figure

    def _weights(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()


class SourceWeights(_Table):
    r"""One weight per source of data, such as a corpus or an annotator; the weights compete.

    .. math:: w_j = n \operatorname{softmax}(x)_j, \qquad x \in [-8, 8]^n

    so that the mean of the n weights is 1, as it is at the start.

    Args:
        n: The number of sources.
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

    entry = -1
    # What has a weight, as the figure calls it.
    item = "source"
    # Weight decay would pull the weights together.
    optimizer = partial(AdamW, lr=1e-2, weight_decay=0.0)

    def forward(self, index: Tensor) -> Tensor:
        """Return for each sample the weight of the item with its number."""
        return self._weights(self.logits).index_select(0, index.reshape(-1))

    def shares(self) -> Tensor:
        """Return the weights as shares, which are positive and sum to 1."""
        return self.logits.detach().softmax(0)

    def figure(self, names: Sequence[Any] | None = None) -> Any:
        """Draw the weights as bars beside a line at 1, as a matplotlib figure.

        Args:
            names: What stands below the bars; None takes the numbers.
        """
        figure, axis = axes(self.item, "weight")
        labels = [str(row["id"]) for row in self.rows(names)]
        axis.bar(range(len(labels)), self.values().cpu().numpy())
        axis.axhline(1.0, color="0.5", linewidth=1, linestyle="--")
        axis.set_xticks(range(len(labels)), labels, rotation=0 if max(map(len, labels)) < 4 else 60)
        return figure

    def _weights(self, logits: Tensor) -> Tensor:
        return len(logits) * logits.softmax(0)


class ClassWeights(SourceWeights):
    r"""One weight per class, for classes out of balance; otherwise as :class:`SourceWeights`.

    Args:
        n: The number of classes.
        bound: The bound of x.

    Attributes:
        entry: The place in a training batch of what ``forward`` takes: that of the labels,
            (inputs, labels).
    """

    entry = 1
    item = "class"


class WeightNet(nn.Module):
    r"""A weight for each sample by its loss alone, after Shu et al. (2019).

    .. math:: w(\ell) = \sigma\bigl(8 \tanh(h_x(\ell) / 8)\bigr), \qquad
        h_x(\ell) = a^\top \max\{b\,\ell + c,\, 0\} + d, \qquad x = (a, b, c, d)

    There is no table, so samples need no number and may be seen once only. All weights start at
    1/2. The loss is taken as a number: g has no gradient in y through the weight.

    A curve of the loss cannot tell a wrong label from a right one that is hard. It helps as far as
    wrong labels have larger losses.

    Args:
        hidden: The hidden units.

    Attributes:
        entry: None: ``forward`` takes the losses of a training batch, and no entry of it.
        feasible: The set of x, the whole space.
        optimizer: Makes the torch optimiser that suits x: AdamW with a rate of 1e-2.
    """

    entry: ClassVar[None] = None

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        last = nn.Linear(hidden, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), last)
        self.feasible: ConvexSet = Free()
        self.optimizer: OptimizerCallable = partial(AdamW, lr=1e-2, weight_decay=0.0)

    def forward(self, losses: Tensor) -> Tensor:
        """Return the weights of samples with these losses."""
        # The layers may run in half precision; the weights have the precision of the losses.
        found = self.layers(losses.detach().unsqueeze(1)).squeeze(1).to(losses.dtype)
        weights: Tensor = (_BOUND * torch.tanh(found / _BOUND)).sigmoid()
        return weights

    @torch.no_grad()
    def values(self) -> Tensor:
        """Return the weights of losses from 0 to 10, without gradients."""
        weights: Tensor = self(self._grid())
        return weights

    def figure(self) -> Any:
        """Draw the weight by the loss, as a matplotlib figure."""
        figure, axis = axes("loss of a sample", "weight")
        axis.plot(self._grid().cpu().numpy(), self.values().cpu().numpy())
        axis.set_ylim(0.0, 1.0)
        return figure

    def _grid(self) -> Tensor:
        parameter = next(self.parameters())
        return torch.linspace(0.0, _LARGEST, _POINTS).to(parameter)
