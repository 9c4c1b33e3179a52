"""Mini-batch reweighting against betty and BOAT: what is learned. `step_cost` has time and memory.

FashionMNIST, 60 % of the noisy labels flipped to the next class, batches of 256 at both levels,
Adam for the network, an MLP and a small CNN. The weights decide which samples are kept: those of
weight above 1/2. A fresh network is trained on these and on the trusted ones, and its test error
counts. The rates were chosen on MNIST, where held-out clean samples take the place of the test set.

Run: python -m benchmarks mini_batches
     python -m benchmarks.mini_batches [--side ...]      (the search for rates, on MNIST)
"""

from __future__ import annotations

import argparse
import itertools
import json
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import tasks
from benchmarks.baselines.cleaning import TrustedSamples, error
from benchmarks.results import Row, Section, installed, skipped
from benchmarks.reweighting import (
    BETTY_NAME,
    BOAT_NAME,
    F2SA_NAME,
    IVSP_NAME,
    METHODS,
    NETWORKS,
    PACKAGES,
    RIVALS,
    Data,
    Rates,
    mlp,
    trained,
)
from benchmarks.tasks import QUICK, Size
from lightning_bilevel.modules.reweighting import detection

# For each of a size's steps, a run has so many.
TIMES_STEPS = 80
SIDES = (*METHODS, *RIVALS)
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
    network, logits = trained(name, make(data), data, rates, seed, steps)
    kept = logits > 0
    torch.manual_seed(seed)
    again = TrustedSamples(*data.noisy, *data.trusted, partial(make, data)).retrain(kept)
    return {
        "error": error(again, *data.test),
        "own_error": error(network, *data.test),
        "auroc": detection(-logits, data.corrupted)["auroc"],
        "kept": float(kept.float().mean()),
    }


def run(size: Size) -> Section:
    rows = []
    quick = size.steps <= QUICK.steps
    steps = TIMES_STEPS * size.steps
    data = load("fashion_mnist", size, 0)
    for (network, make), name in itertools.product(NETWORKS.items(), SIDES):
        label = f"{network}, {name}"
        if name in PACKAGES and installed(PACKAGES[name]) is None:
            rows.append(skipped(label, PACKAGES[name]))
            continue
        for seed in (0,) if quick or make is not mlp else (0, 1, 2):
            given = data if seed == 0 else load("fashion_mnist", size, seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = learned(name, make, given, CHOSEN[name], seed, steps)
            note = f"AUROC of the weights {found['auroc']:.3f}; y itself {found['own_error']:.3f}"
            rows.append(Row(f"{label}: test error, seed {seed}", found["error"], note=note))
    return Section(f"Mini-batch reweighting, {len(data.noisy[0]):,} noisy samples", rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", nargs="+", choices=SIDES, default=SIDES)
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
