"""The tables that are printed: pairs of words under a title, and rows in columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

__all__ = ["columns", "table"]

# As wide as the sentences below a certificate, but for names that leave no room.
_WIDTH = 110
_LEAST = 40


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


def columns(rows: Sequence[Sequence[str]], left: int) -> str:
    """Lay out rows in columns, the first of them as the head.

    Args:
        rows: The rows, all of the same length. Their last column is aligned to the left.
        left: The number of columns that are aligned to the left at the beginning.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < left or i == len(row) - 1 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)
