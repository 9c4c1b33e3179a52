"""IVSP with no arguments next to the paper's settings: all tasks and random problems.

A task is run for an optimisation time; what is printed is f over its start at its worst, the KKT
residual at the start and at the end, the time to a validation loss of 0.01, and what the module
logs. A random problem counts as solved once its residuals, relative to |grad f|, |g| and |f| at the
start, are all at most 1e-2, which is looked at every 10 outer iterations (every 50 after 200); at
most 2,000. Its passes are printed next to those of commit 8d45010. Settings were chosen on the
thirty and on the families; `--held-out` takes the problems that were kept apart instead.

Run: python -m benchmarks.defaults [--tasks NAME ...] [--seconds 60] [--no-random] [--held-out]
"""

from __future__ import annotations

import argparse
import importlib
import logging
import math
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, Trainer

from benchmarks import families
from benchmarks.random_problems import Drawn, draw
from lightning_bilevel import IVSP, BilevelError, certify
from lightning_bilevel.cli.app import BilevelCLI
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.report.reading import advice
from lightning_bilevel.report.tally import Tally

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

# Passes of commit 8d45010 to a relative KKT residual of 1e-2; None where it was not reached.
BEFORE: dict[str, tuple[int | None, ...]] = {
    "thirty": (
        386,
        273,
        330,
        703,
        990,
        290,
        493,
        4841,
        712,
        16321,
        15220,
        420,
        5240,
        31979,
        534,
        541,
        4860,
        598,
        648,
        2577,
        644,
        None,
        5355,
        418,
        None,
        1385,
        829,
        664,
        1779,
        1169,
    ),
    "families": (
        454,
        1322,
        364,
        312,
        406,
        367,
        5018,
        18406,
        5659,
        902,
        2396,
        8956,
        168,
        677,
        359,
        117,
        788,
        None,
        741,
        776,
        2039,
        381,
        6381,
        21623,
        265,
        230,
        127,
        219,
        2114,
        22363,
    ),
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


def solve_random(drawn: Drawn, steps: int = 2000) -> tuple[int | None, str]:
    """Run IVSP on a random problem; its passes if it was solved, and how it went in words."""
    problem, began = drawn.problem, time.process_time()
    start = problem.upper(drawn.x, drawn.y)
    scales = (
        math.hypot(norm(start.grad_x), norm(start.grad_y)),
        abs(problem.at(drawn.x).value(drawn.y)),
        abs(start.value),
    )
    x, y = drawn.x.clone().requires_grad_(), drawn.y.clone().requires_grad_()
    solver = IVSP(
        [{"params": [x], "level": "upper"}, {"params": [y], "level": "lower"}], delta=drawn.delta
    )
    relative, iteration, tally, worst = math.inf, 0, Tally(), abs(start.value)
    try:
        while relative > 1e-2 and iteration < steps:
            for _ in range(10 if iteration < 200 else 50):
                info = solver.step(problem=problem)
                tally.add(info)
                worst = max(worst, abs(info.upper))
            iteration = info.iteration
            assert solver.envelope is not None
            tolerance = 1e-9 * solver.constants["L_yy"]
            c = certify(
                problem, x, y, solver.envelope, multiplier=solver.multiplier, tolerance=tolerance
            )
            residuals = c.stationarity, c.feasibility, c.complementarity
            relative = max(
                residual / max(scale, 1e-300)
                for residual, scale in zip(residuals, scales, strict=True)
            )
    except BilevelError as error:
        return None, f"stopped: {error}"
    words = (
        f"{relative:.1e} after {iteration} iterations, |f| at most {worst / abs(start.value):.1f} "
        f"times its start, {time.process_time() - began:.1f} s"
    )
    if relative <= 1e-2:
        return solver.memory["passes"], words
    return None, " ".join([words, *advice(c, tally)])


def solve_all(name: str, problems: Sequence[Drawn]) -> None:
    """Run IVSP on a set of random problems, and print a line for each and their median."""
    before = BEFORE.get(name, (None,) * len(problems))
    found: list[int | None] = []
    for number, (drawn, then) in enumerate(zip(problems, before, strict=True)):
        torch.manual_seed(0)
        passes, words = solve_random(drawn)
        found.append(passes)
        print(
            f"{name} {number:>2} {drawn.name:<72} passes {then or '-':>6} -> {passes or '-':>6}  "
            f"{words}",
            flush=True,
        )
    for when, counts in (("8d45010", BEFORE.get(name)), ("now", found)):
        if counts is not None:
            solved = sum(count is not None for count in counts)
            middle = statistics.median(math.inf if n is None else n for n in counts)
            print(f"{name}, {when}: {solved} of {len(counts)} solved, median passes {middle:g}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--no-random", action="store_true")
    parser.add_argument("--held-out", action="store_true")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for name in given.tasks:
        for constants in dict.fromkeys((None, TASKS[name][3])):
            run(name, given.seconds, constants)
    if given.held_out:
        solve_all("held_out", importlib.import_module("benchmarks.held_out").problems())
    elif not given.no_random:
        solve_all("thirty", [draw(number) for number in range(30)])
        solve_all("families", families.problems())


if __name__ == "__main__":
    main()
