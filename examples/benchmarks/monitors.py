"""What the monitors cost on hyper-cleaning of MNIST, all of them on at their default intervals, as a share of one run's time.

Every hook of every monitor is timed where the Trainer calls it, within one `lightning-bilevel fit` of configs/mnist/ivsp.yaml: a
machine that others use slows down both sides of the ratio. The optimisation time of an iteration with and without the monitors
comes from short fits in turns.

Run: python examples/benchmarks/monitors.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from lightning_bilevel.callbacks.monitor import Monitor
from lightning_bilevel.cli import BilevelCLI

CONFIG = Path(__file__).parents[2] / "configs" / "mnist" / "ivsp.yaml"
HOOKS = ("on_fit_start", "on_train_batch_end", "on_validation_epoch_end", "on_validation_end", "on_train_end")


class Steps(Callback):
    """Keeps the optimisation time of each iteration."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.before = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        now = pl_module.last_step.optimization_time
        self.seconds.append(now - self.before)
        self.before = now


def build(config: Path, folder: str, *options: str) -> BilevelCLI:
    fixed = [f"--trainer.default_root_dir={folder}", "--trainer.enable_model_summary=false"]
    return BilevelCLI(["--config", str(config), *fixed, "--trainer.enable_progress_bar=false", *options], run=False)


def clocks() -> tuple[float, float]:
    """Wall time, and the time of this process alone, which others on the machine do not lengthen."""
    return time.perf_counter(), time.process_time()


def timed(hook: Callable[..., None], spent: dict[str, list[float]], name: str) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
        began = clocks()
        hook(*args, **kwargs)
        spent[name] = [total + now - then for total, now, then in zip(spent.get(name, (0, 0)), clocks(), began, strict=True)]

    return call


def share(config: Path, folder: str) -> None:
    cli, spent = build(config, folder), {}
    for callback in cli.trainer.callbacks:
        if isinstance(callback, Monitor):
            for hook in HOOKS:
                setattr(callback, hook, timed(getattr(callback, hook), spent, type(callback).__name__))
    began = clocks()
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    whole = [now - then for now, then in zip(clocks(), began, strict=True)]
    spent = {**dict(sorted(spent.items())), "all monitors": [sum(column) for column in zip(*spent.values(), strict=True)]}
    print(f"fit took {whole[0]:.1f} s, {whole[1]:.1f} s of processor time")
    for name, seconds in spent.items():
        wall, process = (f"{part:7.3f} s = {100 * part / total:5.2f} %" for part, total in zip(seconds, whole, strict=True))
        print(f"{name:18s} {wall} of it, {process} of the processor time")


def per_step(config: Path, folder: str, steps: int, rounds: int) -> None:
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for watched in (True, False):
            cli, clock = build(config, folder, f"--trainer.max_steps={steps}"), Steps()
            if not watched:
                cli.trainer.callbacks[:] = [c for c in cli.trainer.callbacks if not isinstance(c, Monitor)]
            cli.trainer.callbacks.append(clock)
            cli.trainer.fit(cli.model, datamodule=cli.datamodule)
            times[watched] += clock.seconds[5:]  # the first steps warm up
    watched, bare = (1e3 * statistics.median(times[on]) for on in (True, False))
    low, _, high = (1e3 * q for q in statistics.quantiles(times[False], n=4))
    print(f"optimisation time of an iteration: {watched:.2f} ms watched, {bare:.2f} ms not (quartiles {low:.2f} and {high:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--steps", type=int, default=50, help="iterations of each of the short fits")
    parser.add_argument("--rounds", type=int, default=3, help="how many pairs of short fits")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        share(given.config, folder)
        if given.rounds:
            per_step(given.config, folder, given.steps, given.rounds)


if __name__ == "__main__":
    main()
