"""A small network that weights a sample by its loss."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_bilevel.core.sets import ConvexSet, Free
from lightning_bilevel.modules.weight_figures import draw_curve
from lightning_bilevel.modules.weight_files import Row, write_rows
from lightning_bilevel.solvers.torch_rule import OptimizerCallable

__all__ = ["WeightNet"]

# The logit of a weight stays between -8 and 8, where a weight is 0 or 1 to three digits.
_BOUND = 8.0
# The curve is shown for losses up to here, at so many points.
_LARGEST = 10.0
_POINTS = 101


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
        if isinstance(hidden, bool) or not isinstance(hidden, int) or hidden < 1:
            raise ValueError(
                f"`WeightNet(hidden={hidden!r})` must be a whole number of at least 1."
            )
        last = nn.Linear(hidden, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), last)
        self.feasible: ConvexSet = Free()
        self.optimizer: OptimizerCallable = partial(AdamW, lr=1e-2, weight_decay=0.0)

    def forward(self, losses: Tensor) -> Tensor:
        """Return the weights of samples with these losses."""
        if losses.ndim != 1:
            raise ValueError(
                f"`WeightNet` was given losses of shape {tuple(losses.shape)}: it needs one loss "
                "per sample, in a vector."
            )
        # The layers may run in half precision; the weights have the precision of the losses.
        found = self.layers(losses.detach().unsqueeze(1)).squeeze(1).to(losses.dtype)
        weights: Tensor = (_BOUND * torch.tanh(found / _BOUND)).sigmoid()
        return weights

    @torch.no_grad()
    def values(self, losses: Tensor | None = None) -> Tensor:
        """Return the weights of losses from 0 to 10, or of these, without gradients."""
        weights: Tensor = self(self._grid() if losses is None else losses)
        return weights

    def rows(self, losses: Tensor | None = None) -> list[Row]:
        """Return ``{"loss": ..., "weight": ...}`` for losses from 0 to 10, or for these."""
        at = self._grid() if losses is None else losses
        both = zip(at.tolist(), self.values(at).tolist(), strict=True)
        return [{"loss": loss, "weight": weight} for loss, weight in both]

    def export(self, path: str | Path, losses: Tensor | None = None) -> None:
        """Write the curve to a file, as a whole or not at all.

        Args:
            path: The file: ``.csv``, with the columns loss and weight, or ``.jsonl``.
            losses: Where the curve is evaluated; None takes losses from 0 to 10.
        """
        write_rows("WeightNet.export", Path(path), self.rows(losses))

    def figure(self) -> Any:
        """Draw the weight by the loss, as a matplotlib figure."""
        return draw_curve(self._grid(), self.values())

    def _grid(self) -> Tensor:
        parameter = next(self.parameters())
        return torch.linspace(0.0, _LARGEST, _POINTS).to(parameter)
