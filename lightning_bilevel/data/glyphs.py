"""Glyphs: characters drawn from random strokes, so few-shot learning needs no download."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_bilevel.data.episodes import EpisodeData

# The radius of the pen, and the width over which its ink fades, as fractions of the image.
_PEN = 0.035
_FADE = 0.015
# Points along a stroke.
_POINTS = 40


def draw_glyphs(classes: int, drawings: int, size: int = 28, seed: int = 0) -> Tensor:
    """Draw characters of two to four random Bezier strokes, each several times with variations.

    Args:
        classes: The number of characters.
        drawings: Drawings of each character.
        size: Height and width of an image.
        seed: Decides the characters and their variations; character i depends only on the seed and
            i.

    Returns:
        Images of shape (classes, drawings, 1, size, size); ink is 1, paper is 0.
    """
    axis = (torch.arange(size) + 0.5) / size
    pixels = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    t = torch.linspace(0, 1, _POINTS).reshape(-1, 1)
    # The weights of the four control points along a cubic Bezier curve.
    weights = torch.cat([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3], dim=1)
    return torch.stack(
        [_draw(drawings, size, pixels, weights, seed * 1_000_003 + i) for i in range(classes)]
    )


def _draw(drawings: int, size: int, pixels: Tensor, weights: Tensor, key: int) -> Tensor:
    generator = torch.Generator().manual_seed(key)

    strokes = int(torch.randint(2, 5, (), generator=generator))
    controls = 0.15 + 0.7 * torch.rand(strokes, 4, 2, generator=generator)
    varied = controls + 0.025 * torch.randn(drawings, strokes, 4, 2, generator=generator)
    angle = 0.15 * torch.randn(drawings, generator=generator)
    scale = 1 + 0.08 * torch.randn(drawings, generator=generator)
    shift = 0.04 * torch.randn(drawings, 1, 2, generator=generator)
    cos, sin = angle.cos(), angle.sin()
    rotation = torch.stack([cos, -sin, sin, cos], -1).reshape(-1, 2, 2)
    points = (weights @ varied).flatten(1, 2)
    points = (points - 0.5) @ (rotation * scale.reshape(-1, 1, 1)) + 0.5 + shift
    distance = torch.cdist(pixels, points, compute_mode="donot_use_mm_for_euclid_dist").amin(-1)
    return torch.sigmoid((_PEN - distance) / _FADE).reshape(drawings, 1, size, size)


class GlyphEpisodes(EpisodeData):
    """Few-shot episodes of drawn glyphs, without a download.

    Args:
        image_size: The height and width of an image.
        drawings: Drawings of each character.
        train_classes: Classes of the training split.
        validation_classes: Classes of the validation split.
        test_classes: Classes of the test split.
        options: The other arguments of :class:`~lightning_bilevel.data.episodes.EpisodeData`.
    """

    def __init__(
        self,
        image_size: int = 28,
        drawings: int = 20,
        train_classes: int = 200,
        validation_classes: int = 50,
        test_classes: int = 50,
        **options: Any,
    ) -> None:
        super().__init__(
            train_classes=train_classes,
            validation_classes=validation_classes,
            test_classes=test_classes,
            **options,
        )
        self.image_size = image_size
        self.drawings = drawings

    def load(self) -> Tensor:
        """Draw all glyphs."""
        classes = sum(size or 0 for size in self.split_sizes.values())
        return draw_glyphs(classes, self.drawings, self.image_size)
