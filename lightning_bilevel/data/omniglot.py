"""Omniglot: 1,623 handwritten characters, 20 drawings of each."""

from __future__ import annotations

import io
import os
import re
import zipfile
from http.client import HTTPException
from pathlib import Path
from typing import Any, ClassVar
from zlib import error as ZlibError

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_bilevel.data.episodes import EpisodeData
from lightning_bilevel.data.samples import data_root, missing_data
from lightning_bilevel.files import write_whole

__all__ = ["OmniglotEpisodes"]

# A drawing has some hundred bytes; a larger file is not a drawing and is skipped.
_MAX_BYTES = 1 << 20


class OmniglotEpisodes(EpisodeData):
    """Few-shot episodes of Omniglot; the defaults are the paper's.

    The drawings come from ``omniglot-py`` in the root: the archives ``images_background.zip`` and
    ``images_evaluation.zip`` as torchvision downloads them. Missing archives are downloaded. The
    drawings are resized once and stored in the user's cache folder (``XDG_CACHE_HOME``, or
    ``~/.cache``).

    Args:
        root: The folder of ``omniglot-py``; None takes the environment variable
            LIGHTNING_BILEVEL_DATA, or else ``data``.
        image_size: The height and width of an image.
        options: The arguments of :class:`~lightning_bilevel.data.episodes.EpisodeData`.
    """

    CLASSES: ClassVar[dict[str, int]] = {"images_background": 964, "images_evaluation": 659}
    DRAWINGS: ClassVar[int] = 20

    def __init__(self, root: str | None = None, image_size: int = 28, **options: Any) -> None:
        super().__init__(**options)
        self.root = data_root(root)
        self.image_size = image_size

    def prepare_data(self) -> None:
        """Download the archives if they are missing."""
        from torchvision import datasets

        for part in self.CLASSES:
            if not self._archive(part).exists():
                try:
                    background = part == "images_background"
                    datasets.Omniglot(self.root, background=background, download=True)
                except (OSError, RuntimeError, HTTPException, ValueError) as error:
                    raise self._missing_data() from error

    def load(self) -> Tensor:
        """Return all drawings, (1623, 20, 1, size, size); ink is 1, paper is 0."""
        small = torch.cat([self._drawings(part) for part in self.CLASSES])
        size = self.image_size
        return (1 - small.float() / 255).reshape(-1, self.DRAWINGS, 1, size, size)

    def _archive(self, part: str) -> Path:
        return self.root / "omniglot-py" / f"{part}.zip"

    def _missing_data(self) -> MisconfigurationException:
        files = "images_background.zip and images_evaluation.zip"
        return missing_data(type(self).__name__, files, self.root, "omniglot-py")

    def _drawings(self, part: str) -> Tensor:
        """Return the drawings of an archive as bytes; nothing of it is extracted."""
        archive = self._archive(part)
        if not archive.exists():
            raise self._missing_data()
        about = archive.stat()
        name = f"omniglot-{part}-{self.image_size}-{about.st_size}-{about.st_mtime_ns}.pt"
        cached = _cache_folder() / name
        if cached.exists():
            drawings: Tensor = torch.load(cached, weights_only=True)
            return drawings
        member = re.compile(rf"{part}/[^/]+/[^/]+/[^/]+\.png")
        try:
            with zipfile.ZipFile(archive) as file:
                small = [info for info in file.infolist() if info.file_size <= _MAX_BYTES]
                names = sorted(info.filename for info in small if member.fullmatch(info.filename))
                read = [_decode(file.read(name), self.image_size) for name in names]
        except (zipfile.BadZipFile, OSError, EOFError, ZlibError) as error:
            raise self._broken(archive, str(error)) from error
        if len(read) != self.CLASSES[part] * self.DRAWINGS:
            raise self._broken(archive, f"it has {len(read):,} drawings")
        drawings = torch.stack(read)
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
            write_whole(cached, lambda file: torch.save(drawings, file))
        except (OSError, RuntimeError):  # torch raises either for a full or read-only disk
            pass  # the next run decodes again
        return drawings

    def _broken(self, archive: Path, why: str) -> MisconfigurationException:
        return MisconfigurationException(
            f"`{type(self).__name__}`: {archive} is no whole archive of Omniglot ({why}). Remove "
            "it to have it downloaded again."
        )


def _decode(content: bytes, size: int) -> Tensor:
    from PIL import Image

    drawing = Image.open(io.BytesIO(content)).convert("L")
    image = drawing.resize((size, size), Image.Resampling.BILINEAR)
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(size, size)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-bilevel"
