"""What goes wrong over two processes; as a script, it does one of these things in real ones.

python parallel_faults.py refusals OUT     writes the sentence that each wrong module or loader is
refused with to OUT.RANK python parallel_faults.py DEATH RANK       is a run in which one process
fails in its third iteration"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from modules import Weighting, samples
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_bilevel import FullBatchDataModule


class Summed(Weighting):
    def upper_loss(self, batch: Any) -> Tensor:
        return len(batch[0]) * super().upper_loss(batch)


class Positional(Weighting):
    """Takes weights by position: those of the first samples, whichever samples it gets."""

    def lower_loss(self, batch: Any) -> Tensor:
        return super().lower_loss((batch[0], batch[1], torch.arange(len(batch[0]))))


class OfAll(Weighting):
    """Takes the weights of all samples, whichever it is given, as README's Cleaner does."""

    def lower_loss(self, batch: Any) -> Tensor:
        return (
            self.logits.sigmoid()
            * cross_entropy(self.classifier(batch[0]), batch[1], reduction="none")
        ).mean()


class Normalised(Weighting):
    def upper_loss(self, batch: Any) -> Tensor:
        inputs = batch[0] / batch[0].square().mean().sqrt()
        return cross_entropy(self.classifier(inputs), batch[1])


def data(**changes: Any) -> FullBatchDataModule:
    return FullBatchDataModule(
        **{"upper": samples(21, 1), "lower": samples(30, 2), "validation": samples(5, 3), **changes}
    )


def loaders() -> CombinedLoader:
    parts = {"upper": samples(21, 1), "lower": samples(30, 2)}
    return CombinedLoader(
        {level: DataLoader(TensorDataset(*part), batch_size=10) for level, part in parts.items()},
        "min_size",
    )


def trainer(**options: Any) -> Trainer:
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
    }
    limits = {"max_epochs": -1, "max_steps": 5, "log_every_n_steps": 2, "limit_val_batches": 0}
    return Trainer(accelerator="cpu", strategy="ddp", devices=2, **{**quiet, **limits, **options})


class Failing(Weighting):
    """Fails in one process, in the third iteration."""

    def __init__(self, how: str, rank: int) -> None:
        super().__init__()
        self.how, self.rank = how, rank

    def upper_loss(self, batch: Any) -> Tensor:
        value = super().upper_loss(batch)
        if self.trainer.global_step == 2 and self.trainer.global_rank == self.rank:
            if self.how == "raise":
                raise RuntimeError("the disk of the second machine has failed")
            if self.how == "nan":
                return value * float("nan")
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    def on_train_start(self) -> None:
        Path(f"process-{self.trainer.global_rank}").write_text(str(os.getpid()))


REFUSED: dict[str, Any] = {
    "summed": lambda: trainer().fit(Summed(), datamodule=data()),
    "positional": lambda: trainer().fit(Positional(), datamodule=data()),
    "of all": lambda: trainer().fit(OfAll(), datamodule=data()),
    "normalised": lambda: trainer().fit(Normalised(), datamodule=data()),
    "loaders": lambda: trainer().fit(Weighting(), loaders()),
    "nan": lambda: trainer().fit(Failing("nan", 1), datamodule=data()),
    # not refused: the same batches in all processes
    "same loaders": lambda: trainer(use_distributed_sampler=False, max_epochs=2).fit(
        Weighting(), loaders()
    ),
}


def refusal(fit: Any) -> str:
    try:
        fit()
    except Exception as error:
        cause = "" if error.__cause__ is None else f" from {type(error.__cause__).__name__}"
        return f"{type(error).__name__}: {error}{cause}"
    return "nothing"


def refusals(out: Path) -> None:
    found = {name: refusal(fit) for name, fit in REFUSED.items()}
    out.with_suffix(f".{os.environ.get('LOCAL_RANK', '0')}").write_text(json.dumps(found))


def main(how: str, argument: str) -> None:
    torch.set_num_threads(1)
    if how == "refusals":
        refusals(Path(argument))
    else:
        trainer(max_steps=1000).fit(Failing(how, int(argument)), datamodule=data())
        time.sleep(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
