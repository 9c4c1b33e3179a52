"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from lightning_bilevel.output import write_whole


def test_a_file_is_whole_or_as_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"first")

    def torn(file: Any) -> None:
        file.write(b"sec")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_whole(path, torn)
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]
    write_whole(path, lambda file: file.write(b"second"))  # type: ignore[arg-type,return-value]
    assert path.read_bytes() == b"second"
