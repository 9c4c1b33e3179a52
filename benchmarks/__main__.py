"""Run every comparison, print results next to their targets, write a table and a figure.

Each section leaves its results in the folder as soon as it is done; without names, those that are
there already are not run again, and the table and the figure have all that are there.

Run: python -m benchmarks
     python -m benchmarks overhead growth --quick
     python -m benchmarks baselines digits    (simple methods on a ready config's task)
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.baselines import table
from benchmarks.figure import draw
from benchmarks.results import Section, markdown, shown
from benchmarks.tasks import QUICK, Size

SECTIONS = (
    "overhead",
    "calls",
    "byhand",
    "boat",
    "stationarity",
    "accuracy",
    "memory",
    "growth",
    "processes",
    "chunks",
    "monitors",
    "step_cost",
    "mini_batches",
)


def report(folder: Path) -> None:
    found = {
        name: Section.load(path) for name in SECTIONS if (path := folder / f"{name}.json").exists()
    }
    (folder / "table.md").write_text(markdown(list(found.values())))
    draw(found, folder / "benchmarks.png")


def run(names: Sequence[str], size: Size, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        began = time.perf_counter()
        section: Section = import_module(f"benchmarks.{name}").run(size)
        section.save(folder / f"{name}.json")
        print(f"{section.title} ({time.perf_counter() - began:.0f} s)", flush=True)
        for row in section.rows:
            print(
                f"  {row.what:50s} {shown(row):>12s}  {row.target:14s} {row.verdict:8s} {row.note}",
                flush=True,
            )
    report(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["baselines"]:
        table.main(given[1:])
    else:
        sections(given)


def sections(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="section",
        help=f"one or more of {', '.join(SECTIONS)}; all if none is named",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="smaller problems, a few minutes; not what the targets are for",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="the folder for results; benchmark-results, or benchmark-results-quick",
    )
    given = parser.parse_args(arguments)
    if unknown := set(given.sections) - set(SECTIONS):
        parser.error(
            f"no section is called {', '.join(sorted(unknown))}: there are {', '.join(SECTIONS)}"
        )
    folder = given.out or Path("benchmark-results-quick" if given.quick else "benchmark-results")
    names = given.sections or [name for name in SECTIONS if not (folder / f"{name}.json").exists()]
    run(names, QUICK if given.quick else Size(), folder)


if __name__ == "__main__":
    main()
