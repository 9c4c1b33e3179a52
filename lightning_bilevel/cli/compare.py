"""Compare several methods on one task, with equal optimisation time."""

from __future__ import annotations

import argparse
import csv
import json
import logging
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from typing_extensions import override

from lightning_bilevel.callbacks.certificate import usual_tolerance
from lightning_bilevel.callbacks.ends import LastCheckpoint, OptimizationBudget, seconds
from lightning_bilevel.cli.app import BilevelCLI
from lightning_bilevel.cli.catalogue import ready
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.output import write_whole

COUNTS = ("iteration", "optimization_time", "passes")
# The interval of the checkpoints from which an interrupted comparison resumes.
SAVE_EVERY: str | float = "10s"
# The value of `Trainer.val_check_batch` that turns validation off.
NEVER = sys.maxsize
# A comparison evaluates at its own times in one process, and writes its own files.
TRAINER: dict[str, Any] = {"check_val_every_n_epoch": None, "val_check_interval": NEVER}
TRAINER |= {"num_sanity_val_steps": 0, "logger": False, "enable_progress_bar": False}
TRAINER |= {"devices": 1, "strategy": "auto"}
# What names and tunes a method does not change the problem; the envelope is for evaluation only.
_METHOD = {"solver", "method", "envelope", "accumulate", "gradient_clip_val", "skip_nonfinite"}
_OF_A_LEVEL = ("unit", "optimizer", "scheduler")
_METHOD |= {f"{level}_{what}" for level in ("upper", "lower") for what in _OF_A_LEVEL}


class MethodResult(NamedTuple):
    """One method of a comparison.

    Attributes:
        name: The name of its config.
        rows: One record per evaluation: iteration, optimization_time, passes, and every metric.
        error: The error that ended the run early, if there was one.
    """

    name: str
    rows: list[dict[str, float]]
    error: str | None = None


class Method(BilevelCLI):
    """The model, the data and the Trainer of a config, always from the same seed.

    The callbacks of the config are left out: a comparison has its own.

    Attributes:
        path: The config.
        text: The resolved config.
        task: The settings that decide data, split and start.
        solver: The name of the solver class.
    """

    def __init__(self, path: Path, budget: float) -> None:
        self.path, args = path, ["--config", str(path), f"--budget={budget:g}s"]
        super().__init__(args, run=False, save_config_callback=None)  # kept below by ourselves
        self.text: str = self.parser.dump(self.config, skip_none=False)
        values = yaml.safe_load(self.text)
        init_args = values["model"].get("init_args") or {}
        named = init_args.get("solver") or init_args.get("method")
        if not isinstance(named, dict):
            raise ValueError(
                f"`compare {path}`: the config names no `solver` or `method` to hand to `declare`."
            )
        self.solver = named["class_path"].rsplit(".", 1)[-1]
        for argument in _METHOD:
            init_args.pop(argument, None)
        # A growing sample ends with all data: it is a way to solve the same task.
        (values["data"].get("init_args") or {}).pop("growing", None)
        self.task = {name: values[name] for name in ("seed_everything", "model", "data")}
        self.task["precision"] = str(values["trainer"]["precision"])

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        return super().instantiate_trainer(**{"callbacks": [], **TRAINER, **kwargs})

    def fit(self, callbacks: list[Callback], ckpt_path: str | None = None) -> None:
        self.trainer.callbacks = callbacks  # type: ignore[attr-defined]
        self.trainer.fit(self.model, datamodule=self.datamodule, ckpt_path=ckpt_path)


