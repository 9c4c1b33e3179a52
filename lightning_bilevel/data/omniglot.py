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
from lightning_bilevel.output import write_whole

__all__ = ["OmniglotEpisodes"]


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
                    raise self._missing_data(error) from error

    def load(self) -> Tensor:
        """Return all drawings, (1623, 20, 1, size, size); ink is 1, paper is 0."""
        try:
            small = torch.cat([self._drawings(part) for part in self.CLASSES])
        except (zipfile.BadZipFile, OSError, EOFError, ZlibError, ValueError) as error:
            raise self._missing_data(error) from error
        size = self.image_size
        return (1 - small.float() / 255).reshape(-1, self.DRAWINGS, 1, size, size)

    def _archive(self, part: str) -> Path:
        return self.root / "omniglot-py" / f"{part}.zip"

    def _missing_data(self, why: Exception) -> MisconfigurationException:
        files = "whole archives images_background.zip and images_evaluation.zip"
        return missing_data(type(self).__name__, files, self.root, "omniglot-py", why)

    def _drawings(self, part: str) -> Tensor:
        """Return the drawings of an archive as bytes, decoded once and then from the cache."""
        archive = self._archive(part)
        about = archive.stat()
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        name = f"omniglot-{part}-{self.image_size}-{about.st_size}-{about.st_mtime_ns}.pt"
        cached = folder / "lightning-bilevel" / name
        if cached.exists():
            known: Tensor = torch.load(cached, weights_only=True)
            return known
        drawings = self._decoded(archive, part)
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
            write_whole(cached, lambda file: torch.save(drawings, file))
        except (OSError, RuntimeError):  # torch raises either for a full or read-only disk
            pass  # the next run decodes again
        return drawings

    def _decoded(self, archive: Path, part: str) -> Tensor:
        """Return the drawings of an archive; nothing of it is extracted."""
        from PIL import Image

        size = self.image_size
        drawings = []
        with zipfile.ZipFile(archive) as file:
            for name in sorted(file.namelist()):
                if re.fullmatch(rf"{part}/[^/]+/[^/]+/[^/]+\.png", name):
                    drawing = Image.open(io.BytesIO(file.read(name))).convert("L")
                    image = drawing.resize((size, size), Image.Resampling.BILINEAR).tobytes()
                    drawings.append(torch.frombuffer(bytearray(image), dtype=torch.uint8))
        if len(drawings) != self.CLASSES[part] * self.DRAWINGS:
            raise ValueError(f"{archive.name} has {len(drawings):,} drawings")
        return torch.stack(drawings).reshape(-1, size, size)
