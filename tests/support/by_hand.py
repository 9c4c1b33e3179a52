"""A loop by hand over two separate networks: what a run on mini-batches has to equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lightning_bilevel import BilevelModule, Box
from lightning_bilevel.stochastic import F2BA, F2SA, MEHA, VPBGD, Method, StreamingIVSP

SAMPLES = 60
OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
Batch = dict[str, tuple[Tensor, ...]]
Make = Callable[[list[nn.Parameter]], Optimizer]


def network() -> nn.Sequential:
    """BatchNorm, dropout, and a frozen layer."""
    layers = nn.Sequential(
        # The gradient of a bias before BatchNorm is rounding, which Adam makes steps of.
        nn.Linear(5, 8, bias=False),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Dropout(0.3),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 3),
    )
    layers[4].requires_grad_(False)
    return layers


def trainable(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def two_groups(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Weight decay and another rate for matrices."""
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1, "lr": 5e-3},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0, "lr": 2e-3},
    ]


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(two_groups(parameters))


def batches(count: int, dtype: torch.dtype = torch.float64, seed: int = 3) -> list[Batch]:
    numbers = torch.Generator().manual_seed(seed)

    def inputs(n: int) -> Tensor:
        return torch.randn(n, 5, generator=numbers, dtype=dtype)

    def labels(n: int) -> Tensor:
        return torch.randint(0, 3, (n,), generator=numbers)

    return [
        {
            "upper": (inputs(10), labels(10)),
            "lower": (
                inputs(16),
                labels(16),
                torch.randint(0, SAMPLES, (16,), generator=numbers),
            ),
        }
        for _ in range(count)
    ]


class Listed(Dataset[Batch]):
    """Batches in their order."""

    def __init__(self, given: list[Batch]) -> None:
        self.given = given

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, index: int) -> Batch:
        return self.given[index]


def loader(given: list[Batch]) -> DataLoader[Batch]:
    return DataLoader(Listed(given), batch_size=None)


class Stateful(DataLoader[Any]):
    """A loader that knows how far it has come."""

    def __init__(self, given: Any) -> None:
        super().__init__(Listed(given), batch_size=None)
        self.given, self.place = given, 0

    def __iter__(self) -> Any:
        begin = self.place % len(self.given)
        for index in range(begin, len(self.given)):
            self.place = index + 1
            yield self.given[index]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Cleaner(BilevelModule):
    """One weight per sample above, a classifier below."""

    def __init__(
        self,
        method: Method | None = None,
        lower: Make = adamw,
        scheduler: Callable[[Optimizer], Any] | None = None,
        net: Callable[[], nn.Module] = network,
        **options: Any,
    ) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(SAMPLES))
        self.network = net()
        self.make, self.scheduler = lower, scheduler
        self.declare(
            upper=self.logits,
            lower=self.network,
            upper_set=Box(-0.5, 0.5),
            method=method or F2SA(),
            **options,
        )

    def upper_loss(self, batch: Any) -> Tensor:
        return cross_entropy(self.network(batch[0]), batch[1])

    def lower_loss(self, batch: Any) -> Tensor:
        losses = cross_entropy(self.network(batch[0]), batch[1], reduction="none")
        return (self.logits[batch[2]].sigmoid() * losses).mean()

    def configure_optimizers(self) -> Any:
        upper = torch.optim.Adam([self.logits], lr=0.05)
        lower = self.make(trainable(self.network))
        if self.scheduler is None:
            return upper, lower
        return [upper, lower], [{"scheduler": self.scheduler(lower), "interval": "step"}]