@dataclass(eq=False)
class Recorder(Callback):
    """Evaluates the start, and whenever the optimisation time reaches the next of some times.

    The validation comes at that very iteration, whatever the length of an epoch, if the Trainer is
    made with :data:`TRAINER`. The rows are saved in checkpoints.

    Args:
        times: The times of the evaluations, in seconds of optimisation, in increasing order.
        envelope: The Moreau envelope of the evaluations; None takes that of the module.

    Attributes:
        start: The metrics of a validation before the run.
        rows: One record per evaluation: iteration, optimization_time, passes, and every metric.
    """

    times: Sequence[float]
    envelope: Envelope | None = None
    start: dict[str, Any] = field(default_factory=dict, init=False)
    rows: list[dict[str, float]] = field(default_factory=list, init=False)
    _due: bool = field(default=True, init=False)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        evaluated = self.rows[-1]["optimization_time"]
        spent = pl_module.last_step.optimization_time
        self._due = any(evaluated < time <= spent for time in self.times)
        # Lightning reads this attribute right after this hook.
        trainer.val_check_batch = 1 if self._due else NEVER

    def evaluate(self, trainer: Any, pl_module: Any, batch: Any = None, batch_idx: int = 0) -> None:
        if not self._due:
            return
        self._due = False
        step = pl_module.last_step
        metrics = trainer.callback_metrics if self.rows else self.start
        row = {name: 0 if step is None else getattr(step, name) for name in COUNTS}
        row |= {name: float(v) for name, v in metrics.items() if not name.startswith("bilevel/")}
        # Before the first step a module does not know its data, of which a sample may be the batch.
        if step is not None or getattr(trainer.datamodule, "growing", None) is None:
            given = batch if step is None and not pl_module.on_mini_batches else None
            tolerance = usual_tolerance(trainer)
            found = pl_module.certify(batch=given, envelope=self.envelope, tolerance=tolerance)
            if found is not None:
                row |= {"violation": found.feasibility, "kkt_residual": found.kkt}
        self.rows.append(row)

    # After a validation, Lightning calls one of these.
    on_train_batch_start = on_train_epoch_end = evaluate

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = state_dict["rows"]
        self._due = False


def compare(
    configs: Sequence[Path], budget: float, out: Path, evaluations: int = 40
) -> list[MethodResult]:
    """Run each config for the same time; write results.csv, summary.md and the figure.

    Args:
        configs: YAML files of LightningCLI, or folders of them.
        budget: Seconds of optimisation for each method.
        out: The folder of the results; an interrupted comparison resumes from it.
        evaluations: The number of evaluations of each method, spread over the budget.
    """
    paths = [config for path in configs for config in (sorted(path.glob("*.yaml")) or [path])]
    methods = {path.stem: Method(path, budget) for path in paths}
    if len(methods) < len(paths):
        raise ValueError(f"`compare {' '.join(map(str, paths))}`: each config needs its own name.")
    first = next(iter(methods.values()))
    for name, method in methods.items():
        different = ", ".join(key for key in first.task if method.task[key] != first.task[key])
        if different:
            raise ValueError(f"`compare`: {name} differs from {first.path.stem} in {different}.")
        kept = out / name / "config.yaml"
        if kept.exists() and kept.read_text() != method.text:
            raise ValueError(f"`compare --out {out}`: {name} was run there with other settings.")
    # All are judged by the envelope of the first IVSP.
    envelope = next((m.model.envelope for m in methods.values() if m.solver == "IVSP"), None)
    times = [budget * (i + 1) / evaluations for i in range(evaluations)]
    # No method pays for the first calls of the process.
    with suppress(Exception):
        Method(first.path, budget).fit([OptimizationBudget(1e-9)])
    results = [_run(out / name, method, times, envelope) for name, method in methods.items()]
    title = f"{type(first.model).__name__}, {budget:g} s of optimisation each"
    write_results(out, results, f"{title} (only IVSP aims at the KKT residual)")
    return results


