"""A CSV file with one sample per row: features, a label, and perhaps an id."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from lightning_bilevel.data.folders import Labelled

__all__ = ["read_features"]

_ID = "id"
# Pandas writes the index of a table as a first column without a name.
_UNNAMED = ""
_MISSING = {"", "?", "n/a", "na", "nan", "none", "null"}


def read_features(
    option: str,
    path: Path,
    label: str = "label",
    id_column: str | None = None,
    named: bool = True,
) -> Labelled:
    """Read a CSV file; all columns but the label and the id are features and must be numbers.

    The delimiter is the one of comma, semicolon and tab that the first line has most of.

    Args:
        option: The option that names the file, for errors.
        path: The file; its first line has the names of the columns.
        label: The column of the label, which may be a word.
        id_column: The column that names a sample. None is a column ``id``, or a first
            column without a name, or else the number of the row; the first row below the names has
            number 1.
        named: Whether the samples must be told apart by their ids: then every row must have one of
            its own, and `id_column` must be there.
    """
    names, rows = _rows(option, path)
    if label not in names:
        raise ValueError(
            f"`{option}` has no column {label!r}: its columns are {_listed(names)}. `--label NAME` "
            "says which one has the labels."
        )
    if id_column == label:
        raise ValueError(
            f"`clean --id {id_column}` is the column of the labels: an id must name one sample."
        )
    by = id_column or _usual_id(names, label)
    if named and id_column is not None and id_column not in names:
        raise ValueError(
            f"`{option}` has no column {id_column!r}: its columns are {_listed(names)}. Without "
            "`--id` the number of the row is the id."
        )
    features = tuple(name for name in names if name not in (label, by, _UNNAMED))
    if not features:
        raise ValueError(
            f"`{option}` has no column besides {_listed(names)}: there must be at least one "
            "feature."
        )
    label_place = names.index(label)
    labels = [row[label_place].strip() for row in rows]
    for number, word in enumerate(labels, start=1):
        if word.lower() in ("", "nan"):
            raise ValueError(
                f"`{option}` has no label in row {number}: every row needs one, so fill it in or "
                "leave the row out."
            )
    places = [names.index(name) for name in features]
    values = [
        [_number(option, names[place], number, row[place]) for place in places]
        for number, row in enumerate(rows, start=1)
    ]
    if by is not None and by in names:
        ids = [row[names.index(by)].strip() for row in rows]
        if named:
            _check_ids(option, by, ids)
    else:
        ids = [str(number) for number in range(1, len(rows) + 1)]
    return Labelled(torch.tensor(values, dtype=torch.float64), labels, ids, features)


def _usual_id(names: Sequence[str], label: str) -> str | None:
    if _ID in names and label != _ID:
        return _ID
    return _UNNAMED if names[0] == _UNNAMED else None


def _rows(option: str, path: Path) -> tuple[list[str], list[list[str]]]:
    try:
        # A spreadsheet may put a mark of the encoding at the start, which is no part of a name.
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            delimiter = max(",;\t", key=first.count)
            file.seek(0)
            lines = [line for line in csv.reader(file, delimiter=delimiter) if line]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"`{option}` cannot be read as CSV ({error}): it must be text in UTF-8."
        ) from error
    if not lines:
        raise ValueError(f"`{option}` is an empty file: its first line must name the columns.")
    names = [name.strip() for name in lines[0]]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"`{option}` has two columns of the name {twice[0]!r}: every column needs a name of "
            "its own."
        )
    rows = lines[1:]
    if not rows:
        raise ValueError(f"`{option}` has names of columns and no rows: there is nothing to read.")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(names):
            raise ValueError(
                f"`{option}` has {len(row)} values in row {number} and {len(names)} columns: the "
                "two must agree."
            )
    return names, rows


def _number(option: str, column: str, row: int, text: str) -> float:
    word = text.strip()
    if word.lower() in _MISSING:
        raise ValueError(
            f"`{option}` has no value in column {column!r}, row {row}: fill it in, or leave out "
            "the row or the column."
        )
    try:
        value = float(word)
    except ValueError:
        raise ValueError(
            f"`{option}` has {word!r} in column {column!r}, row {row}: features must be numbers, "
            "so turn the column into numbers or leave it out. `--label` and `--id` name the "
            "columns that are no features."
        ) from None
    if not math.isfinite(value):
        raise ValueError(
            f"`{option}` has {word!r} in column {column!r}, row {row}: features must be finite."
        )
    return value


def _check_ids(option: str, column: str, ids: Sequence[str]) -> None:
    seen: dict[str, int] = {}
    for number, name in enumerate(ids, start=1):
        if not name:
            raise ValueError(
                f"`{option}` has no id in column {column!r}, row {number}: every sample needs one. "
                "Without that column the number of the row is the id."
            )
        if name in seen:
            raise ValueError(
                f"`{option}` has the id {name!r} in rows {seen[name]} and {number}: an id must "
                "name one sample."
            )
        seen[name] = number


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:10])
    return f"{shown}, ..." if len(names) > 10 else shown
