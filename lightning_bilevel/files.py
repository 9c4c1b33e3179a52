"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

__all__ = ["write_whole"]


def write_whole(path: Path, content: bytes | Callable[[BinaryIO], None]) -> None:
    """Write a file such that whoever is killed or runs out of disk while writing leaves the file
    that was there before.

    Args:
        path: The file.
        content: Its content, or what writes it to an open file.
    """
    # Beside the file, as a rename within one file system is the step that cannot be half done; a
    # later call writes over what a killed one has left.
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            file.flush()
            os.fsync(
                file.fileno()
            )  # otherwise a power failure may leave the new name with none of the bytes
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
