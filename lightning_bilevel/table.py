"""The two-column table that certificates, results and choices are printed in."""

from __future__ import annotations

__all__ = ["table"]


def table(title: str, rows: list[tuple[str, str]]) -> str:
    """Lay out pairs of words as two columns under a title."""
    left = max(len(name) for name, _ in rows)
    right = max(len(text) for _, text in rows)
    width = left + right + 2
    lines = [f"{name.ljust(left)}  {text}" for name, text in rows]
    return "\n".join([f"{title} ".ljust(width, "-"), *lines, "-" * width])