def _run(
    folder: Path, method: Method, times: Sequence[float], envelope: Envelope | None
) -> MethodResult:
    """Run a method from its start or its checkpoint, or return the result that is there."""
    done, last = folder / "result.json", folder / "last.ckpt"
    if done.exists():
        return MethodResult(**json.loads(done.read_text()))
    print(f"{folder.name}: {times[-1]:g} s of optimisation ...", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.yaml", method.text.encode())
    recorder, error = Recorder(times, envelope), None
    callbacks = [OptimizationBudget(times[-1]), recorder, LastCheckpoint(folder, SAVE_EVERY)]
    try:
        with suppress(MisconfigurationException):  # without validation
            method.trainer.validate(method.model, datamodule=method.datamodule, verbose=False)
            recorder.start = dict(method.trainer.callback_metrics)
        Method(method.path, times[-1]).fit(callbacks, "last" if last.exists() else None)
    except OSError:
        raise  # a full disk is not the method's fault: the next call of `compare` resumes
    except Exception as failure:  # the other methods still run; the row of this one has the error
        error = f"{type(failure).__name__}: {failure}".splitlines()[0]
    result = MethodResult(folder.name, recorder.rows, error)
    write_whole(done, json.dumps(result._asdict()).encode())
    last.unlink(missing_ok=True)
    return result


def write_results(out: Path, results: Sequence[MethodResult], title: str) -> None:
    """Write results.csv, summary.md, and the figure as PNG and SVG."""
    names = dict.fromkeys(name for result in results for row in result.rows for name in row)
    metrics = [name for name in names if name not in COUNTS]
    with (out / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["method", *COUNTS, *metrics])
        writer.writeheader()
        for result in results:
            writer.writerows({"method": result.name, **row} for row in result.rows)
    (out / "summary.md").write_text(summary(results, metrics, title))
    if metrics:
        figure = draw(results, metrics, title)
        for suffix in ("png", "svg"):
            figure.savefig(out / f"figure.{suffix}", dpi=160)


def summary(results: Sequence[MethodResult], metrics: Sequence[str], title: str) -> str:
    """Return a table of the last metrics in Markdown; the best of each is bold."""
    columns = ["method", *metrics, "iterations", "time (s)", "passes", "note"]
    lines = [f"# {title}", "", f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    # A run that ended early does not compete.
    ends = [result.rows[-1] for result in results if result.rows and not result.error]
    best = {}
    for name in metrics:
        rises = any(word in name.lower() for word in ("auroc", "accuracy"))
        found = [row[name] for row in ends if name in row]
        best[name] = (max if rises else min)(found, default=math.nan)
    for result in results:
        last = result.rows[-1] if result.rows else {}
        cells = [result.name]
        for name in (*metrics, *COUNTS):
            text = f"{last[name]:{'.3g' if name in metrics else '.6g'}}" if name in last else ""
            bold = name in last and not result.error and last[name] == best.get(name)
            cells.append(f"**{text}**" if bold else text)
        cells.append((result.error or "").replace("|", "/"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(results: Sequence[MethodResult], metrics: Sequence[str], title: str) -> Any:
    """Draw each metric against optimisation time, one panel per metric."""
    from matplotlib.figure import Figure

    columns = len(metrics) if len(metrics) <= 4 else 3
    rows = math.ceil(len(metrics) / columns)
    figure = Figure(figsize=(3.4 * columns, 2.8 * rows + 0.7), layout="constrained")
    for number, metric in enumerate(metrics, 1):
        axis: Any = figure.add_subplot(rows, columns, number)
        for index, result in enumerate(results):
            values = {row["optimization_time"]: row[metric] for row in result.rows if metric in row}
            style = "-" if index < 10 else "--"  # there are ten colours
            axis.plot([*values], [*values.values()], style, label=result.name)
        limits = axis.dataLim
        if limits.y0 >= 0.0 and limits.y1 > 10 * limits.minposy:
            axis.set_yscale("log")  # a violation that has reached zero leaves it at the bottom
        axis.set(xlabel="optimisation time (s)", xlim=(0.0, None), title=metric)
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    lines = axis.get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=2 * columns, frameon=False)
    return figure


def main(args: Sequence[str] | None = None) -> None:
    """Run ``lightning-bilevel compare``."""
    parser = argparse.ArgumentParser("lightning-bilevel compare", description=__doc__)
    about = "YAML files or folders of them, or ready ones such as synthetic"
    parser.add_argument("configs", nargs="+", type=lambda name: ready(Path(name)), help=about)
    parser.add_argument("--budget", default="1s", help="time of each method, such as 10m")
    parser.add_argument("--out", type=Path, help="folder (default: comparison-NAME-BUDGET)")
    parser.add_argument("--evaluations", type=int, default=40, help="spread over the budget")
    given = parser.parse_args(args)
    logging.disable(logging.INFO)  # what Lightning says of every Trainer
    given.out = given.out or Path(f"comparison-{given.configs[0].resolve().stem}-{given.budget}")
    compare(**{**vars(given), "budget": seconds(given.budget)})
    print((given.out / "summary.md").read_text(), f"Written to {given.out}.", sep="\n")
