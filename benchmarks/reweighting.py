"""Sample weights learned on mini-batches, by us and by two other libraries, with the same network,
the same losses and the same batches.

Each side makes one step on a pair of batches: a step of the weights x and one of the network y.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam, Optimizer
from torch.utils.data import DataLoader, IterableDataset

from lightning_bilevel import BilevelModule, TableRMS
from lightning_bilevel.stochastic import F2SA, Method, StreamingIVSP

BATCH = 256
# Images, labels and the numbers of the samples.
Batch = tuple[Tensor, Tensor, Tensor]
# y of BOAT's PGDO has any optimiser, its surrogate of the lower solution has SGD with this rate.
SURROGATE_LR = 0.1


class Rates(NamedTuple):
    """The rates of a side.

    Attributes:
        upper: That of x, by TableRMS for ours and by Adam for the others.
        lower: That of Adam for y, and for z where there is one.
        kind: How betty finds the hypergradient.
    """

    upper: float
    lower: float
    kind: str = "darts"


class Data(NamedTuple):
    """Noisy and trusted samples, with flat images."""

    noisy: tuple[Tensor, Tensor]
    trusted: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    corrupted: Tensor
    side: int


class Feed(IterableDataset[Batch]):
    """The batches of one level in random order, without end: images, labels and numbers."""

    def __init__(self, samples: tuple[Tensor, Tensor], seed: int) -> None:
        self.samples, self.seed = samples, seed

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(self.seed)
        images, labels = self.samples
        size = min(BATCH, len(images))
        while True:
            order = torch.randperm(len(images), generator=generator)
            for part in order.split(size):
                if len(part) == size:
                    index = part.sort().values
                    yield images[index], labels[index], index


def mlp(data: Data) -> nn.Sequential:
    return nn.Sequential(nn.Linear(data.side**2, 128), nn.ReLU(), nn.Linear(128, 10))


def cnn(data: Data) -> nn.Sequential:
    def layer(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]

    side = data.side
    features = [nn.Unflatten(1, (1, side, side)), *layer(1, 8), *layer(8, 16), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(16 * (side // 4) ** 2, 10))


NETWORKS: dict[str, Callable[[Data], nn.Sequential]] = {"MLP 784-128-10": mlp, "CNN": cnn}


def weighted(logits: Tensor, outputs: Tensor, labels: Tensor) -> Tensor:
    weights = logits.sigmoid()
    return (weights * cross_entropy(outputs, labels, reduction="none")).sum() / weights.sum()


class Ours(BilevelModule):
    """A network on weighted samples, with a method and the optimisers of x and y."""

    def __init__(
        self,
        net: nn.Module,
        count: int,
        method: Method,
        upper: Callable[..., Optimizer],
        lower: Callable[..., Optimizer],
    ) -> None:
        super().__init__()
        self.net = copy.deepcopy(net)
        self.logits = nn.Parameter(torch.zeros(count))
        self.makers = upper, lower
        self.declare(upper=self.logits, lower=self.net, method=method)

    def upper_loss(self, batch: Batch) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def lower_loss(self, batch: Batch) -> Tensor:
        return weighted(self.logits[batch[2]], self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> tuple[Optimizer, Optimizer]:
        upper, lower = self.makers
        return upper([self.logits]), lower(self.net.parameters())


class Side(Protocol):
    """Another library."""

    def step(self, upper: Batch, lower: Batch) -> None:
        """Make one step."""

    def result(self) -> tuple[nn.Module, Tensor]:
        """Return the network and the logits of the weights."""


class Weights(nn.Module):
    """The upper level as the other libraries take it, a module."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(count))


def upper_loss(feed: dict[str, Any], upper: Weights, lower: nn.Module) -> Tensor:
    images, labels, _ = feed["batch"]
    return cross_entropy(lower(images), labels)


def lower_loss(feed: dict[str, Any], upper: Weights, lower: nn.Module) -> Tensor:
    images, labels, index = feed["batch"]
    return weighted(upper.logits[index], lower(images), labels)


