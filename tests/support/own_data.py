"""Data as users have them: images in folders, and CSV files."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

WORDS = ("cat", "dog", "owl")


def write_image(path: Path, pixels: Tensor) -> None:
    """Write bytes, (H, W) or (H, W, 3), as a PNG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels.to(torch.uint8))).save(path)


def pictures(labels: Sequence[int], seed: int, side: int = 6) -> Tensor:
    """Grey noise with a bright stripe that tells the class, as bytes."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 120, (len(labels), side, side), generator=generator)
    for image, label in zip(images, labels, strict=True):
        image[2 * label : 2 * label + 2] += 100
    return images.to(torch.uint8)


def write_folder(folder: Path, labels: Sequence[int], seed: int, given: Sequence[int] = ()) -> None:
    """Write pictures of these classes into the folders of their given labels."""
    named = given or labels
    for i, (image, label) in enumerate(zip(pictures(labels, seed), named, strict=True)):
        write_image(folder / WORDS[label] / f"{i:03d}.png", image)


def write_table(path: Path, rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def blobs(labels: Sequence[int], seed: int) -> Tensor:
    """Two features around the corner of a triangle that tells the class, and one that is noise."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.tensor([[0.0, 0.0, 0.0], [40.0, 0.0, 0.0], [0.0, 4.0, 0.0]])
    noise = torch.randn(len(labels), 3, generator=generator) * torch.tensor([8.0, 0.8, 100.0])
    return corners[list(labels)] + noise


def write_blobs(path: Path, labels: Sequence[int], seed: int, given: Sequence[int] = ()) -> None:
    """Write a CSV file with columns name, a, b, c and label."""
    rows: list[list[object]] = [["name", "a", "b", "c", "label"]]
    features = blobs(labels, seed).tolist()
    for i, (values, label) in enumerate(zip(features, given or labels, strict=True)):
        rows.append([f"s{i}", *values, WORDS[label]])
    write_table(path, rows)
