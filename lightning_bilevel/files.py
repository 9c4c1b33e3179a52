"""Files that are written as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

__all__ = ["write_whole"]


def write_whole(path: Path, content: bytes | Callable[[BinaryIO], None]) -> None:
    """Write a file, or leave the old one if the process is killed or the disk is full.

    Args:
        path: The file.
        content: Its content, or a function that writes the content to an open file.
    """
    # The temporary file is in the same folder, because only a rename within one file system cannot
    # be half done. The next call overwrites the leftover of a killed process.
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            file.flush()
            # Otherwise a power failure may leave the new name with none of the bytes.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
