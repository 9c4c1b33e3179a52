"""What a benchmark found: rows with their targets, curves for the figure, and their files."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_MISSING = "is not installed"
PACKAGES = ("torch", "lightning", "boat-torch", "higher", "torchopt", "betty-ml")


@dataclass(frozen=True)
class Row:
    """One number, and what it is asked to be.

    Attributes:
        what: What was measured.
        value: The number; None where it could not be measured.
        unit: Its unit.
        at_most: The largest value that meets the target, if there is one.
        at_least: The smallest value that does.
        note: What one needs to know to read the number, or why there is none.
    """

    what: str
    value: float | None
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""

    @property
    def target(self) -> str:
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return "" if self.at_least is None else f"at least {self.at_least:g}"

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "skipped" if self.note.endswith(_MISSING) else "not reached"
        if self.at_most is None and self.at_least is None:
            return ""
        low = -float("inf") if self.at_least is None else self.at_least
        high = float("inf") if self.at_most is None else self.at_most
        return "met" if low <= self.value <= high else "missed"


def skipped(what: str, package: str) -> Row:
    return Row(what, None, note=f"{package} {_MISSING}")


@dataclass(frozen=True)
class Curve:
    """A line of the figure."""

    name: str
    xs: list[float]
    ys: list[float]


@dataclass(frozen=True)
class Section:
    """The results of one benchmark."""

    title: str
    rows: list[Row]
    curves: list[Curve] = field(default_factory=list)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> Section:
        saved = json.loads(path.read_text())
        return cls(
            saved["title"],
            [Row(**row) for row in saved["rows"]],
            [Curve(**curve) for curve in saved["curves"]],
        )


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine() -> str:
    """Return what the figures depend on, but not whose machine it is."""
    found = ", ".join(f"{name} {found}" for name in PACKAGES if (found := installed(name)))
    return (
        f"{torch.get_num_threads()} CPU threads ({platform.machine()}), Python "
        f"{platform.python_version()}, {found}"
    )


def shown(row: Row) -> str:
    return "-" if row.value is None else f"{row.value:.3g}{' ' + row.unit if row.unit else ''}"


def markdown(sections: Sequence[Section]) -> str:
    lines = [machine(), ""]
    lines += ["| | measured | target | | |", "| --- | --- | --- | --- | --- |"]
    for section in sections:
        lines.append(f"| **{section.title}** | | | | |")
        lines += [
            f"| {row.what} | {shown(row)} | {row.target} | {row.verdict} | {row.note} |"
            for row in section.rows
        ]
    return "\n".join(lines) + "\n"
