"""Modules and loaders for runs on mini-batches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from modules import samples
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_bilevel import BilevelModule, Box
from lightning_bilevel.stochastic import F2SA

SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
STREAMED: dict[str, Any] = {"method": F2SA(), "upper_optimizer": SGD, "lower_optimizer": ADAMW}


class Streamed(BilevelModule):
    """One weight per sample above, a network with batch normalisation and dropout below.

    Args:
        count: The number of lower samples.
        dropout: The probability of dropout.
        norm: Whether there is batch normalisation.
        options: What else is declared; with a solver the run is exact.
    """

    def __init__(
        self,
        count: int = 30,
        *,
        dropout: float = 0.2,
        norm: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.logits = nn.Parameter(torch.zeros(count))
        layers = [nn.Linear(2, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh()]
        self.network = nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(8, 3))
        by_torch = {} if "solver" in options else STREAMED
        given = {"upper_set": Box(-8, 8), **by_torch, **options}
        self.declare(upper=self.logits, lower=self.network, **given)

    def upper_loss(self, batch: Any) -> Tensor:
        return cross_entropy(self.network(batch[0]), batch[1])

    def lower_loss(self, batch: Any) -> Tensor:
        inputs, labels, index = batch
        losses = cross_entropy(self.network(inputs), labels, reduction="none")
        return (self.logits[index].sigmoid() * losses).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.network(batch[0])
        self.log("val_loss", cross_entropy(logits, batch[1]), batch_size=len(batch[0]))


def loader(count: int, seed: int, size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*samples(count, seed)), size, **options)


def loaders(*, upper: int = 5, lower: int = 10, **options: Any) -> dict[str, DataLoader[Any]]:
    """4 batches of the upper level and 3 of the lower one, in random order."""
    options = {"shuffle": True, **options}
    return {"upper": loader(20, 1, upper, **options), "lower": loader(30, 2, lower, **options)}


class StreamedData(LightningDataModule):
    """The loaders of a user's own data module."""

    def train_dataloader(self) -> Any:
        return loaders()

    def val_dataloader(self) -> Any:
        return loader(20, 3, 20)


class Endless(IterableDataset[Any]):
    """Samples without a length, in an order that is the same at each start."""

    def __init__(self, count: int, seed: int) -> None:
        self.rows = list(zip(*samples(count, seed), strict=True))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


class Resumable:
    """A loader in random order that goes on where its state says, as torchdata's would."""

    def __init__(self, count: int, seed: int, size: int) -> None:
        self.tensors = samples(count, seed)
        self.size = size
        self.epoch = 0
        self.given = 0
        self.loaded = False

    def __len__(self) -> int:
        return -(-len(self.tensors[0]) // self.size)

    def __iter__(self) -> Iterator[Any]:
        if not self.loaded:
            self.epoch += 1
            self.given = 0
        self.loaded = False
        # As a DataLoader does, for the seeds of its workers: the run must not depend on it.
        torch.randint(9, ())
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(len(self.tensors[0]), generator=generator).split(self.size)
        while self.given < len(self):
            self.given += 1
            yield tuple(tensor[order[self.given - 1]] for tensor in self.tensors)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.given = state["epoch"], state["given"]
        self.loaded = True
