"""Weights in a form that the next tool reads: CSV and JSON lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_bilevel.files import write_whole

__all__ = ["Row", "write_rows"]

Row = dict[str, Any]


def write_rows(call: str, path: Path, rows: Sequence[Row]) -> None:
    """Write rows with the same keys to a file, as a whole or not at all.

    Args:
        call: The call that the user wrote, for messages.
        path: The file, ``.csv`` or ``.jsonl``.
        rows: The rows, at least one.
    """
    kind = path.suffix.lower()
    if kind not in (".csv", ".jsonl"):
        raise ValueError(f"`{call}({str(path)!r})` must end in .csv or .jsonl.")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"`{call}({str(path)!r})`: there is no folder {str(path.parent)!r}. Make it first."
        )
    text = io.StringIO()
    if kind == ".csv":
        table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    else:
        text.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_whole(path, text.getvalue().encode())
