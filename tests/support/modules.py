"""Small bilevel modules with data, for the tests of the Lightning side."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_bilevel import (
    IVSP,
    BilevelMixin,
    BilevelModule,
    Box,
    FullBatchDataModule,
    SolverCallable,
)

PAPER = partial(
    IVSP,
    mu0=9e-3,
    block=1,
    gamma0=0.9,
    zeta_bar=3.0,
    rho=0.5,
    sigma=1.0,
    L_init=1.0,
    L_xy=1000**0.5,
    L_yy=1.0,
)
MILD = partial(
    IVSP,
    mu0=0.1,
    block=1,
    gamma0=1.0,
    zeta_bar=0.1,
    rho=0.1,
    sigma=1.0,
    L_init=1.0,
    L_xy=1.0,
    L_yy=5.0,
)


def samples(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Points of three classes in the plane, with their indices."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    centers = torch.tensor([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]])
    return centers[labels] + torch.randn(count, 2, generator=generator), labels, torch.arange(count)


class Weighting(BilevelModule):
    """One weight per training sample above, a linear classifier below."""

    def __init__(self, count: int = 30, solver: Any = MILD, seed: int = 0, **declared: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.logits = nn.Parameter(torch.zeros(count))
        self.classifier = nn.Linear(2, 3)
        sets = {"upper_set": Box(-5, 5), "lower_set": Box(-5, 5)}
        self.declare(
            upper=self.logits, lower=self.classifier, solver=solver, **{**sets, **declared}
        )

    def upper_loss(self, batch: Any) -> Tensor:
        inputs, labels, _ = batch
        return cross_entropy(self.classifier(inputs), labels)

    def lower_loss(self, batch: Any) -> Tensor:
        inputs, labels, index = batch
        return (
            self.logits[index].sigmoid()
            * cross_entropy(self.classifier(inputs), labels, reduction="none")
        ).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.upper_loss(batch), batch_size=len(batch[0]))


class Bounded(Weighting):
    """The samples must keep a share of their weight, and the upper loss must be below a bound."""

    SHARE = 0.7

    def constraints(self, batch: Any) -> list[Tensor]:
        return [self.SHARE - self.logits.sigmoid().mean(), self.upper_loss(batch) - 0.9]


class Encoded(BilevelModule):
    """A shared encoder above, a linear head below; the encoder part of g is declared or not."""

    def __init__(self, solver: Any = MILD) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder = nn.Sequential(nn.Linear(2, 4), nn.Tanh())
        self.head = nn.Linear(4, 3)
        self.encoded = 0
        self.declare(
            upper=self.encoder,
            lower=self.head,
            upper_set=Box(-9, 9),
            lower_set=Box(-9, 9),
            solver=solver,
        )

    def upper_loss(self, batch: Any) -> Tensor:
        return cross_entropy(self.head(self.encoder(batch[0])), batch[1])

    def lower_loss(self, batch: Any) -> Tensor:
        return cross_entropy(self.head(self.encoder(batch[0])), batch[1])


class EncodedOnce(Encoded):
    """The same, with the encoder part of g declared."""

    def lower_features(self, batch: Any) -> Tensor:
        self.encoded += 1
        return self.encoder(batch[0])

    def lower_loss(self, batch: Any, features: Tensor) -> Tensor:  # type: ignore[override]
        return cross_entropy(self.head(features), batch[1])


def weighting_data(epoch_length: int = 10, count: int = 30) -> FullBatchDataModule:
    return FullBatchDataModule(
        samples(20, 1), samples(count, 2), validation=samples(20, 3), epoch_length=epoch_length
    )


class Cleaner(BilevelMixin, LightningModule):
    """README's module: the mixin before LightningModule, and neither validation nor test."""

    def __init__(self, n_train: int, solver: SolverCallable = IVSP) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(n_train))
        self.classifier = nn.Linear(2, 3)
        self.declare(
            upper=self.logits,
            lower=self.classifier,
            upper_set=Box(-100, 100),
            lower_set=Box(-100, 100),
            solver=solver,
        )

    def upper_loss(self, batch: Any) -> Tensor:
        return cross_entropy(self.classifier(batch[0]), batch[1])

    def lower_loss(self, batch: Any) -> Tensor:
        return (
            self.logits.sigmoid()
            * cross_entropy(self.classifier(batch[0]), batch[1], reduction="none")
        ).mean()


class CleanerData(FullBatchDataModule):
    """Data that are there from ``setup`` on, as on the command line."""

    def setup(self, stage: str | None = None) -> None:
        self.upper, self.lower = samples(20, 1), samples(30, 2)
