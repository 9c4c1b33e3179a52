"""Modules that a user may have got wrong, for the command line."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_bilevel import IVSP, BilevelModule, Box, IVSPMixin


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


class NoModule(IVSPMixin):
    """Without LightningModule."""


class Undeclared(Right):
    def declare_levels(self) -> None:
        """Forgotten."""


class Solverless(Right):
    def declare_levels(self) -> None:
        self.declare(upper=self.x, lower=self.y)


class SameTwice(Right):
    def declare_levels(self) -> None:
        self.declare(upper=self.x, lower=self.x, solver=IVSP)


class NotAModule(Right):
    def declare_levels(self) -> None:
        self.declare(upper=self.x, lower=torch.ones(3), solver=IVSP)  # type: ignore[arg-type]


class Foreign(Right):
    def declare_levels(self) -> None:
        self.declare(upper=self.x, lower=nn.Parameter(torch.ones(3)), solver=IVSP)


class Empty(Right):
    def declare_levels(self) -> None:
        self.declare(upper=nn.Identity(), lower=self.y, solver=IVSP)


class NegativeUnit(Right):
    declared: ClassVar[dict[str, Any]] = {"upper_unit": -1.0}


class WrongBox(Right):
    declared: ClassVar[dict[str, Any]] = {"upper_set": Box([0.0, 0.0], [1.0, 1.0])}


class NoSet(Right):
    declared: ClassVar[dict[str, Any]] = {"lower_set": "positive"}


class Forgotten(Right):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(1, 1)


class Half(Right):
    def __init__(self) -> None:
        BilevelModule.__init__(self)
        self.x, self.y = nn.Parameter(torch.zeros(3).half()), nn.Parameter(torch.ones(3).half())
        self.declare_levels()


class Vector(Right):
    def upper_loss(self, batch: Any) -> Tensor:
        return (self.y - self.x) ** 2


class Number(Right):
    def lower_loss(self, batch: Any) -> Tensor:
        return 1.0  # type: ignore[return-value]


class Detached(Right):
    def lower_loss(self, batch: Any) -> Tensor:
        return ((self.y.detach() - self.x) ** 2).sum()


class WithoutY(Right):
    def upper_loss(self, batch: Any) -> Tensor:
        return (self.x**2).sum()


class Undefined(Right):
    def lower_loss(self, batch: Any) -> Tensor:
        return torch.log(self.x - 1).sum() + super().lower_loss(batch)


class Infinite(Right):
    def upper_loss(self, batch: Any) -> Tensor:
        return super().upper_loss(batch) / (self.x * 0).sum()


class Dropout(Right):
    def upper_loss(self, batch: Any) -> Tensor:
        return torch.dropout(self.y**2, 0.5, train=True).sum()


class Noisy(Right):
    def lower_loss(self, batch: Any) -> Tensor:
        return super().lower_loss(batch) + 1e-3 * torch.randn(())


class Broken(Right):
    """Not wrong in a way that could be told: a bug of the user's."""

    def upper_loss(self, batch: Any) -> Tensor:
        return super().upper_loss(batch) * (1 // len([]))
