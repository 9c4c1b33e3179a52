"""Images in one folder per class, as torchvision's ImageFolder has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Labelled", "read_folder"]

_ENDINGS = {".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_GREY = ("1", "L", "LA", "La")
# All images are held in memory as float32.
_MOST_BYTES = 8e9


class Labelled(NamedTuple):
    """Samples as they stand in the files.

    Attributes:
        inputs: Images as bytes, (N, C, H, W), or features as doubles, (N, d).
        labels: The label of each sample, a word.
        ids: The name of each sample.
        columns: The names of the features; none for images.
    """

    inputs: Tensor
    labels: list[str]
    ids: list[str]
    columns: tuple[str, ...] = ()


def read_folder(option: str, folder: Path, size: int | None = None) -> Labelled:
    """Read all images below a folder; the label of an image is the name of its folder.

    The id of an image is its path from the folder. Images are grey if all of them are, otherwise
    RGB. Files that are no images and hidden ones are passed over.

    Args:
        option: The option that names the folder, for errors.
        folder: The folder, with one folder per class.
        size: Resize all images to so many pixels in height and width.
    """
    paths = _image_paths(option, folder)
    pictures: list[Tensor] = []
    for path in paths:
        pixels = _pixels(option, path, size)
        if not pictures:
            _check_memory(option, len(paths), pixels)
        elif pixels.shape[:2] != pictures[0].shape[:2]:
            raise ValueError(
                f"`{option}` has an image of {_size(pictures[0])} pixels "
                f"({_name(folder, paths[0])}) and one of {_size(pixels)} ({_name(folder, path)}): "
                "all must have the same size. `--size 32` resizes all of them to 32x32."
            )
        pictures.append(pixels)
    if any(pixels.ndim == 3 for pixels in pictures):
        pictures = [
            pixels if pixels.ndim == 3 else pixels.unsqueeze(2).expand(-1, -1, 3)
            for pixels in pictures
        ]
        inputs = torch.stack(pictures).permute(0, 3, 1, 2).contiguous()
    else:
        inputs = torch.stack(pictures).unsqueeze(1)
    labels = [path.relative_to(folder).parts[0] for path in paths]
    return Labelled(inputs, labels, [_name(folder, path) for path in paths])


def _image_paths(option: str, folder: Path) -> list[Path]:
    found = [path for path in sorted(folder.rglob("*")) if _is_image(path.relative_to(folder))]
    found = [path for path in found if path.is_file()]
    loose = [path for path in found if path.parent == folder]
    if loose:
        raise ValueError(
            f"`{option}` has an image outside the folders of the classes ({loose[0].name}): the "
            f"label of an image is the name of its folder, such as {folder.name}/cat/1.png."
        )
    if not found:
        endings = ", ".join(sorted(_ENDINGS))
        raise ValueError(
            f"`{option}` has no images: they must lie in one folder per class, such as "
            f"{folder.name}/cat/1.png, and end in {endings}."
        )
    return found


def _is_image(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return path.suffix.lower() in _ENDINGS and not hidden


def _pixels(option: str, path: Path, size: int | None) -> Tensor:
    """Return an image as bytes, (H, W) if it is grey and (H, W, 3) otherwise."""
    import numpy as np
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            # Cameras store the way that they were held beside the pixels.
            image: Any = ImageOps.exif_transpose(file)
            if image.mode.startswith("I"):
                # 16 bits per pixel; a plain conversion would cut off all values above 255.
                image = Image.fromarray((np.asarray(image).clip(0, 65535) / 257).astype("uint8"))
            image = image.convert("L" if image.mode in _GREY else "RGB")
            if size is not None:
                image = image.resize((size, size), Image.Resampling.BILINEAR)
            return torch.from_numpy(np.array(image))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"`{option}`: {path} cannot be read as an image ({error}): repair it or take it out of "
            "the folder."
        ) from error


def _check_memory(option: str, count: int, pixels: Tensor) -> None:
    needed = 4.0 * count * pixels.numel()
    if needed > _MOST_BYTES:
        raise ValueError(
            f"`{option}` has {count:,} images of {_size(pixels)} pixels, which take "
            f"{needed / 1e9:.0f} GB of memory as numbers: `--size 64` makes them smaller."
        )


def _size(pixels: Tensor) -> str:
    height, width = pixels.shape[:2]
    return f"{width}x{height}"


def _name(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()
