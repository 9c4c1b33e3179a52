"""Learned sample weights on mini-batches: many noisy labels, a hundred trusted samples.

The weights of 59,000 noisy samples are learned through ``Trainer.fit`` in 1,600 steps of 256. Then
an MLP 784-128-10 is trained from scratch on the samples of weight above 1/2 and on the trusted ones
(Adam 1e-3, weight decay 1e-4, batches of 256, 8 epochs). Its test error counts, and the AUROC of
the weights. Beside them stand methods without any bilevel problem, retrained in the same way. With
``--kind annotators`` there are also methods with one weight per annotator.

Run: python -m benchmarks.trusted [--data fashion_mnist] [--kind pair] [--corruption 0.6]
[--trusted 100] [--methods ivsp f2sa ...] [--runs SEED/SPLIT ...] [--rate 1e-4] [--multiplier 1]
[--judge 0]
Digits are few: add --noisy 1200 --batch 64.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from benchmarks.annotators import ANNOTATORS, annotated
from benchmarks.baselines.cleaning import (
    Found,
    TrustedSamples,
    all_samples,
    cross_validation,
    error,
    oracle,
    rated_labels,
    rated_sources,
    self_training,
    trusted_alone,
)
from lightning_bilevel import (
    CleaningData,
    DigitsCleaning,
    FashionMNISTCleaning,
    MNISTCleaning,
    Reweighting,
    SampleWeights,
    SourceWeights,
    TableRMS,
)
from lightning_bilevel.modules.networks import MLP
from lightning_bilevel.modules.reweighting import detection
from lightning_bilevel.stochastic import F2SA, StreamingIVSP
from lightning_bilevel.stochastic import Method as Stochastic

DATA = {"digits": DigitsCleaning, "mnist": MNISTCleaning, "fashion_mnist": FashionMNISTCleaning}


class Settings(NamedTuple):
    """The settings of a run on mini-batches.

    Attributes:
        steps: The number of mini-batches.
        rate: The rate of AdamW for y and z.
        multiplier: lambda of F2SA, or the largest lambda of StreamingIVSP, 1/gamma.
        table: The rate of TableRMS for one weight per sample.
        sources: The rate of AdamW for one weight per annotator.
    """

    steps: int = 1600
    rate: float = 1e-4
    multiplier: float = 1.0
    table: float = 3.0
    sources: float = 1e-2


Method = Callable[[Any, Settings], Found]


def data_of(name: str, kind: str) -> tuple[type[Any], dict[str, str]]:
    """Return the class of the data with this noise, and its further arguments."""
    return (annotated(DATA[name]), {}) if kind == "annotators" else (DATA[name], {"kind": kind})


def samples_of(data: Any) -> TrustedSamples:
    """Return the tensors of a data module, with the MLP that all methods train."""
    images, labels = data.lower[:2]
    return TrustedSamples(images, labels, *data.upper, partial(MLP, images[0].numel()))


def simple(method: Callable[[TrustedSamples], Found]) -> Method:
    """Make a method of one that knows no settings."""
    return lambda data, settings: method(samples_of(data))


def sample_weights(data: Any, settings: Settings, method: Stochastic) -> Found:
    """Learn one weight per sample."""
    weights = SampleWeights(data.n_train)
    learn(data, settings, weights, method, partial(TableRMS, lr=settings.table))
    return Found(weights.values() > 0.5, -weights.logits.detach())


def source_weights(data: Any, settings: Settings, method: Stochastic) -> Found:
    """Learn one weight per annotator; the network is then trained with these weights."""
    weights = SourceWeights(ANNOTATORS)
    rule = partial(AdamW, lr=settings.sources, weight_decay=0.0)
    learn(data, settings, weights, method, rule)
    found = weights.values()[data.annotators]
    everything = torch.ones(data.n_train, dtype=torch.bool)
    return Found(everything, -found, found / found.max())


def learn(data: Any, settings: Settings, weights: Any, method: Stochastic, rule: Any) -> None:
    cosine = partial(CosineAnnealingLR, T_max=settings.steps)
    module = Reweighting(
        MLP(data.lower[0][0].numel()),
        weights,
        method=method,
        upper_optimizer=rule,
        lower_optimizer=partial(AdamW, lr=settings.rate),
        upper_scheduler=cosine,
        lower_scheduler=cosine,
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


def ivsp(settings: Settings) -> Stochastic:
    return StreamingIVSP(gamma=1 / settings.multiplier)


def f2sa(settings: Settings) -> Stochastic:
    return F2SA(multiplier=settings.multiplier)


METHODS: dict[str, Method] = {
    "trusted": simple(trusted_alone),
    "all": simple(all_samples),
    "self-training": simple(self_training),
    "self-training-strict": simple(partial(self_training, strict=True)),
    "cross-validation": simple(cross_validation),
    "oracle": lambda data, settings: oracle(samples_of(data), data.corrupted),
    "f2sa": lambda data, settings: sample_weights(data, settings, f2sa(settings)),
    "ivsp": lambda data, settings: sample_weights(data, settings, ivsp(settings)),
}
# With one weight per annotator, or a rating of each.
OF_ANNOTATORS: dict[str, Method] = {
    "ratings": lambda data, settings: rated_sources(samples_of(data), data.annotators),
    "ratings-labels": lambda data, settings: rated_labels(samples_of(data), data.annotators),
    "f2sa-sources": lambda data, settings: source_weights(data, settings, f2sa(settings)),
    "ivsp-sources": lambda data, settings: source_weights(data, settings, ivsp(settings)),
}


def measure(
    data: CleaningData,
    method: str,
    seed: int,
    settings: Settings,
    judge: tuple[Tensor, Tensor] | None = None,
) -> dict[str, float]:
    """Run a method and train on what it keeps.

    Args:
        data: The data, after ``setup``.
        method: Its name.
        seed: Decides the networks and the order of the samples.
        settings: Those of the runs on mini-batches.
        judge: Images and labels that choose between settings; None is the test set.
    """
    torch.manual_seed(seed)
    began = time.perf_counter()
    found = {**METHODS, **OF_ANNOTATORS}[method](data, settings)
    seconds = time.perf_counter() - began
    corrupted = cast(Tensor, data.corrupted)
    weights = found.kept.float() if found.weights is None else found.weights
    row = {"kept": float(found.kept.float().mean()), "seconds": seconds}
    row["wrong_kept"] = float(weights @ corrupted.float() / weights.sum().clamp(min=1.0))
    if found.suspicion is not None:
        row |= detection(found.suspicion, corrupted)
    network = samples_of(data).retrain(found.kept, found.weights)
    if judge is not None:
        row["held_out_error"] = error(network, *judge)
    else:
        row["test_error"] = error(network, *cast(tuple[Tensor, Tensor], data.test))
    return row


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=list(DATA), default="fashion_mnist")
    parser.add_argument("--kind", choices=["uniform", "pair", "annotators"], default="pair")
    parser.add_argument("--corruption", type=float, default=0.6)
    parser.add_argument("--noisy", type=int, default=59_000)
    parser.add_argument("--trusted", type=int, default=100)
    parser.add_argument("--batch", type=int, default=256, help="samples of a step")
    parser.add_argument("--judge", type=int, default=0, help="clean samples held out")
    known = [*METHODS, *OF_ANNOTATORS]
    parser.add_argument("--methods", nargs="+", choices=known, help="all that the data allow")
    parser.add_argument("--runs", nargs="+", default=["0/0", "1/1", "2/2"], help="seed/split")
    for name, default in Settings()._asdict().items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    given = parser.parse_args(arguments)
    settings = Settings(*(getattr(given, name) for name in Settings._fields))
    for run in given.runs:
        seed, split = map(int, run.split("/"))
        made, options = data_of(given.data, given.kind)
        data: Any = made(
            n_train=given.noisy,
            n_validation=given.trusted + given.judge,
            corruption=given.corruption,
            **options,
            seed=split,
            batch_size=given.batch,
        )
        data.setup()
        judge = None
        if given.judge:
            judge = tuple(tensor[given.trusted :] for tensor in data.upper)
            data.upper = tuple(tensor[: given.trusted] for tensor in data.upper)
        with_annotators = list(OF_ANNOTATORS) if given.kind == "annotators" else []
        for method in given.methods or [*METHODS, *with_annotators]:
            row = measure(data, method, seed, settings, judge)
            what = {"data": given.data, "kind": given.kind, "corruption": given.corruption}
            what |= {"trusted": given.trusted, "method": method, "seed": seed, "split": split}
            what |= settings._asdict()
            print(json.dumps({**what, **{k: round(v, 4) for k, v in row.items()}}), flush=True)


if __name__ == "__main__":
    main()
