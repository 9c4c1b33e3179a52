"""IVSP with no arguments next to the paper's settings: tasks, sets of problems, networks.

A task is run for an optimisation time; what is printed is f over its start at its worst, the KKT
residual at the start and at the end, the time to a validation loss of 0.01, and what the module
logs. `outcomes.py` says when a problem counts as solved, `networks.py` what is printed there.
Without a choice everything is run. `--fresh` is for reporting: nothing is to be chosen on it.
`--held-out` was for reporting too, until the rules of 0.2.0 were looked at on it.

Run: python -m benchmarks.defaults [--tasks [NAME ...]] [--random] [--families] [--held-out]
    [--fresh] [--networks] [--mnist] [--seconds 60] [--out TABLE.csv]
"""

from __future__ import annotations

import argparse
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, Trainer

from benchmarks import families, fresh, held_out, networks, outcomes
from benchmarks.random_problems import Drawn, draw
from lightning_bilevel import BilevelError
from lightning_bilevel.cli.app import BilevelCLI

CONFIGS = Path(__file__).parents[1] / "configs"
# Name, config, what is changed in the model, how many times the usual seconds, and where the
# paper's constants are.
TASKS: dict[str, tuple[str, dict[str, Any], float, str | None]] = {
    "sine-10": ("synthetic", {"n": 10}, 0.1, None),
    "sine-1000": ("synthetic", {}, 0.2, "synthetic"),
    "sine-100000": ("synthetic", {"n": 100_000}, 0.5, None),
    "digits": ("digits", {}, 0.2, None),
    "mnist": ("mnist", {}, 1.0, "mnist"),
    "fashion_mnist": ("fashion_mnist", {}, 1.0, "fashion_mnist"),
    "glyphs": ("glyphs", {}, 1.0, None),
    "omniglot_cpu": ("omniglot_cpu", {}, 4.0, "omniglot"),
}


class Watch(Callback):
    """Keeps what the table needs, and stops when the optimisation time is over."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.values: list[float] = []
        self.target = math.nan
        self.first = math.nan
        self.metrics: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        info = module.last_step
        self.values.append(info.upper)
        if math.isnan(self.first):
            self.first = _kkt(module)
        if info.upper < 0.01 and math.isnan(self.target):
            self.target = info.optimization_time
        trainer.should_stop = info.optimization_time > self.seconds

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        known = trainer.callback_metrics.items()
        self.metrics = {
            name: float(value) for name, value in known if not name.startswith("bilevel/")
        }


def _kkt(module: Any) -> float:
    certificate = module.certify()
    return math.nan if certificate is None else certificate.kkt


def run(name: str, seconds: float, constants: str | None) -> None:
    """Run a task, with IVSP's own choices or with the constants of a config, and print its line."""
    folder, changes, times, _ = TASKS[name]
    config = yaml.safe_load((CONFIGS / folder / "ivsp.yaml").read_text())
    model = config["model"]["init_args"]
    for unit in ("upper_unit", "lower_unit"):
        model.pop(unit, None)
    model["solver"] = {"class_path": "IVSP"}
    if constants is not None:
        model["solver"] = yaml.safe_load((CONFIGS / constants / "ivsp.yaml").read_text())["model"][
            "init_args"
        ]["solver"]
    model.update(changes)
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    config["trainer"] |= {"max_epochs": -1, "num_sanity_val_steps": 0, **quiet}
    cli, watch = BilevelCLI(args=config, run=False), Watch(times * seconds)
    cli.trainer.callbacks = [watch]
    error = ""
    try:
        cli.trainer.fit(cli.model, cli.datamodule)
    except BilevelError as stopped:
        error = f" stopped: {stopped}"
    values = watch.values
    metrics = ", ".join(f"{key} {value:.4g}" for key, value in watch.metrics.items())
    worst, last = max(abs(value) for value in values) / abs(values[0]), _kkt(cli.model)
    print(
        f"{name:<14} {'own choices' if constants is None else 'paper':<12} {len(values):>6} "
        f"iterations, f {values[0]:.3g} -> {values[-1]:.3g}, worst/start {worst:.2f}, KKT "
        f"{watch.first:.2g} -> {last:.2g}, 0.01 after {watch.target:.1f} s, {metrics}{error}",
        flush=True,
    )


# The sets of problems: three that IVSP's choices were made on, and the one that is only reported.
PROBLEMS: dict[str, Callable[[], list[Drawn]]] = {
    "random": lambda: [draw(number) for number in range(30)],
    "families": families.problems,
    "held_out": held_out.problems,
    "fresh": fresh.problems,
}


def run_problems(parts: Sequence[str], out: Path | None) -> None:
    """Solve the sets of problems that are named, next to what they came to before."""
    before = outcomes.read()
    found = {part: outcomes.run(part, PROBLEMS[part](), before.get(part, ())) for part in parts}
    if out is not None and found:
        outcomes.write(out, found)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), help="these, or all of them")
    for part in PROBLEMS:
        parser.add_argument(f"--{part.replace('_', '-')}", action="store_true")
    parser.add_argument("--networks", action="store_true")
    parser.add_argument("--mnist", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, help="a table of the problems, such as before.csv")
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    parts = [part for part in PROBLEMS if getattr(given, part)]
    everything = not (parts or given.networks or given.mnist or given.tasks is not None)
    if everything or given.tasks is not None:
        for name in given.tasks or TASKS:
            for constants in dict.fromkeys((None, TASKS[name][3])):
                run(name, given.seconds, constants)
    run_problems(list(PROBLEMS) if everything else parts, given.out)
    if everything or given.networks:
        networks.run_networks(given.seconds)
    if everything or given.mnist:
        networks.run_mnist()


if __name__ == "__main__":
    main()
