"""Hyper-cleaning of MNIST by two processes of one thread against one of two threads.

Run: python -m benchmarks.processes COUNT SAMPLES STEPS, which is one side of the comparison.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from benchmarks.results import Row, Section
from benchmarks.tasks import Size, cleaning
from benchmarks.timing import ratio


class Steps(Callback):
    """Keeps the optimisation time of each iteration."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.before = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        now = pl_module.last_step.optimization_time
        self.seconds.append(now - self.before)
        self.before = now


def one_side(processes: int, samples: int, steps: int) -> None:
    """Print the milliseconds of optimisation of an iteration."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(2 // processes)
    task, clock = cleaning(Size(samples=samples, steps=steps)), Steps()
    silent = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    strategy = "ddp" if processes > 1 else "auto"
    trainer = Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=strategy,
        max_steps=steps + 2,
        max_epochs=-1,
        limit_val_batches=0,
        callbacks=[clock],
        **silent,
    )
    trainer.fit(task.build(), datamodule=task.data)
    if trainer.is_global_zero:
        print(f"milliseconds {1e3 * statistics.mean(clock.seconds[2:])}")  # the first ones warm up


def timed(processes: int, size: Size) -> float:
    command = [
        sys.executable,
        "-m",
        "benchmarks.processes",
        str(processes),
        str(size.samples),
        str(size.steps),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(2 // processes)}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
        env=environment,
    )
    return float(
        next(
            line.split()[1] for line in done.stdout.splitlines() if line.startswith("milliseconds")
        )
    )


def run(size: Size) -> Section:
    pairs = [(timed(2, size), timed(1, size)) for _ in range(max(2, size.rounds // 2))]
    two, one = (list(side) for side in zip(*pairs, strict=True))
    note = f"{min(two):.3g} ms against {min(one):.3g} ms an iteration of IVSP, MNIST"
    return Section(
        "Two processes",
        [Row("two processes / one process with two threads", ratio(two, one), note=note)],
    )


if __name__ == "__main__":
    one_side(*(int(argument) for argument in sys.argv[1:]))
