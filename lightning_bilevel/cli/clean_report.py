"""What ``lightning-bilevel clean`` writes and prints."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.cli.clean_rows import LENIENT, OURS, Cleaned, Recommendation, standard_error
from lightning_bilevel.data.own import OwnData
from lightning_bilevel.files import write_whole
from lightning_bilevel.modules.figures import draw_samples
from lightning_bilevel.table import columns

__all__ = ["Suspects", "advice", "errors", "top_rows", "write"]

_COLUMNS = ("id", "given_label", "proposed_label", "weight", "suspicion", "kept")
_PICTURES = 48
_TOP = 10
_LONGEST = 9


class Suspects(NamedTuple):
    """All training samples with what a method says of them, the most suspicious first.

    Attributes:
        order: The numbers of the samples.
        rows: The row of each in the CSV file, in this order.
    """

    order: list[int]
    rows: Sequence[tuple[str, ...]]

    @classmethod
    def of(cls, data: OwnData, cleaned: Cleaned, weights: Tensor) -> Suspects:
        """Sort the samples by suspicion.

        Args:
            data: The data.
            cleaned: What the method says.
            weights: The learned weights.
        """
        order: list[int] = torch.argsort(cleaned.suspicion, descending=True, stable=True).tolist()
        words = data.classes
        given = data.train[1]
        rows = [
            (
                data.ids[i],
                words[int(given[i])],
                words[int(cleaned.proposed[i])],
                f"{float(weights[i]):.4f}",
                f"{float(cleaned.suspicion[i]):.4f}",
                "yes" if cleaned.kept[i] else "no",
            )
            for i in order
        ]
        return cls(order, rows)


def write(out: Path, data: OwnData, suspects: Suspects) -> list[Path]:
    """Write the CSV file and, for images, the contact sheet beside it; return both paths.

    Each is written whole or not at all.

    Args:
        out: The CSV file.
        data: The data.
        suspects: What is written.
    """
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(_COLUMNS)
    writer.writerows(suspects.rows)
    # The picture is drawn before either is written.
    files = {out: text.getvalue().encode()}
    if data.are_images:
        files[out.with_suffix(".png")] = _sheet(data, suspects)
    for path, content in files.items():
        write_whole(path, content)
    return list(files)


def _sheet(data: OwnData, suspects: Suspects) -> bytes:
    rows = suspects.rows[:_PICTURES]
    images = data.train[0][suspects.order[:_PICTURES]]
    figure = draw_samples(
        images,
        [_short(row[1]) for row in rows],
        [_short(row[2]) for row in rows],
        "most suspicious training images: given label → proposed label",
        cmap="gray",
    )
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    return picture.getvalue()


def _short(word: str) -> str:
    return word if len(word) <= _LONGEST else f"{word[: _LONGEST - 1]}…"


def top_rows(suspects: Suspects) -> str:
    """Return the first rows as a table."""
    return columns([_COLUMNS, *suspects.rows[:_TOP]], left=3)


def errors(
    rows: Mapping[str, Cleaned], wrong: Mapping[str, Tensor], recommended: str, on: str
) -> str:
    """Return the table of the methods.

    Args:
        rows: What each method says of the training samples.
        wrong: Which samples each gets wrong.
        recommended: The method to mark.
        on: What the samples are on which the error was measured.
    """
    lines: list[tuple[str, ...]] = [("learn from", f"error on {on}", "training samples used", "")]
    for name, row in rows.items():
        mean = float(wrong[name].float().mean())
        mark = "recommended" if name == recommended else ""
        error = f"{mean:.3f} ± {standard_error(wrong[name]):.3f}"
        lines.append((name, error, f"{row.used:,} of {len(row.kept):,}", mark))
    return columns(lines, left=1)


def advice(found: Recommendation, out: Path) -> str:
    """Return the recommendation in a sentence, and how the CSV file is to be read.

    Args:
        found: The recommendation.
        out: The CSV file.
    """
    if found.name == found.best:
        text = f"Recommended: {found.name}, with the fewest mistakes"
        text += "." if found.name == OURS else "; nothing more complicated is better."
    else:
        text = (
            f"Recommended: {found.name}. It is simpler than {found.best}, and as good within the "
            f"standard error (difference {found.difference:.3f} ± {found.deviation:.3f})."
        )
    kept = {
        OURS: "the weight is above 1/2",
        LENIENT: "the network before gave the label more than 0.1",
    }.get(found.name, "the label is the likeliest")
    return (
        f"{text}\n{out} ranks by the network of that row: suspicion is one minus its probability "
        f"of the given label. kept: {kept}. weight: the learned one."
    )
