"""Omniglot: 1,623 handwritten characters, 20 drawings of each."""

from __future__ import annotations

import hashlib
import io
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_bilevel.data.episodes import EpisodeData
from lightning_bilevel.data.samples import DATA_VARIABLE
from lightning_bilevel.files import write_whole

__all__ = ["OmniglotEpisodes"]

# images_background/<alphabet>/<character>/<drawing>.png
_MEMBER = re.compile(r"(images_background|images_evaluation)/[^/]+/[^/]+/[^/]+\.png")
# A drawing has some hundred bytes; a larger file is not a drawing and is skipped.
_MAX_BYTES = 1 << 20

Reader = Callable[[], bytes]


class OmniglotEpisodes(EpisodeData):
    """Few-shot episodes of Omniglot; the defaults are the paper's.

    The drawings come from ``omniglot-py`` in the root: the archives ``images_background.zip`` and
    ``images_evaluation.zip`` as torchvision downloads them, or the two folders of the same names.
    Missing archives are downloaded. The drawings are resized once and stored in the user's cache
    folder (``XDG_CACHE_HOME``, or ``~/.cache``).

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
        if not 1 <= image_size <= 105:
            raise ValueError(
                f"`OmniglotEpisodes(image_size={image_size})` must be from 1 to 105, the size of "
                "the originals."
            )
        self.root = Path(root or os.environ.get(DATA_VARIABLE) or "data")
        self.image_size = image_size
        if self.shots + self.queries > self.DRAWINGS:
            raise ValueError(
                f"`OmniglotEpisodes(shots={self.shots}, queries={self.queries})` needs "
                f"{self.shots + self.queries} drawings of each character: there are "
                f"{self.DRAWINGS}."
            )

    @property
    def folder(self) -> Path:
        """The folder of the archives."""
        return self.root / "omniglot-py"

    def prepare_data(self) -> None:
        """Download the archives if they are missing."""
        missing = [
            part
            for part in self.CLASSES
            if not (self._archive(part).exists() or (self.folder / part).is_dir())
        ]
        for part in missing:
            from torchvision import datasets

            try:
                datasets.Omniglot(self.root, background=part == "images_background", download=True)
            except (OSError, RuntimeError, HTTPException, ValueError) as error:
                raise MisconfigurationException(
                    f"`OmniglotEpisodes(root={str(self.root)!r})` has no Omniglot there, and a "
                    "download did not help: put images_background.zip and images_evaluation.zip "
                    f"into {self.folder}, or name the folder that has omniglot-py as `root` or in "
                    f"the environment variable {DATA_VARIABLE}."
                ) from error

    def load(self) -> Tensor:
        """Return all drawings, (1623, 20, 1, size, size); ink is 1, paper is 0."""
        readers: dict[str, Reader] = {}
        digest = hashlib.sha256(f"omniglot {self.image_size}".encode())
        for part in self.CLASSES:
            for name, fingerprint, reader in self._members(part):
                readers[name] = reader
                digest.update(f"{name} {fingerprint}\n".encode())
        names = self._checked(sorted(readers))
        cached = _cache_folder() / f"omniglot-{digest.hexdigest()[:16]}.pt"
        if cached.exists():
            small: Tensor = torch.load(cached, weights_only=True)
        else:
            small = torch.stack([_decode(name, readers[name](), self.image_size) for name in names])
            _keep(cached, small)
        return (1 - small.float() / 255).reshape(
            -1, self.DRAWINGS, 1, self.image_size, self.image_size
        )

    def _archive(self, part: str) -> Path:
        return self.folder / f"{part}.zip"

    def _members(self, part: str) -> Iterator[tuple[str, str, Reader]]:
        """Yield the name, fingerprint and reader of each drawing.

        No file is extracted, so a name in an archive cannot make us write to another folder.
        """
        archive = self._archive(part)
        folder = self.folder / part
        if archive.exists():
            try:
                file = zipfile.ZipFile(archive)
            except (zipfile.BadZipFile, OSError) as error:
                raise MisconfigurationException(
                    f"`OmniglotEpisodes(root={str(self.root)!r})`: {archive.name} is no whole "
                    f"archive ({error}). Remove it to have it downloaded again."
                ) from error
            for info in file.infolist():
                if _MEMBER.fullmatch(info.filename) and info.file_size <= _MAX_BYTES:
                    yield info.filename, f"{info.CRC:08x}", partial(_read, file, info)
        elif folder.is_dir():
            for path in folder.glob("*/*/*.png"):
                about = path.stat()
                if about.st_size <= _MAX_BYTES:
                    yield (
                        path.relative_to(self.folder).as_posix(),
                        f"{about.st_size} {about.st_mtime_ns}",
                        path.read_bytes,
                    )
        else:
            raise MisconfigurationException(
                f"`OmniglotEpisodes(root={str(self.root)!r})` has neither {part}.zip nor the "
                f"folder {part} in {self.folder}: only `prepare_data()` downloads it. A folder "
                "that has omniglot-py can be named as `root` or in the environment variable "
                f"{DATA_VARIABLE}."
            )

    def _checked(self, names: list[str]) -> list[str]:
        drawings: dict[str, int] = {}
        for name in names:
            character = name.rsplit("/", 1)[0]
            drawings[character] = drawings.get(character, 0) + 1
        for part, classes in self.CLASSES.items():
            counts = [
                count for character, count in drawings.items() if character.startswith(f"{part}/")
            ]
            if len(counts) != classes or set(counts) != {self.DRAWINGS}:
                raise MisconfigurationException(
                    f"`OmniglotEpisodes(root={str(self.root)!r})`: {part} is incomplete, with "
                    f"{sum(counts):,} drawings of {len(counts):,} characters where there should be "
                    f"{classes * self.DRAWINGS:,} of {classes:,}. Remove it from {self.folder} to "
                    "have it downloaded again."
                )
        return names


def _read(file: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    try:
        return file.read(info)
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise MisconfigurationException(
            f"`OmniglotEpisodes`: {info.filename} in {file.filename} cannot be read ({error}). "
            "Remove the archive to have it downloaded again."
        ) from error


def _decode(name: str, content: bytes, size: int) -> Tensor:
    from PIL import Image

    try:
        drawing = Image.open(io.BytesIO(content)).convert("L")
        image = drawing.resize((size, size), Image.Resampling.BILINEAR)
    except (OSError, ValueError) as error:
        raise MisconfigurationException(
            f"`OmniglotEpisodes`: {name} is no image ({error})."
        ) from error
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(size, size)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-bilevel"


def _keep(path: Path, images: Tensor) -> None:
    """Write the cache, completely or not at all; without it the next run decodes again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: torch.save(images, file))
    except (OSError, RuntimeError):  # torch raises either for a full or read-only disk
        return
