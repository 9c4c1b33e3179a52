"""The tables that are printed: pairs of words under a title."""

from __future__ import annotations

import textwrap

__all__ = ["table"]

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
