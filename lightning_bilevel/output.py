"""What a run leaves behind: files that are written as a whole or not at all, and printed tables."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

# As wide as the sentences below a certificate, but for names that leave no room.
_WIDTH = 110
_LEAST = 40


def write_whole(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
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
    except OSError as error:
        error.filename = str(path)
        temporary.unlink(missing_ok=True)
        raise


def table(title: str, rows: list[tuple[str, str]]) -> str:
    """Lay out pairs of words as two columns under a title; a long text goes on below itself."""
    left = max(len(name) for name, _ in rows)
    lines = []
    for name, text in rows:
        first, *more = textwrap.wrap(text, max(_WIDTH - left - 2, _LEAST)) or [""]
        lines.append(f"{name.ljust(left)}  {first}")
        lines += [f"{' ' * left}  {line}" for line in more]
    width = max(map(len, lines))
    return "\n".join([f"{title} ".ljust(width, "-"), *lines, "-" * width])
