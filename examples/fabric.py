"""Fabric: the module that a Trainer would take, in a loop of one's own, with a checkpoint.

Fabric brings device, loaders and checkpoints. A bilevel module gives f and g on a batch, and a step
of the solver takes the problem as its closure. This is for one process: over several, use a
Trainer, which shares the sums.

Run: python examples/fabric.py
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from lightning_bilevel import F2SA, DigitsCleaning, Reweighting, SampleWeights, TableRMS
from lightning_bilevel.modules.detection import detection

BATCH = 64


def noisy_digits() -> DigitsCleaning:
    """100 trusted digits, and 1,000 of which 60 % have the label of the next class."""
    data = DigitsCleaning(n_train=1000, n_validation=100, corruption=0.6, kind="pair")
    data.prepare_data()
    data.setup("fit")
    return data


def prepared(fabric: Fabric) -> tuple[Reweighting, Any]:
    """A network under weights of the samples, and its solver."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    module = fabric.to_device(Reweighting(network, SampleWeights(1000)))
    solver = F2SA(
        module.parameter_groups(),
        upper_optimizer=partial(TableRMS, lr=3.0),
        lower_optimizer=partial(torch.optim.AdamW, lr=1e-3),
    )
    return module, fabric.setup_optimizers(solver)


def train(fabric: Fabric, module: Reweighting, solver: Any, loaders: Any, steps: int) -> None:
    """Make one step for each pair of batches, in as many epochs as it takes."""
    done = 0
    while done < steps:
        for upper, lower in zip(*loaders, strict=True):
            problem = module.bilevel_problem({"upper": upper, "lower": lower})
            problem.mini_batch = True
            problem.touched = lower[2].sort().values  # only the weights of these samples move
            info = solver.step(lambda made=problem: made)
            done += 1
        fabric.print(f"step {done}: f {info.upper:.3f}, g {info.lower:.3f}, gap {info.gap:.4f}")


def main(short: bool = False, out: Path = Path("fabric.png")) -> float:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(0)
    data = noisy_digits()
    trusted, noisy = TensorDataset(*data.upper[:2]), TensorDataset(*data.lower)
    # As many batches of both: trusted samples are drawn again and again.
    again = RandomSampler(trusted, replacement=True, num_samples=len(noisy))
    loaders = fabric.setup_dataloaders(
        DataLoader(trusted, BATCH, sampler=again), DataLoader(noisy, BATCH, shuffle=True)
    )
    steps = 80 if short else 208
    module, solver = prepared(fabric)
    train(fabric, module, solver, loaders, steps)
    saved = out.with_suffix(".ckpt")
    fabric.save(saved, {"module": module, "solver": solver})

    # Another day, a new module and a new solver go on from there.
    module, solver = prepared(fabric)
    fabric.load(saved, {"module": module, "solver": solver})
    train(fabric, module, solver, loaders, steps)
    weights: Any = module.weights
    assert data.corrupted is not None
    found = detection(-weights.logits.detach(), data.corrupted)["auroc"]
    fabric.print(f"AUROC of the weights: {found:.3f}")
    weights.figure().savefig(out, dpi=160)
    return found


if __name__ == "__main__":
    main(short="--short" in sys.argv)
