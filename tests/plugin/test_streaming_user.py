"""What a user of Lightning does: a network on images, plain loaders, callbacks, resume."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from running import trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_bilevel import F2SA, BilevelModule, Box, CertificateReport, Envelope, TableRMS

pytestmark = pytest.mark.integration

BATCH = 64
EPOCHS = 7


def digits() -> dict[str, TensorDataset]:
    """1,200 images whose labels are wrong for 40 %, 197 trusted ones, and 400 to validate."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    images = torch.tensor(bunch.images, dtype=torch.float32)[order].unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)[order]
    parts = dict(zip(("lower", "upper", "validation"), order.split([1200, 197, 400]), strict=True))
    start = 0
    made = {}
    for name, numbers in parts.items():
        chosen = slice(start, start + len(numbers))
        start += len(numbers)
        index = torch.arange(len(numbers))
        given = labels[chosen].clone()
        if name == "lower":
            given[:480] = (given[:480] + 1) % 10
        made[name] = TensorDataset(images[chosen], given, index)
    return made


class Cleaner(BilevelModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.logits = nn.Parameter(torch.zeros(1200))
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(256, 10),
        )
        self.declare(
            upper=self.logits,
            lower=self.network,
            upper_set=Box(-8, 8),
            solver=partial(
                F2SA,
                upper_optimizer=partial(TableRMS, lr=1.0),
                lower_optimizer=partial(torch.optim.AdamW, lr=2e-3),
            ),
            scheduler={
                "scheduler": partial(CosineAnnealingLR, T_max=steps),
                "interval": "step",
            },
            envelope=Envelope(rho=0.1, sigma=1.0, delta=1e-3),
        )

    def upper_loss(self, batch: Any) -> Tensor:
        return cross_entropy(self.network(batch[0]), batch[1])

    def lower_loss(self, batch: Any) -> Tensor:
        images, labels, index = batch
        weights = self.logits[index].sigmoid()
        losses = cross_entropy(self.network(images), labels, reduction="none")
        return (weights * losses).sum() / weights.sum()

    def upper_indices(self, batch: Any) -> Tensor:  # type: ignore[override]
        index: Tensor = batch[2]
        return index

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        right = (self.network(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("val_accuracy", right, batch_size=len(batch[0]))


def accuracy(module: Cleaner, data: Any) -> float:
    images, labels, _ = data.tensors
    with torch.no_grad():
        return float((module.network(images).argmax(1) == labels).float().mean())


def test_a_network_with_batch_normalisation_and_dropout(tmp_path: Path, capsys: Any) -> None:
    data = digits()
    make = partial(DataLoader, batch_size=BATCH)
    loaders = {
        "upper": make(data["upper"], shuffle=True),
        # They stay: a copy of this process at each epoch would take longer than the epoch.
        "lower": make(data["lower"], shuffle=True, num_workers=2, persistent_workers=True),
    }
    steps = EPOCHS * len(loaders["lower"])

    def fit(module: Cleaner, ckpt_path: Any = None, *more: Any, **options: Any) -> Any:
        callbacks = [
            ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=25, save_top_k=-1),
            EarlyStopping("val_accuracy", mode="max", patience=4),
            LearningRateMonitor("step"),
            *more,
        ]
        run = trainer(
            tmp_path,
            max_epochs=EPOCHS,
            callbacks=callbacks,
            enable_checkpointing=True,
            logger=CSVLogger(tmp_path),
            log_every_n_steps=5,
            **options,
        )
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            run.fit(module, loaders, make(data["validation"]), ckpt_path=ckpt_path)
        return run

    # Interrupted in the third epoch, and resumed there.
    assert fit(Cleaner(steps), max_steps=50).global_step == 50
    module = Cleaner(steps)
    run = fit(module, tmp_path / "step=50.ckpt", CertificateReport())
    assert run.global_step > 100
    assert "all data (197 upper and 1200 lower samples), in eval mode" in capsys.readouterr().out

    # The running statistics are those of y: eval mode is as good as the statistics of a batch.
    in_eval = accuracy(module.eval(), data["validation"])
    module.train()
    dropout = next(layer for layer in module.modules() if isinstance(layer, nn.Dropout))
    dropout.eval()
    in_train = accuracy(module, data["validation"])
    assert in_eval == pytest.approx(in_train, abs=0.02)
    assert in_eval > 0.9
    # The wrong labels get less weight.
    weights = module.logits.detach().sigmoid()
    assert float(weights[480:].mean()) > float(weights[:480].mean()) + 0.2
