"""Two columns of words: how certificates, results and choices are printed."""

from __future__ import annotations

__all__ = ["table"]


def table(title: str, rows: list[tuple[str, str]]) -> str:
    """Lay out pairs of words as two columns under a title."""
    left = max(len(name) for name, _ in rows)
    right = max(len(text) for _, text in rows)
    rule = "-" * (left + right + 2)
    return "\n".join(
        [
            f"{title} ".ljust(left + right + 2, "-"),
            *(f"{n.ljust(left)}  {t}" for n, t in rows),
            rule,
        ]
    )
