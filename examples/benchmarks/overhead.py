"""What `Trainer.fit` costs over a bare loop of `optimizer.step(problem=...)`, both in this process and in turns.

Run: python examples/benchmarks/overhead.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from functools import partial

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightning_bilevel import IVSP, BilevelOptimizer, BilevelProgressBar, FullBatchDataModule, SineProblem

PAPER = partial(IVSP, mu0=9e-3, gamma0=0.9, zeta_bar=3.0, rho=0.5, sigma=1.0, L_xy=1000**0.5, L_yy=1.0)


class Padded(SineProblem):
    """The sine problem with matrix products that are as long as those of a small network."""

    def __init__(self, size: int, solver: object = PAPER) -> None:
        super().__init__(solver=solver)
        self.weight = torch.ones(size, size, dtype=torch.float64) if size else None

    def upper_loss(self, batch: object) -> Tensor:
        return super().upper_loss(batch) + self.work()

    def work(self) -> Tensor | float:
        return 0.0 if self.weight is None else 0.0 * (self.weight @ (self.weight * self.x)).sum()


class Clock(Callback):
    """Times the iterations after the first tenth; setting a Trainer up is not what is compared."""

    def __init__(self, steps: int) -> None:
        self.first, self.last, self.seconds = steps // 10, steps, 0.0

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        if trainer.global_step == self.first:
            self.began = time.perf_counter()
        elif trainer.global_step == self.last:
            self.seconds = time.perf_counter() - self.began


def bare(model: Padded, steps: int) -> float:
    model = model.double()
    problem = model.bilevel_problem({"upper": None, "lower": None})
    solver: BilevelOptimizer = PAPER([{"params": [model.x], "level": "upper"}, {"params": [model.y], "level": "lower"}])
    for _ in range(steps // 10):
        solver.step(problem=problem)
    began = time.perf_counter()
    for _ in range(steps - steps // 10):
        solver.step(problem=problem)
    return time.perf_counter() - began


def fitted(model: Padded, steps: int, folder: str) -> float:
    clock = Clock(steps)
    trainer = Trainer(
        accelerator="cpu",
        precision="64-true",
        max_steps=steps,
        max_epochs=-1,
        logger=TensorBoardLogger(folder),
        callbacks=[BilevelProgressBar(), clock],
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(model, datamodule=FullBatchDataModule(epoch_length=steps))
    return clock.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="outer iterations of the short task")
    parser.add_argument("--rounds", type=int, default=5)
    parsed = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, size, steps in (("synthetic", 0, parsed.steps), ("20 ms", 460, parsed.steps // 5)):
            # Each fit between two bare loops: a machine that others use is slower at one time than at another.
            ratios, loop = [], 0.0
            for _ in range(parsed.rounds):
                before, fit, after = bare(Padded(size), steps), fitted(Padded(size), steps, folder), bare(Padded(size), steps)
                loop = (before + after) / 2
                ratios.append(fit / loop)
            took = 1e3 * loop / (steps - steps // 10)
            rows.append(f"{name:10s} bare loop {took:7.3f} ms; Trainer.fit takes {statistics.median(ratios):.3f} times as long")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
