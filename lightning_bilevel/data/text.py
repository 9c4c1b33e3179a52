"""Sources of text of graded quality, made of the text that comes with Python."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["KINDS", "TextSources"]

# Code as it is, and with a share of each row's characters shuffled.
_SHUFFLED = {
    "code": 0.0,
    "1/8 shuffled": 1 / 8,
    "1/4 shuffled": 1 / 4,
    "1/2 shuffled": 1 / 2,
    "3/4 shuffled": 3 / 4,
    "shuffled": 1.0,
}
KINDS = (*_SHUFFLED, "prose", "random")
"""The kinds of source."""
_TRUSTED = 128
_TEST = 512
_PRINTABLE = 32, 127


class TextSources:
    """Rows of characters for learning how to mix sources; the target is Python code.

    A source is code, code with a share of each row's characters shuffled among themselves, English
    prose (the help texts of ``pydoc``) or random characters. No row of code is in two sources.

    Args:
        names: The sources, of :data:`KINDS`.
        rows: The number of rows of each source.
        length: The number of characters that a model sees; a row has one more.
        seed: Decides which rows are where, and their noise.

    Attributes:
        rows: The rows of all sources, numbers from 0 to 127 of shape (rows, length + 1).
        source: The number of each row's source.
        trusted: 128 further rows of code.
        test: 512 further rows of code.

    Example:
        >>> text = TextSources(["code", "random"], rows=10)
        >>> text.rows.shape, text.source.tolist()[8:12]
        (torch.Size([20, 65]), [0, 0, 1, 1])
    """

    def __init__(
        self, names: Sequence[str], rows: int = 2000, length: int = 64, seed: int = 0
    ) -> None:
        unknown = [name for name in names if name not in KINDS]
        if unknown or not names:
            raise ValueError(
                f"`TextSources(names={list(names)!r})` must be of {', '.join(map(repr, KINDS))}."
            )
        if rows < 1 or length < 1:
            raise ValueError(
                f"`TextSources(rows={rows}, length={length})` must be at least 1 each."
            )
        self._generator = torch.Generator().manual_seed(seed)
        self._length = length
        folder = Path(os.__file__).parent
        code = self._cut(sorted(folder.glob("*.py")))
        prose = self._cut([folder / "pydoc_data" / "topics.py"])
        most = max(0, min((len(code) - _TRUSTED - _TEST) // len(_SHUFFLED), len(prose)))
        if rows > most:
            raise ValueError(
                f"`TextSources(rows={rows}, length={length})` asks for more text than comes with "
                f"Python: at this length there are {most} rows for each source."
            )
        self.trusted, self.test, code = code.tensor_split([_TRUSTED, _TRUSTED + _TEST])
        parts = dict(zip(_SHUFFLED, torch.split(code, rows), strict=False))
        made = {name: self._shuffled(part, _SHUFFLED[name]) for name, part in parts.items()}
        made["prose"] = prose[:rows]
        made["random"] = torch.randint(*_PRINTABLE, (rows, length + 1), generator=self._generator)
        self.rows = torch.cat([made[name] for name in names])
        self.source = torch.arange(len(names)).repeat_interleave(rows)

    def _cut(self, paths: list[Path]) -> Tensor:
        """Return the text of these files as rows in random order."""
        read = bytearray().join(path.read_bytes() for path in paths)
        if not read:  # an empty buffer is refused by torch
            return torch.zeros(0, self._length + 1, dtype=torch.long)
        text = torch.frombuffer(read, dtype=torch.uint8).clamp(max=127).long()
        width = self._length + 1
        rows = text[: len(text) // width * width].view(-1, width)
        return rows[torch.randperm(len(rows), generator=self._generator)]

    def _shuffled(self, rows: Tensor, share: float) -> Tensor:
        """Shuffle the characters of each row at a random share of its places."""
        order = torch.rand(rows.shape, generator=self._generator).argsort(1)
        places = order[:, : round(share * rows.shape[1])]
        return rows.scatter(1, places.sort(1).values, rows.gather(1, places))
