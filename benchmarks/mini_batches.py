"""Mini-batch reweighting against betty and BOAT: time of a step, memory, and what is learned.

FashionMNIST, 60 % of the noisy labels flipped to the next class, batches of 256 at both levels,
Adam for the network, an MLP and a small CNN. The weights decide which samples are kept: those of
weight above 1/2. A fresh network is trained on these and on the trusted ones, and its test error
counts. The rates were chosen on MNIST, where held-out clean samples take the place of the test set.

Run: python -m benchmarks mini_batches
     python -m benchmarks.mini_batches [--side ...]      (the search for rates, on MNIST)
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import nn

from benchmarks import tasks
from benchmarks.baselines.cleaning import TrustedSamples, error
from benchmarks.memory import peak_bytes
from benchmarks.results import Row, Section, installed, skipped
from benchmarks.reweighting import (
    BETTY_NAME,
    BOAT_NAME,
    F2SA_NAME,
    IVSP_NAME,
    NETWORKS,
    PACKAGES,
    SIDES,
    Data,
    Rates,
    feeds,
    fit,
    mlp,
    run_steps,
)
from benchmarks.streaming import Training
from benchmarks.tasks import QUICK, Size
from benchmarks.timing import ratio
from lightning_bilevel.modules.detection import detection

FIT_NAME = f"{IVSP_NAME}, Trainer.fit"
WARM_UP = 5
# For each of a size's steps, a run has so many.
TIMES_STEPS = 80
# The steps after which the memory is measured.
EARLY, LATE = 5, 100
# The best of the search on MNIST with the MLP; the CNN has the same.
CHOSEN = {
    F2SA_NAME: Rates(3.0, 1e-4),
    IVSP_NAME: Rates(1.0, 1e-4),
    BETTY_NAME: Rates(1e-1, 1e-3, "sama"),
    BOAT_NAME: Rates(1e-1, 1e-4),
}
LOWER_RATES = (1e-4, 3e-4, 1e-3)
SEARCHED = {
    F2SA_NAME: [Rates(x, y) for x in (1.0, 3.0) for y in LOWER_RATES],
    IVSP_NAME: [Rates(x, y) for x in (1.0, 3.0) for y in LOWER_RATES],
    # "sama" was ahead of "darts" at all six rates in a trial of 20 steps on 3,000 samples of MNIST.
    BETTY_NAME: [Rates(x, y, "sama") for x in (1e-2, 1e-1) for y in LOWER_RATES],
    BOAT_NAME: [Rates(x, y) for x in (1e-2, 1e-1) for y in LOWER_RATES],
}


def load(dataset: str, size: Size, split: int, judge: bool = False) -> Data:
    """Noisy and trusted samples; with a judge, held-out clean samples are the test set."""
    count = size.most_samples // 60
    held_out = count if judge else 0
    loaded: Any = tasks.DATA[dataset](
        n_train=size.most_samples - count - held_out,
        n_validation=count + held_out,
        corruption=0.6,
        kind="pair",
        seed=split,
    )
    loaded.setup()
    images, labels, _ = loaded.lower
    clean = [tensor.flatten(1) if tensor.ndim > 1 else tensor for tensor in loaded.upper]
    test = loaded.test if not judge else [tensor[count:] for tensor in clean]
    return Data(
        (images.flatten(1), labels),
        (clean[0][:count], clean[1][:count]),
        (test[0].flatten(1), test[1]),
        loaded.corrupted,
        images.shape[-1],
    )


def learned(
    name: str, make: Callable[[Data], nn.Module], data: Data, rates: Rates, seed: int, steps: int
) -> dict[str, float]:
    """Run a side and train a fresh network on the samples that it keeps."""
    torch.manual_seed(seed)
    net = make(data)
    if name == FIT_NAME:
        module = fit(net, data, rates, seed, steps, [])
        network, logits = module.net, module.logits.detach()
    else:
        side = SIDES[name](net, len(data.noisy[0]), rates)
        run_steps(side, data, seed, steps)
        network, logits = side.result()
    kept = logits > 0
    torch.manual_seed(seed)
    again = TrustedSamples(*data.noisy, *data.trusted, partial(make, data)).retrain(kept)
    return {
        "error": error(again, *data.test),
        "own_error": error(network, *data.test),
        "auroc": detection(-logits, data.corrupted)["auroc"],
        "kept": float(kept.float().mean()),
    }


def processor_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


class InTurn(Callback):
    """Times a fit from batch to batch, and a step of each other side in between.

    In processor time, which on one thread does not depend on what else the machine does.
    """

    def __init__(self, others: list[Callable[[], object]]) -> None:
        self.others = others
        self.took: list[list[float]] = []
        self._ended: float | None = None

    def on_train_batch_end(self, *args: Any) -> None:
        now = time.process_time()
        row = [processor_seconds(other) for other in self.others]
        if self._ended is not None:
            self.took.append([now - self._ended, *row])
        self._ended = time.process_time()


def stepping(side: Any, data: Data) -> Callable[[], object]:
    given = feeds(data, 0)
    pairs = zip(given["upper"], given["lower"], strict=False)
    return lambda: side.step(*next(pairs))


def times(net: nn.Module, data: Data, steps: int) -> dict[str, float]:
    """Return the processor time of a step of each side, as a multiple of one of plain training."""
    count = len(data.noisy[0])
    there = [name for name in SIDES if name not in PACKAGES or installed(PACKAGES[name])]
    others = [SIDES[name](net, count, CHOSEN[name]) for name in there]
    turns = InTurn([stepping(side, data) for side in [*others, Training(net)]])
    fit(net, data, CHOSEN[IVSP_NAME], 0, WARM_UP + steps, [turns])
    fitted, *sides, plain = zip(*turns.took[WARM_UP:], strict=True)
    found = {name: ratio(took, plain) for name, took in zip(there, sides, strict=True)}
    return {**found, FIT_NAME: ratio(fitted, plain), "ms": 1e3 * sorted(plain)[len(plain) // 2]}


def peak(name: str, net: nn.Module, data: Data, before: int) -> float:
    """Return the peak of a step after some others, in copies of the network."""
    made: list[Any] = []

    def prepare() -> None:
        side = SIDES[name](net, len(data.noisy[0]), CHOSEN[name])
        made.append(side)
        run_steps(side, data, 0, before)

    size = sum(p.numel() * p.element_size() for p in net.parameters())
    # What an earlier side has left in cycles must not be freed on the account of this one.
    gc.collect()
    return peak_bytes(lambda: run_steps(made[0], data, 1, 1), prepare) / size


def run(size: Size) -> Section:
    rows = []
    quick = size.steps <= QUICK.steps
    steps = TIMES_STEPS * size.steps
    data = load("fashion_mnist", size, 0)
    for network, make in NETWORKS.items():
        torch.manual_seed(0)
        net = make(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            took = times(net, data, min(steps, LATE))
        for name in [*SIDES, FIT_NAME]:
            label = f"{network}, {name}"
            if name in PACKAGES and installed(PACKAGES[name]) is None:
                rows.append(skipped(label, PACKAGES[name]))
                continue
            note = f"a step of plain training takes {took['ms']:.1f} ms"
            rows.append(Row(f"{label}: time of a step / of plain training", took[name], note=note))
            if name != FIT_NAME:
                early, late = (peak(name, net, data, before) for before in (EARLY, LATE))
                note = (
                    f"{early:.3g} copies of the network after {EARLY} steps, {late:.3g} after "
                    f"{LATE}"
                )
                what = f"{label}: memory after {LATE} steps / after {EARLY}"
                rows.append(Row(what, late / early, at_most=1.05, note=note))
            seeds = (0,) if quick or make is not mlp else (0, 1, 2)
            for seed in seeds:
                given = data if seed == 0 else load("fashion_mnist", size, seed)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    chosen = CHOSEN[IVSP_NAME if name == FIT_NAME else name]
                    found = learned(name, make, given, chosen, seed, steps)
                note = (
                    f"AUROC of the weights {found['auroc']:.3f}; y itself {found['own_error']:.3f}"
                )
                rows.append(Row(f"{label}: test error, seed {seed}", found["error"], note=note))
    return Section(f"Mini-batch reweighting, {len(data.noisy[0]):,} noisy samples", rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--samples", type=int, default=Size().most_samples)
    given = parser.parse_args(arguments)
    data = load("mnist", Size(most_samples=given.samples), 0, judge=True)
    for name, rates in itertools.chain(*([(n, r) for r in SEARCHED[n]] for n in given.side)):
        found = learned(name, mlp, data, rates, 0, given.steps)
        row = {"side": name, **rates._asdict(), **{k: round(v, 4) for k, v in found.items()}}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
