"""Fabric: the module that a Trainer would take, in a loop of one's own, with a checkpoint.

Fabric brings device and checkpoints. A bilevel module gives f and g on a batch, here all data, and
a step of the solver takes the problem as its closure. This is for one process: over several, and
for mini-batches, use a Trainer.

Run: python examples/fabric.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
from matplotlib.figure import Figure
from torch import nn

from lightning_bilevel import IVSP, DigitsCleaning, HyperCleaning
from lightning_bilevel.modules.reweighting import detection


def noisy_digits() -> DigitsCleaning:
    """100 trusted digits, and 1,000 of which 60 % have the label of the next class."""
    data = DigitsCleaning(n_train=1000, n_validation=100, corruption=0.6, kind="pair")
    data.prepare_data()
    data.setup("fit")
    return data


def prepared(fabric: Fabric) -> tuple[HyperCleaning, Any]:
    """A network under weights of the samples, and its solver."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    module = HyperCleaning(1000, classifier=network, upper_unit=30.0, solver=IVSP)
    return fabric.to_device(module), fabric.setup_optimizers(IVSP(module.parameter_groups()))


def train(fabric: Fabric, module: HyperCleaning, solver: Any, batch: Any, steps: int) -> None:
    problem = module.bilevel_problem(batch)
    for step in range(steps):
        info = solver.step(lambda: problem)
        if step % 50 == 49:
            fabric.print(f"step {info.iteration}: f {info.upper:.3f}, g {info.lower:.3f}")


def main(short: bool = False, out: Path = Path("fabric.png")) -> float:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(0)
    data = noisy_digits()
    batch = fabric.to_device({"upper": data.upper, "lower": data.lower})
    steps = 50 if short else 150
    module, solver = prepared(fabric)
    train(fabric, module, solver, batch, steps)
    saved = out.with_suffix(".ckpt")
    fabric.save(saved, {"module": module, "solver": solver})

    # Another day, a new module and a new solver go on from there.
    module, solver = prepared(fabric)
    fabric.load(saved, {"module": module, "solver": solver})
    train(fabric, module, solver, batch, steps)
    assert data.corrupted is not None
    found = detection(-module.logits.detach(), data.corrupted)["auroc"]
    fabric.print(f"AUROC of the weights: {found:.3f}")
    figure = Figure(figsize=(5.0, 3.0), layout="constrained")
    axis = figure.subplots()
    axis.hist(module.weights.values().tolist(), bins=50, range=(0.0, 1.0))
    axis.set(xlabel="weight", ylabel="samples")
    figure.savefig(out, dpi=160)
    return found


if __name__ == "__main__":
    main(short="--short" in sys.argv)
