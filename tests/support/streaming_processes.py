"""Runs on mini-batches over two processes.

    python streaming_processes.py OUT

writes what each run ended with, in both processes. Lightning starts the second process itself.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from modules import samples
from streaming import ADAMW, SGD, STREAMED, Streamed, Touching, loader
from torch.utils.data import DataLoader

from lightning_bilevel import (
    F2SA,
    SOBA,
    CertificateReport,
    Envelope,
    KKTMonitor,
    StreamingIVSP,
    TableRMS,
)

TABLE = partial(F2SA, upper_optimizer=TableRMS, lower_optimizer=ADAMW)
IVSP = partial(StreamingIVSP, upper_optimizer=SGD, lower_optimizer=ADAMW)
ENVELOPE = Envelope(0.1, 1.0, 1e-3)
PLAIN = {"norm": False, "dropout": 0.0, "envelope": ENVELOPE}


class Steps(Callback):
    """Counts the sums over processes within the training steps, and keeps which samples they saw.

    The samples are numbered from 0 in each level.
    """

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.seen: list[dict[str, list[int]]] = []
        self._all_reduce = torch.distributed.all_reduce

    def on_train_batch_start(self, *args: Any) -> None:
        self.counts.append(0)

        def counting(*given: Any, **options: Any) -> Any:
            self.counts[-1] += 1
            return self._all_reduce(*given, **options)

        torch.distributed.all_reduce = counting

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        torch.distributed.all_reduce = self._all_reduce
        self.seen.append({level: part[2].tolist() for level, part in batch.items()})


class Sick(Streamed):
    """The loss of one batch of one process is not a number."""

    def lower_loss(self, batch: Any) -> Any:
        value = super().lower_loss(batch)
        sick = self.trainer.global_step == 2 and self.trainer.global_rank == 1
        return value * float("nan") if sick else value


def count_of(case: str) -> int:
    """The number of lower samples."""
    return 31 if case == "odd" else 30


def module_of(case: str) -> Any:
    if case in ("plain", "odd"):
        return Streamed(count_of(case), **PLAIN)
    if case == "touching":
        return Touching(solver=TABLE, **PLAIN)
    if case == "soba":
        return Streamed(solver=partial(SOBA, alpha=1.0, beta=0.2, lower_optimizer=ADAMW), **PLAIN)
    if case == "streaming ivsp":
        return Streamed(solver=IVSP, norm=False, dropout=0.0)
    if case == "sick":
        return Sick(**PLAIN)
    return Streamed(solver=STREAMED, envelope=ENVELOPE)


CASES = ("plain", "touching", "sick", "normed", "soba", "odd")


def joined(ends: Sequence[dict[str, Any]]) -> DataLoader[Any]:
    """The batches that all processes have seen in each step, as one batch each."""
    data = {"upper": samples(20, 1), "lower": samples(30, 2)}
    batches = []
    for parts in zip(*(end["seen"] for end in ends), strict=True):
        rows = {level: [row for part in parts for row in part[level]] for level in data}
        assert all(len(set(numbers)) == 10 for numbers in rows.values())
        batches.append({level: tuple(t[rows[level]] for t in data[level]) for level in data})
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def run(case: str, folder: Path, data: Any = None, **options: Any) -> dict[str, Any]:
    """Make a run on batches of five samples, or on other data."""
    torch.manual_seed(1)
    module = module_of(case)
    if data is None:
        data = {"upper": loader(20, 1, 5), "lower": loader(count_of(case), 2, 5, shuffle=True)}
    steps = Steps()
    callbacks: list[Any] = [steps]
    if case == "normed":
        callbacks = [KKTMonitor(every_n_steps=2), CertificateReport()]
    trainer = Trainer(
        accelerator="cpu",
        precision="64-true",
        log_every_n_steps=100,
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, data, loader(20, 3, 20))
    assert module.last_step is not None
    certificate = module.certify(tolerance=1e-8)
    return {
        "state": {name: value.detach() for name, value in module.state_dict().items()},
        "collectives": steps.counts,
        "seen": steps.seen,
        "iterations": module.last_step.iteration,
        "skipped": module.last_step.skipped,
        "kkt": certificate.kkt,
        "upper": certificate.upper,
        "data": certificate.evaluated_on,
    }


def main(out: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {}
    for case in CASES:
        everywhere: list[Any] = [None, None]
        facts = run(case, out.parent, strategy="ddp", devices=2, max_epochs=3)
        torch.distributed.all_gather_object(everywhere, facts)
        found[case] = everywhere
    if torch.distributed.get_rank() == 0:
        torch.save(found, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
