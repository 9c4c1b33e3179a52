"""Pictures of weights; the functions import matplotlib when they draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_bilevel.plotting import PALETTE

__all__ = ["draw_bars", "draw_curve", "draw_histogram"]

_BINS = 50


def _axes() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 3.0), layout="constrained")
    axis = figure.subplots()
    axis.spines[["top", "right"]].set_visible(False)
    return figure, axis


def draw_histogram(weights: Tensor) -> Any:
    """Draw how many samples have which weight between 0 and 1."""
    figure, axis = _axes()
    axis.hist(weights.cpu().numpy(), bins=_BINS, range=(0.0, 1.0), color=PALETTE["blue"])
    axis.set_xlabel("weight")
    axis.set_ylabel("samples")
    return figure


def draw_bars(weights: Tensor, names: Sequence[str], item: str) -> Any:
    """Draw a few weights as bars, beside a line at 1, where they start."""
    figure, axis = _axes()
    places = range(len(names))
    axis.bar(places, weights.cpu().numpy(), color=PALETTE["blue"])
    axis.axhline(1.0, color="0.5", linewidth=1, linestyle="--")
    axis.set_xticks(places, names, rotation=0 if max(map(len, names)) < 4 else 60)
    axis.set_xlabel(item)
    axis.set_ylabel("weight")
    return figure


def draw_curve(losses: Tensor, weights: Tensor) -> Any:
    """Draw the weight of a sample by its loss."""
    figure, axis = _axes()
    axis.plot(losses.cpu().numpy(), weights.cpu().numpy(), color=PALETTE["blue"])
    axis.set_ylim(0.0, 1.0)
    axis.set_xlabel("loss of a sample")
    axis.set_ylabel("weight")
    return figure
