"""The figures of the ready modules; the functions import matplotlib when they draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bilevel.data.episodes import Episodes
from lightning_bilevel.plotting import PALETTE

__all__ = ["draw_episode", "draw_samples"]

_COLUMNS = 8
# The inches of a sample, and those above and below all samples.
_CELL = (1.1, 1.3)
_HEAD, _FOOT = 0.25, 0.1
_WRONG = PALETTE["vermillion"]


def draw_samples(
    images: Tensor,
    given: Sequence[object],
    predicted: Sequence[object],
    title: str,
    cmap: str = "gray_r",
) -> Any:
    """Draw images, each with its given and its predicted label above it.

    Args:
        images: The images, (N, C, H, W).
        given: Their labels in the data.
        predicted: Their predicted labels.
        title: The title of the figure.
        cmap: The colours of a grey image; by default dark on white, as digits are written.
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
        axis.imshow(pixels.numpy(), cmap=cmap, extent=place)
    axis.set(xlim=(0.0, width), ylim=(height, 0.0))
    figure.suptitle(title, fontsize=10, y=1 - 0.08 / height)
    return figure


def draw_episode(episode: Episodes, guesses: Sequence[int]) -> Any:
    """Draw one episode: each row has the support and the queries of one class.

    A misclassified query has a frame and the number of the predicted class.

    Args:
        episode: The episode; E is 1.
        guesses: The predicted label of each query.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    support, support_labels, query, query_labels = (tensor[0].cpu() for tensor in episode)
    ways = int(support_labels.max()) + 1
    size = int(support.shape[-1])
    # All images go into one picture: one axis per image would take seconds to draw.
    side = size + 4
    columns = (len(support) + len(query)) // ways
    sheet = torch.zeros(ways * side, columns * side)
    figure = Figure(figsize=(0.6 * columns + 0.6, 0.6 * ways + 0.6), layout="constrained")
    axis = figure.subplots()
    for label in range(ways):
        row: list[tuple[Tensor, int | None]] = []
        row += [(support[i, 0], None) for i in _indices(support_labels, label)]
        row += [(query[i, 0], guesses[i]) for i in _indices(query_labels, label)]
        for column, (image, guess) in enumerate(row):
            top = label * side + 2
            left = column * side + 2
            sheet[top : top + size, left : left + size] = image
            if guess not in (None, label):
                corner = left - 2, top - 2
                frame = Rectangle(
                    corner, side - 1, side - 1, fill=False, color=_WRONG, linewidth=1.5
                )
                axis.add_patch(frame)
                style: Any = {"color": _WRONG, "fontsize": 9, "ha": "right", "va": "center"}
                axis.text(left + size, top + 5, str(guess), **style)
    axis.imshow(sheet.numpy(), cmap="gray_r")
    axis.axvline(len(support) // ways * side - 0.5, color="0.5", linewidth=1)
    axis.set_yticks([(i + 0.5) * side for i in range(ways)], [str(i) for i in range(ways)])
    axis.set_xticks([])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    wrong = sum(a != b for a, b in zip(guesses, query_labels.tolist(), strict=True))
    title = f"support | queries, {wrong} of {len(guesses)} taken for another class"
    figure.suptitle(title, fontsize=9)
    return figure


def _indices(labels: Tensor, label: int) -> list[int]:
    indices: list[int] = (labels == label).nonzero().reshape(-1).tolist()
    return indices
