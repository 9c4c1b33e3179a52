"""Modules that a user may have got wrong, for the command line."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_bilevel import IVSP, BilevelModule, Box


class Right(BilevelModule):
    """The module that the others get wrong: f = |x - 1|^2 + |y|^2, g = |y - x|^2."""

    declared: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
        self.declare_levels()

    def declare_levels(self) -> None:
        self.declare(upper=self.x, lower=self.y, solver=IVSP, **self.declared)

    def upper_loss(self, batch: Any) -> Tensor:
        return ((self.x - 1) ** 2).sum() + (self.y**2).sum()

    def lower_loss(self, batch: Any) -> Tensor:
        return ((self.y - self.x) ** 2).sum()


class NoUpperLoss(BilevelModule):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
        self.declare(upper=self.x, lower=self.y, solver=IVSP)


class OneLevel(LightningModule):
    """Without the mixin."""


class Undeclared(Right):
    def declare_levels(self) -> None:
        """Forgotten."""


class WrongBox(Right):
    declared: ClassVar[dict[str, Any]] = {"upper_set": Box([0.0, 0.0], [1.0, 1.0])}


class NoSet(Right):
    declared: ClassVar[dict[str, Any]] = {"lower_set": "positive"}


class Vector(Right):
    def upper_loss(self, batch: Any) -> Tensor:
        return (self.y - self.x) ** 2


class Undefined(Right):
    def lower_loss(self, batch: Any) -> Tensor:
        return torch.log(self.x - 1).sum() + super().lower_loss(batch)


class Dropout(Right):
    def upper_loss(self, batch: Any) -> Tensor:
        return torch.dropout(self.y**2, 0.5, train=True).sum()


class Broken(Right):
    """Not wrong in a way that could be told: a bug of the user's."""

    def upper_loss(self, batch: Any) -> Tensor:
        return super().upper_loss(batch) * (1 // len([]))
