"""The runs that one process and several are compared on.

As a script, it makes them over two processes.

    python parallel.py OUT CASE [CASE ...]

writes what each case ended with to OUT. Lightning starts the second process itself, by the same
command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tables
import torch
from lightning.pytorch import Trainer
from modules import Bounded, EncodedOnce, Weighting, samples
from records import Recorder

from lightning_bilevel import (
    Chunks,
    DatasetCleaning,
    Envelope,
    Episodes,
    FewShot,
    FullBatchDataModule,
    Growing,
    HyperCleaning,
    SineProblem,
    TaskEpisodes,
)

# in float32 the Barzilai-Borwein steps carry rounding on: ten times as much after every few of them
STEPS = 8
PRECISIONS = ("64-true", "32-true")
SOLVERS = {name: solver.make() for name, solver in tables.SOLVERS.items()}


def runs(task: str, solver: str) -> bool:
    """Whether a solver takes the f of a task, which in cleaning does not depend on x."""
    return task != "cleaning" or not tables.SOLVERS[solver].needs_x


def alternating(tasks: Sequence[str]) -> list[str]:
    """Cases in which each solver meets each task, and both of them each precision.

    All three at once would be twice as many runs.
    """
    found = []
    for place, solver in enumerate(SOLVERS):
        fitting = [task for task in tasks if runs(task, solver)]
        for number in range(max(2, len(fitting))):
            task = fitting[number % len(fitting)]
            found.append(f"{task}/{solver}/{PRECISIONS[(place + number) % 2]}")
    return found


def images(count: int, seed: int) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.rand(count, 1, 4, 4, generator=generator)
    return torch.utils.data.TensorDataset(pictures, (4 * pictures.mean((1, 2, 3)) * 3).long() % 3)


def episodes(count: int, seed: int) -> Episodes:
    generator = torch.Generator().manual_seed(seed)
    tasks = [
        (torch.rand(12, 1, 16, 16, generator=generator), torch.arange(3).repeat_interleave(4))
        for _ in range(count)
    ]
    return Episodes.from_tasks(tasks, count, shots=2)


def cleaning(solver: Any, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(3)
    module = HyperCleaning(
        n_train=37, inputs=16, hidden=4, classes=3, upper_unit=10.0, solver=solver
    )
    return module, DatasetCleaning(
        images(37, 1), images(23, 2), images(11, 3), classes=3, corruption=0.3, **options
    )


def problem(task: str, solver: Any) -> tuple[Any, Any]:
    """A module and its data; no size is even."""
    if task == "sine":
        return SineProblem(n=15, x0=-5.9, c=1.7, solver=solver), FullBatchDataModule(epoch_length=5)
    if task == "cleaning":
        return cleaning(solver, epoch_length=5)
    if task == "chunks":
        return cleaning(solver, epoch_length=5, chunk_size=10)
    if task == "growing":  # 10, 20 and all of the samples
        growing = Growing(start=10, factor=2, every=3)
        return cleaning(solver, epoch_length=5, growing=growing)
    if task == "fewshot":
        torch.manual_seed(4)
        data = TaskEpisodes(
            *(episodes(count, seed) for count, seed in ((5, 1), (2, 2), (2, 3))),
            epoch_length=4,
        )
        envelope = Envelope(rho=0.1, sigma=0.0, delta=1e-3)
        return FewShot(
            5, ways=3, channels=3, image_size=16, chunk_images=12, envelope=envelope, solver=solver
        ), data
    if task == "encoded":
        return EncodedOnce(solver=solver), FullBatchDataModule(
            samples(21, 1), samples(9, 2), epoch_length=5
        )
    if task == "one sample":  # the second process has nothing to do
        return Weighting(1, solver=solver), FullBatchDataModule(
            samples(1, 1), samples(1, 2), samples(1, 1), epoch_length=5
        )
    if task == "bounded":
        return Bounded(9, solver=solver), FullBatchDataModule(
            samples(21, 1), samples(9, 2), epoch_length=5
        )
    if task == "weights":  # chunks that go whole to one process each
        parts = [samples(7, s) for s in (1, 2, 3)]
        lower = Chunks([tuple(t for t in part) for part in parts], [0.5, 0.2, 0.3])
        return Weighting(7, solver=solver), FullBatchDataModule(
            samples(8, 4), lower, samples(8, 4), epoch_length=5
        )
    raise KeyError(task)


def run(case: str, **options: Any) -> tuple[Trainer, Any, dict[str, Any]]:
    """Make a run ``task/solver/precision`` and say what it ended with."""
    task, solver, precision = case.split("/")
    module, data = problem(task, SOLVERS[solver])
    history = Recorder("calls")
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
    }
    limits = {"max_epochs": -1, "max_steps": STEPS, "precision": precision, "log_every_n_steps": 4}
    trainer = Trainer(accelerator="cpu", callbacks=[history], **{**quiet, **limits, **options})
    trainer.fit(module, datamodule=data)
    with torch.enable_grad():
        certificate = module.certify()
    facts = {
        "parameters": torch.cat([p.detach().reshape(-1) for p in module.parameters()]),
        "steps": history.steps,
        "certificate": None if certificate is None else certificate.as_dict(),
        "time": module.last_step.optimization_time,
    }
    return trainer, module, facts


def main(out: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    found = {}
    for case in cases:
        trainer, _, facts = run(case, strategy="ddp", devices=2)
        everywhere: list[Any] = [None, None]
        torch.distributed.all_gather_object(everywhere, facts)
        found[case] = everywhere
    if trainer.is_global_zero:
        torch.save(found, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
