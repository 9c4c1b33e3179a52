"""The simple baselines of a comparison's task, computed once and kept in its folder."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lightning_bilevel.baselines.cleaning import cleaning_baselines
from lightning_bilevel.baselines.fewshot import few_shot_baselines
from lightning_bilevel.baselines.row import Baseline
from lightning_bilevel.cli.configs import MethodConfig
from lightning_bilevel.cli.method import Method
from lightning_bilevel.data.cleaning import CleaningData
from lightning_bilevel.data.episodes import EpisodeData
from lightning_bilevel.files import write_whole
from lightning_bilevel.modules.fewshot import FewShot
from lightning_bilevel.modules.hypercleaning import HyperCleaning

__all__ = ["find_baselines"]


def find_baselines(out: Path, config: MethodConfig, budget: float) -> list[Baseline]:
    """Return the baselines of a task: those of baselines.csv, or else compute and write them.

    A task without any gets a sentence on the standard error, and an empty list.

    Args:
        out: The folder of the comparison.
        config: Any of its configs; its model says which network they have.
        budget: Seconds of training for each few-shot network.
    """
    path = out / "baselines.csv"
    if path.exists():
        return _read(path)
    method = Method(out, config)
    data: Any = method.datamodule
    if not isinstance(data, (CleaningData, EpisodeData)):
        print(
            f"`compare --baselines`: there are none for {type(data).__name__}. They are for "
            "`CleaningData` and `EpisodeData`.",
            file=sys.stderr,
        )
        return []
    data.prepare_data()
    data.setup("fit")
    seed = int(config.values["seed_everything"] or 0)
    if isinstance(data, CleaningData):
        rows = cleaning_baselines(data, seed, _classifier(method.model))
    else:
        model = method.model
        channels = {"channels": model.encoder.channels} if isinstance(model, FewShot) else {}
        rows = few_shot_baselines(data, seed, seconds=budget, **channels)
    write_whole(path, _as_csv(rows).encode())
    return rows


def _classifier(model: Any) -> Callable[[], nn.Module] | None:
    """Return what makes the network of a module; None for the default one."""
    return model.fresh_classifier if isinstance(model, HyperCleaning) else None


def _as_csv(rows: Sequence[Baseline]) -> str:
    metrics = list(dict.fromkeys(name for row in rows for name in row.metrics))
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, ["baseline", "seconds", *metrics], restval="")
    writer.writeheader()
    for row in rows:
        writer.writerow({"baseline": row.name, "seconds": row.seconds, **row.metrics})
    return file.getvalue()


def _read(path: Path) -> list[Baseline]:
    rows = []
    with path.open(newline="") as file:
        for record in csv.DictReader(file):
            name = record.pop("baseline")
            seconds = float(record.pop("seconds"))
            metrics = {metric: float(text) for metric, text in record.items() if text}
            rows.append(Baseline(name, metrics, seconds))
    return rows
