"""The simple baselines on every task with data, on the splits of the configs: mean and spread over
three seeds.

Of cleaning, the seed decides the split, the wrong labels and the networks. Of few-shot learning,
the classes and episodes are those of the config, and the seed decides the networks. Each network
of few-shot learning is trained for so many seconds, with the channels of the config.

Run: python -m benchmarks baselines [TASK ...] [--seconds 60] [--seeds 0 1 2] [--clean N]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

import lightning_bilevel
from benchmarks.baselines.cleaning import cleaning_baselines
from benchmarks.baselines.few_shot import few_shot_baselines
from benchmarks.baselines.row import Baseline
from benchmarks.tasks import CONFIGS
from lightning_bilevel.data import CleaningData

TASKS = ("digits", "mnist", "fashion_mnist", "glyphs", "omniglot_cpu")
Table = Mapping[int, Sequence[Baseline]]


def baselines(task: str, seed: int, seconds: float, clean: int | None = None) -> list[Baseline]:
    config: dict[str, Any] = yaml.safe_load((CONFIGS / task / "ivsp.yaml").read_text())
    kind = getattr(lightning_bilevel, config["data"]["class_path"])
    options = config["data"]["init_args"]
    if issubclass(kind, CleaningData):
        if clean is not None:
            options["n_validation"] = clean
        data = kind(**options, seed=seed)
        data.setup()
        return cleaning_baselines(data, seed)
    data = kind(**options)
    data.setup()
    return few_shot_baselines(data, seed, config["model"]["init_args"]["channels"], seconds)


def markdown(task: str, table: Table) -> str:
    """Return mean and half the range over the seeds, one line per method."""
    first = next(iter(table.values()))
    metrics = list(dict.fromkeys(name for row in first for name in row.metrics))
    lines = [
        f"| {' | '.join([task, *metrics, 'seconds'])} |",
        f"| {' | '.join(['---'] * (len(metrics) + 2))} |",
    ]
    for number, row in enumerate(first):
        same = [rows[number] for rows in table.values()]
        cells = [_cell([r.metrics[name] for r in same if name in r.metrics]) for name in metrics]
        spent = f"{mean(r.seconds for r in same):.1f}"
        lines.append(f"| {' | '.join([row.name, *cells, spent])} |")
    return "\n".join(lines)


def _cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = (max(values) - min(values)) / 2
    digits = 0 if max(values) > 1 else 3
    return f"{mean(values):.{digits}f} ± {spread:.{digits}f}"


def run(
    tasks: Sequence[str],
    seeds: Sequence[int],
    seconds: float,
    out: Path,
    clean: int | None = None,
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for task in tasks:
        name = task if clean is None else f"{task}-{clean}"
        table: dict[int, list[Baseline]] = {}
        for seed in seeds:
            table[seed] = baselines(task, seed, seconds, clean)
            rows = {number: [row._asdict() for row in found] for number, found in table.items()}
            (out / f"baselines-{name}.json").write_text(json.dumps(rows, indent=1))
        print(markdown(name, table), end="\n\n", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks baselines",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each few-shot network")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--clean", type=int, help="clean samples of cleaning, if not the config's")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    given = parser.parse_args(arguments)
    if unknown := set(given.tasks) - set(TASKS):
        parser.error(
            f"no task is called {', '.join(sorted(unknown))}: there are {', '.join(TASKS)}"
        )
    run(given.tasks or TASKS, given.seeds, given.seconds, given.out, given.clean)