class Boat:
    """BOAT's PGDO, V-PBGD with one step of its surrogate, fed with another batch in each step."""

    def __init__(self, net: nn.Module, count: int, rates: Rates) -> None:
        from boat_torch import Problem

        self.folder = tempfile.TemporaryDirectory()
        self.upper, self.net = Weights(count), copy.deepcopy(net)
        x, y = list(self.upper.parameters()), list(self.net.parameters())
        constants = {"y_hat_lr": SURROGATE_LR, "gamma_init": 1.0, "gamma_max": 1.0}
        constants |= {"gamma_argmax_step": 1, "update_y_ahead": False, "penalty": "difference"}
        config = {
            "fo_op": "PGDO",
            "gm_op": None,
            "na_op": None,
            "upper_level_model": self.upper,
            "lower_level_model": self.net,
            "upper_level_var": x,
            "lower_level_var": y,
            "upper_level_opt": Adam(x, rates.upper),
            "lower_level_opt": Adam(y, rates.lower),
            "lower_iters": 1,
            "device": "cpu",
            "return_grad": False,
            "fo_ol_batch_input": False,
            "loss_log_path": f"{self.folder.name}/losses.json",
            "PGDO": constants,
        }
        losses = {
            f"{level}_level_loss": {"function": f"{__name__}.{level}_loss"}
            for level in ("upper", "lower")
        }
        self.problem = Problem(config, losses).build_ll_solver().build_ul_solver()
        self.iteration = 0

    def step(self, upper: Batch, lower: Batch) -> None:
        self.problem.run_iter({"batch": lower}, {"batch": upper}, self.iteration)
        self.iteration += 1
        # It writes all losses so far to a file in each step, which would be most of a long run.
        self.problem.loss_history.clear()

    def result(self) -> tuple[nn.Module, Tensor]:
        return self.net, self.upper.logits.detach()


class Betty:
    """betty's engine: one step of y, then one of x by a hypergradient of finite differences."""

    def __init__(self, net: nn.Module, count: int, rates: Rates) -> None:
        from betty.configs import Config, EngineConfig
        from betty.engine import Engine
        from betty.problems import ImplicitProblem

        class Upper(ImplicitProblem):  # type: ignore[misc]
            def training_step(self, batch: Batch) -> Tensor:
                return upper_loss({"batch": batch}, self.module, self.lower)

        class Lower(ImplicitProblem):  # type: ignore[misc]
            def training_step(self, batch: Batch) -> Tensor:
                return lower_loss({"batch": batch}, self.upper.module, self.module)

        self.net, self.weights = copy.deepcopy(net), Weights(count)
        self.given: dict[str, Batch] = {}
        upper = Upper(
            "upper",
            Config(),
            self.weights,
            Adam(self.weights.parameters(), rates.upper),
            train_data_loader=self._feed("upper"),
        )
        lower = Lower(
            "lower",
            Config(type=rates.kind, unroll_steps=1),
            self.net,
            Adam(self.net.parameters(), rates.lower),
            train_data_loader=self._feed("lower"),
        )
        dependencies: dict[str, Any] = {"u2l": {upper: [lower]}, "l2u": {lower: [upper]}}
        logging.disable(logging.INFO)  # betty tells what it has understood
        self.engine = Engine(
            problems=[upper, lower], config=EngineConfig(strategy="cpu"), dependencies=dependencies
        )
        logging.disable(logging.NOTSET)
        self.engine.train()

    def _feed(self, level: str) -> Iterator[Batch]:
        while True:
            yield self.given[level]

    def step(self, upper: Batch, lower: Batch) -> None:
        self.given = {"upper": upper, "lower": lower}
        self.engine.train_step()

    def result(self) -> tuple[nn.Module, Tensor]:
        return self.net, self.weights.logits.detach()


F2SA_NAME, IVSP_NAME = "F2SA (multiplier 1)", "StreamingIVSP"
BETTY_NAME, BOAT_NAME = "betty 0.2.1", "BOAT 1.1.1, PGDO"
METHODS: dict[str, Method] = {F2SA_NAME: F2SA(multiplier=1.0), IVSP_NAME: StreamingIVSP()}
RIVALS: dict[str, Callable[[nn.Module, int, Rates], Side]] = {BETTY_NAME: Betty, BOAT_NAME: Boat}
PACKAGES = {BETTY_NAME: "betty-ml", BOAT_NAME: "boat-torch"}
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": -1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def feeds(data: Data, seed: int) -> dict[str, Feed]:
    return {"upper": Feed(data.trusted, 2 * seed), "lower": Feed(data.noisy, 2 * seed + 1)}


def trained(
    name: str, net: nn.Module, data: Data, rates: Rates, seed: int, steps: int
) -> tuple[nn.Module, Tensor]:
    """Return the network and the logits of the weights after a run of a side."""
    count, given = len(data.noisy[0]), feeds(data, seed)
    if name in METHODS:
        upper, lower = partial(TableRMS, lr=rates.upper), partial(Adam, lr=rates.lower)
        module = Ours(net, count, METHODS[name], upper, lower)
        loaders = {level: DataLoader(feed, batch_size=None) for level, feed in given.items()}
        Trainer(max_steps=steps, **QUIET).fit(module, loaders)
        return module.net, module.logits.detach()
    side = RIVALS[name](net, count, rates)
    for upper_batch, lower_batch in islice(
        zip(given["upper"], given["lower"], strict=False), steps
    ):
        side.step(upper_batch, lower_batch)
    return side.result()