@dataclass
class ByHand:
    """The same with two separate networks, y and z, and an optimiser each."""

    module: Cleaner
    method: Method
    lower: Make = adamw
    scheduler: Callable[[Optimizer], Any] | None = None
    clip: float | None = None
    tracked: tuple[float, float] | None = None
    k: int = 0
    schedulers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.x = nn.Parameter(self.module.logits.detach().clone())
        self.y = copy.deepcopy(self.module.network)
        self.z = copy.deepcopy(self.module.network)
        self.above = torch.optim.Adam([self.x], lr=0.05)
        self.below = [self.lower(trainable(net)) for net in (self.y, self.z)]
        if self.scheduler is not None:
            self.schedulers = [self.scheduler(optimizer) for optimizer in self.below]

    def f(self, batch: Any) -> Tensor:
        return cross_entropy(self.y(batch[0]), batch[1])

    def g(self, net: nn.Module, batch: Any) -> Tensor:
        losses = cross_entropy(net(batch[0]), batch[1], reduction="none")
        return (self.x[batch[2]].sigmoid() * losses).mean()

    def weights(self, gap: float, distance: float) -> tuple[float, float, float | None, float]:
        """Return a, b, rho and the divisor of y's gradient."""
        match self.method:
            case F2SA(multiplier=value) | VPBGD(gamma=value):
                b = (
                    value
                    if isinstance(value, float)
                    else value.initial * (self.k + 1) ** value.power
                )
                return 1.0, b, None, 1.0
            case F2BA(sigma=sigma):
                return 1.0, 1 / sigma, None, 1.0
            case MEHA(c=c, gamma=gamma):
                return 1 / (c.initial * (self.k + 1) ** c.power), 1.0, gamma, 1.0  # type: ignore[union-attr]
            case StreamingIVSP() as m:
                r = gap - distance / (2 * m.rho) - m.delta
                before, spread = self.tracked or (r, 0.0)
                now = 0.98 * before + 0.02 * r
                spread = 0.98 * spread + 0.02 * (r - now) ** 2
                self.tracked = now, spread
                phi = now / max(m.mu, 3 * (spread * 0.02 / 1.98) ** 0.5) + 0.5
                phi = min(max(phi, m.floor), 1.0)
                return m.gamma, phi, m.rho, m.gamma + phi
        raise TypeError(self.method)

    def step(self, given: list[Batch]) -> None:
        """One step on some batches, whose gradients are averaged."""
        y, z = trainable(self.y), trainable(self.z)
        to_x, to_y, to_z = (
            [torch.zeros_like(p) for p in parameters] for parameters in ([self.x], y, z)
        )
        for number, batch in enumerate(given):
            state = torch.get_rng_state()
            g_z = self.g(self.z, batch["lower"])
            torch.set_rng_state(state)
            g_y = self.g(self.y, batch["lower"])
            f = self.f(batch["upper"])
            if number == 0:
                distance = sum(
                    float((p - q).detach().square().sum()) for p, q in zip(y, z, strict=True)
                )
                a, b, rho, divisor = self.weights(float((g_y - g_z).detach()), distance)
            joint = (a * f + b * (g_y - g_z)) / len(given)
            of_x, *of_y = torch.autograd.grad(joint, [self.x, *y], retain_graph=True)
            of_z = torch.autograd.grad(g_z / len(given), z)
            for sums, terms in ((to_x, [of_x]), (to_y, of_y), (to_z, of_z)):
                for total, term in zip(sums, terms, strict=True):
                    total += term
        if rho is not None:
            for p, q, at_y, at_z in zip(y, z, to_y, to_z, strict=True):
                pull = (q - p).detach() / rho
                at_y += b * pull
                at_z += pull
        for parameters, sums, by in (([self.x], to_x, 1.0), (y, to_y, divisor), (z, to_z, 1.0)):
            for parameter, total in zip(parameters, sums, strict=True):
                parameter.grad = total / by
            if self.clip is not None:
                nn.utils.clip_grad_norm_(parameters, self.clip)
        for optimizer in (self.above, *self.below):
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        self.x.data.clamp_(-0.5, 0.5)
        self.k += 1


class Seeded(Callback):
    """Seeds the run when its first step begins."""

    def __init__(self, seed: int = 99) -> None:
        self.seed = seed

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        torch.manual_seed(self.seed)
