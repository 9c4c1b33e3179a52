"""The figures of the ready modules; the functions import matplotlib when they draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["draw_bars", "draw_curve", "draw_histogram", "draw_samples"]

_COLUMNS = 8
# The inches of a sample, and those above and below all samples.
_CELL = (1.1, 1.3)
_HEAD, _FOOT = 0.25, 0.1


def draw_samples(
    images: Tensor,
    given: Sequence[object],
    predicted: Sequence[object],
    title: str,
) -> Any:
    """Draw images, each with its given and its predicted label above it.

    Args:
        images: The images, (N, C, H, W).
        given: Their labels in the data.
        predicted: Their predicted labels.
        title: The title of the figure.
    """
    from matplotlib.figure import Figure

    rows = math.ceil(len(images) / _COLUMNS)
    width, height = _COLUMNS * _CELL[0], _HEAD + rows * _CELL[1] + _FOOT
    figure = Figure(figsize=(width, height))
    # One axis in inches for all images: one per image would take seconds to draw.
    axis = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axis.set_axis_off()
    for number, (image, label, guess) in enumerate(
        zip(images.cpu(), given, predicted, strict=False)
    ):
        row, column = divmod(number, _COLUMNS)
        middle, top = (column + 0.5) * _CELL[0], _HEAD + row * _CELL[1]
        axis.text(middle, top + 0.2, f"{label} → {guess}", fontsize=9, ha="center", va="baseline")
        pixels = image.squeeze(0) if len(image) == 1 else image.movedim(0, -1)
        half, long = (side / max(pixels.shape[:2]) for side in (pixels.shape[1] / 2, len(pixels)))
        place = (middle - half, middle + half, top + 0.25 + long, top + 0.25)
        axis.imshow(pixels.numpy(), cmap="gray_r", extent=place)
    axis.set(xlim=(0.0, width), ylim=(height, 0.0))
    figure.suptitle(title, fontsize=10, y=1 - 0.08 / height)
    return figure


def _axes(xlabel: str, ylabel: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 3.0), layout="constrained")
    axis = figure.subplots()
    axis.spines[["top", "right"]].set_visible(False)
    axis.set(xlabel=xlabel, ylabel=ylabel)
    return figure, axis


def draw_histogram(weights: Tensor) -> Any:
    """Draw how many samples have which weight between 0 and 1."""
    figure, axis = _axes("weight", "samples")
    axis.hist(weights.cpu().numpy(), bins=50, range=(0.0, 1.0))
    return figure


def draw_bars(weights: Tensor, names: Sequence[str], item: str) -> Any:
    """Draw a few weights as bars, beside a line at 1, where they start."""
    figure, axis = _axes(item, "weight")
    places = range(len(names))
    axis.bar(places, weights.cpu().numpy())
    axis.axhline(1.0, color="0.5", linewidth=1, linestyle="--")
    axis.set_xticks(places, names, rotation=0 if max(map(len, names)) < 4 else 60)
    return figure


def draw_curve(losses: Tensor, weights: Tensor) -> Any:
    """Draw the weight of a sample by its loss."""
    figure, axis = _axes("loss of a sample", "weight")
    axis.plot(losses.cpu().numpy(), weights.cpu().numpy())
    axis.set_ylim(0.0, 1.0)
    return figure
