"""The figures of the ready modules; the functions import matplotlib when they draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

__all__ = ["axes", "draw_samples"]

_COLUMNS = 8


def axes(xlabel: str, ylabel: str) -> tuple[Any, Any]:
    """Return a figure and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 3.0), layout="constrained")
    axis = figure.subplots()
    axis.spines[["top", "right"]].set_visible(False)
    axis.set(xlabel=xlabel, ylabel=ylabel)
    return figure, axis


def draw_samples(
    images: Tensor, given: Sequence[object], predicted: Sequence[object], title: str
) -> Any:
    """Draw images, each with its given and its predicted label above it.

    Args:
        images: The images, (N, C, H, W).
        given: Their labels in the data.
        predicted: Their predicted labels.
        title: The title of the figure.
    """
    from matplotlib.figure import Figure
    from torchvision.utils import make_grid

    rows = math.ceil(len(images) / _COLUMNS)
    figure = Figure(figsize=(8.8, 0.4 + 1.3 * rows), layout="constrained")
    axis = figure.subplots()
    axis.set_axis_off()
    axis.set_title(title, fontsize=10)
    # One image of all: an axis for each would take seconds to draw.
    ink = (-images if images.shape[1] == 1 else images).cpu()
    height, width = math.ceil(1.3 * images.shape[2]), math.ceil(1.1 * images.shape[3])
    room = width - images.shape[3], 0, height - images.shape[2], 0
    paper = pad(ink, room, value=float(ink.max()))
    grid = make_grid(paper, nrow=_COLUMNS, padding=0, normalize=True)
    axis.imshow(grid.movedim(0, -1).numpy())
    for number, labels in enumerate(zip(given, predicted, strict=True)):
        row, column = divmod(number, _COLUMNS)
        place = (column + 0.5) * width, row * height + 0.2 * images.shape[2]
        axis.text(*place, "{} → {}".format(*labels), fontsize=9, ha="center", va="baseline")
    return figure
