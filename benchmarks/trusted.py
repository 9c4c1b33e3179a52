"""Learned sample weights on mini-batches: many noisy labels, a hundred trusted samples.

The weights of 59,000 noisy samples are learned through ``Trainer.fit`` in 1,600 steps of 256. Then
an MLP 784-128-10 is trained from scratch on the samples of weight above 1/2 and on the trusted ones
(Adam 1e-3, weight decay 1e-4, batches of 256, 8 epochs). Its test error counts, and the AUROC of
the weights. Beside them stand methods without any bilevel problem, retrained in the same way.

Run: python -m benchmarks.trusted [--data fashion_mnist] [--kind pair] [--corruption 0.6]
[--methods ivsp f2sa ...] [--runs SEED/SPLIT ...] [--rate 1e-4] [--multiplier 1] [--judge 0]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from lightning_bilevel import (
    F2SA,
    CleaningData,
    FashionMNISTCleaning,
    HyperCleaning,
    MNISTCleaning,
    StreamingIVSP,
    TableRMS,
)
from lightning_bilevel.modules.detection import detection
from lightning_bilevel.modules.networks import MLP

DATA = {"mnist": MNISTCleaning, "fashion_mnist": FashionMNISTCleaning}
BATCH = 256
EPOCHS = 8
# So many steps at least, also on a hundred samples.
FEWEST_STEPS = 300
ROUNDS = 3
LENIENT = 0.1


class Settings(NamedTuple):
    """The settings of a streaming run.

    Attributes:
        steps: The number of mini-batches.
        rate: The rate of AdamW for y and z.
        multiplier: lambda of F2SA, or the largest lambda of StreamingIVSP, 1/gamma.
        table: The rate of TableRMS for x.
    """

    steps: int = 1600
    rate: float = 1e-4
    multiplier: float = 1.0
    table: float = 3.0


class Found(NamedTuple):
    """What a method says: which noisy samples it keeps, and how suspicious each is."""

    kept: Tensor
    suspicion: Tensor | None


Method = Callable[[CleaningData, Settings], Found]


def train(images: Tensor, labels: Tensor, network: nn.Module | None = None) -> nn.Module:
    """Train a network, by default a fresh MLP."""
    network = MLP(images[0].numel()) if network is None else network
    optimizer = Adam(network.parameters(), lr=1e-3, weight_decay=1e-4)
    done = 0
    epochs = 0
    while epochs < EPOCHS or done < FEWEST_STEPS:
        for batch in torch.split(torch.randperm(len(images)), BATCH):
            optimizer.zero_grad()
            cross_entropy(network(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            done += 1
        epochs += 1
    return network


def train_kept(data: Any, kept: Tensor) -> nn.Module:
    """Train on the noisy samples that are kept and on the trusted ones."""
    images, labels, _ = data.lower
    clean_images, clean_labels = data.upper
    return train(torch.cat([images[kept], clean_images]), torch.cat([labels[kept], clean_labels]))


@torch.no_grad()
def given(network: nn.Module, data: Any) -> Tensor:
    """Return the probability of each noisy label."""
    images, labels, _ = data.lower
    return network(images).softmax(1).gather(1, labels.unsqueeze(1)).squeeze(1)


@torch.no_grad()
def error(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((network(images).argmax(1) != labels).float().mean())


def nothing_but_trusted(data: Any, settings: Settings) -> Found:
    return Found(torch.zeros(data.n_train, dtype=torch.bool), -given(train(*data.upper), data))


def everything(data: Any, settings: Settings) -> Found:
    kept = torch.ones(data.n_train, dtype=torch.bool)
    return Found(kept, -given(train_kept(data, kept), data))


def self_training(data: Any, settings: Settings) -> Found:
    """Keep the samples whose label has a probability above 0.1, and train again, three times."""
    network = train(*data.upper)
    for _ in range(ROUNDS - 1):
        network = train_kept(data, given(network, data) > LENIENT)
    p = given(network, data)
    return Found(p > LENIENT, -p)


def streaming(data: Any, settings: Settings, solver: Any) -> Found:
    """Learn the weights by a streaming solver."""
    module = HyperCleaning(
        n_train=data.n_train,
        classifier=MLP(data.lower[0][0].numel()),
        weighted_mean=True,
        upper_bound=8.0,
        solver=partial(
            solver,
            upper_optimizer=partial(TableRMS, lr=settings.table),
            lower_optimizer=partial(AdamW, lr=settings.rate),
        ),
        scheduler=partial(CosineAnnealingLR, T_max=settings.steps),
    )
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=-1,
        max_steps=settings.steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    return Found(module.weights > 0.5, -module.logits.detach())


def ivsp(data: Any, settings: Settings) -> Found:
    return streaming(data, settings, partial(StreamingIVSP, gamma=1 / settings.multiplier))


def f2sa(data: Any, settings: Settings) -> Found:
    return streaming(data, settings, partial(F2SA, lambda0=settings.multiplier))


METHODS: dict[str, Method] = {
    "trusted": nothing_but_trusted,
    "all": everything,
    "self-training": self_training,
    "f2sa": f2sa,
    "ivsp": ivsp,
}


def measure(
    data: CleaningData, method: str, seed: int, settings: Settings, judge: Any = None
) -> dict[str, float]:
    """Run a method and train on what it keeps.

    Args:
        data: The data, after ``setup``.
        method: Its name.
        seed: Decides the networks and the order of the samples.
        settings: Those of the streaming solvers.
        judge: Images and labels that choose between settings; None is the test set.
    """
    torch.manual_seed(seed)
    began = time.perf_counter()
    found = METHODS[method](data, settings)
    seconds = time.perf_counter() - began
    corrupted = data.corrupted
    assert corrupted is not None
    row = {"kept": float(found.kept.float().mean()), "seconds": seconds}
    row["wrong_kept"] = float(corrupted[found.kept].float().mean()) if found.kept.any() else 0.0
    if found.suspicion is not None:
        row |= detection(found.suspicion, corrupted)
    network = train_kept(data, found.kept)
    if judge is not None:
        row["held_out_error"] = error(network, *judge)
    else:
        row["test_error"] = error(network, *data.test)  # type: ignore[misc]
    return row


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=list(DATA), default="fashion_mnist")
    parser.add_argument("--kind", default="pair")
    parser.add_argument("--corruption", type=float, default=0.6)
    parser.add_argument("--noisy", type=int, default=59_000)
    parser.add_argument("--trusted", type=int, default=100)
    parser.add_argument("--judge", type=int, default=0, help="clean samples held out")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--runs", nargs="+", default=["0/0", "1/1", "2/2"], help="seed/split")
    for name, default in Settings()._asdict().items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    given_ = parser.parse_args(arguments)
    settings = Settings(*(getattr(given_, name) for name in Settings._fields))
    for run in given_.runs:
        seed, split = map(int, run.split("/"))
        data: Any = DATA[given_.data](
            n_train=given_.noisy,
            n_validation=given_.trusted + given_.judge,
            corruption=given_.corruption,
            kind=given_.kind,
            seed=split,
            batch_size=BATCH,
        )
        data.setup()
        judge = None
        if given_.judge:
            judge = tuple(tensor[given_.trusted :] for tensor in data.upper)
            data.upper = tuple(tensor[: given_.trusted] for tensor in data.upper)
        for method in given_.methods:
            row = measure(data, method, seed, settings, judge)
            what = {"data": given_.data, "kind": given_.kind, "corruption": given_.corruption}
            what |= {"method": method, "seed": seed, "split": split, **settings._asdict()}
            print(json.dumps({**what, **{k: round(v, 4) for k, v in row.items()}}), flush=True)


if __name__ == "__main__":
    main()
