"""What `Trainer.fit` costs over a bare loop of steps, and a step besides its oracle calls."""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger

from benchmarks.results import Row, Section
from benchmarks.tasks import Size, Task, four
from benchmarks.timing import ratio
from lightning_bilevel import BilevelProblem
from lightning_bilevel.core.lower import LowerLevel


class Clock(Callback):
    """Times the iterations after the first tenth; setting a Trainer up is not what is compared."""

    def __init__(self, steps: int) -> None:
        self.first, self.last, self.seconds = max(1, steps // 10), steps, 0.0

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        if trainer.global_step == self.first:
            self.began = time.perf_counter()
        elif trainer.global_step == self.last:
            self.seconds = time.perf_counter() - self.began


def bare(task: Task) -> float:
    solver, problem = task.alone()
    first = max(1, task.steps // 10)
    for step in range(task.steps):
        if step == first:
            began = time.perf_counter()
        solver.step(problem=problem)
    return time.perf_counter() - began


def fitted(task: Task, folder: str) -> float:
    clock = Clock(task.steps)
    trainer = Trainer(
        accelerator="cpu",
        precision="64-true" if task.double else "32-true",
        max_steps=task.steps,
        max_epochs=-1,
        logger=TensorBoardLogger(folder),
        callbacks=[TQDMProgressBar(refresh_rate=10), clock],
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_val_batches=0,
    )
    trainer.fit(task.build(), datamodule=task.data)
    return clock.seconds


class Stopwatch:
    """The time that is spent in a problem's evaluations."""

    def __init__(self, problem: BilevelProblem) -> None:
        self.seconds, self.running = 0.0, False
        for name in ("upper", "upper_x", "upper_y", "at"):
            setattr(problem, name, self.timed(getattr(problem, name)))

    def timed(self, evaluate: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if self.running:
                return evaluate(*args, **options)
            self.running, began = True, time.perf_counter()
            try:
                found = evaluate(*args, **options)
            finally:
                self.running = False
                self.seconds += time.perf_counter() - began
            if isinstance(found, LowerLevel):
                for name in ("value", "gradient", "value_and_gradient", "gap", "gap_x"):
                    setattr(found, name, self.timed(getattr(found, name)))
            return found

        return call


def arithmetic(task: Task) -> float:
    """Return the median per cent of an iteration that is not spent in evaluating f and g."""
    solver, problem = task.alone()
    watch, shares = Stopwatch(problem), []
    for _ in range(task.steps):
        before, began = watch.seconds, time.perf_counter()
        solver.step(problem=problem)
        shares.append(1 - (watch.seconds - before) / (time.perf_counter() - began))
    return 100 * statistics.median(shares[task.steps // 10 :])


def run(size: Size) -> Section:
    warnings.filterwarnings("ignore")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for task in four(size):
            small = task.name == "synthetic"
            fits, loops = [], []
            for _ in range(size.rounds):
                # Each fit between two bare loops: a machine that others use is slower at one time
                # than at another.
                before, fit, after = bare(task), fitted(task, folder), bare(task)
                fits.append(fit)
                loops.append((before + after) / 2)
            took = 1e3 * statistics.median(loops) / (task.steps - max(1, task.steps // 10))
            note = f"an iteration of IVSP takes {took:.3g} ms"
            rows.append(
                Row(
                    f"{task.name}: `Trainer.fit` / bare loop",
                    ratio(fits, loops),
                    at_most=1.3 if small else 1.05,
                    note=note,
                )
            )
            share = statistics.median(arithmetic(task) for _ in range(size.rounds))
            limit = None if small else 3.0
            rows.append(
                Row(
                    f"{task.name}: solver arithmetic",
                    share,
                    "%",
                    at_most=limit,
                    note="what is not an evaluation of f or g",
                )
            )
    return Section("Overhead", rows)
