r"""Draw the weights of clean and of corrupted samples, and retrain without the suspicious ones.

Run: python examples/cleaning_figure.py configs/digits/ivsp.yaml --budget 2s --out weights.png
     python examples/cleaning_figure.py configs/mnist/ivsp_cleaning.yaml \
         --budget 60s --out weights.png
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_bilevel import HyperCleaning, OptimizationBudget
from lightning_bilevel.cli.app import BilevelCLI
from lightning_bilevel.data import CleaningData


def retrain(classifier: nn.Module, images: Tensor, labels: Tensor) -> nn.Module:
    """Train a copy from scratch with 300 steps of full-batch Adam."""
    fresh = copy.deepcopy(classifier)
    for layer in fresh.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    optimizer = torch.optim.Adam(fresh.parameters(), lr=0.01, weight_decay=1e-4)
    for _ in range(300):
        optimizer.zero_grad()
        cross_entropy(fresh(images), labels).backward()
        optimizer.step()
    return fresh


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("--budget", default="2s")
    parser.add_argument("--out", type=Path, default=Path("weights.png"))
    given = parser.parse_args()
    options = [
        "max_epochs=-1",
        "logger=false",
        "enable_checkpointing=false",
        "enable_model_summary=false",
    ]
    cli = BilevelCLI(
        ["--config", given.config, *(f"--trainer.{option}" for option in options)], run=False
    )
    module, data = cli.model, cli.datamodule
    assert isinstance(module, HyperCleaning)
    assert isinstance(data, CleaningData)
    cli.trainer.callbacks.append(OptimizationBudget(given.budget))
    cli.trainer.fit(module, datamodule=data)

    weights = module.logits.detach().sigmoid()
    corrupted = data.corrupted
    assert corrupted is not None
    whole = Figure(figsize=(9.5, 3), layout="constrained")
    figure, samples = whole.subfigures(1, 2, width_ratios=(1, 1.15))
    axis = figure.subplots()
    bins = torch.linspace(float(weights.min()), float(weights.max()), 41).tolist()
    axis.hist(weights[~corrupted].tolist(), bins, alpha=0.7, color="#0072B2", label="clean label")
    axis.hist(weights[corrupted].tolist(), bins, alpha=0.7, color="#D55E00", label="wrong label")
    axis.set_xlabel("weight")
    axis.set_ylabel("training samples")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    images, labels, _ = data.lower
    worst = module.suspicious(24)
    with torch.no_grad():
        predicted = module(images[worst]).argmax(1).tolist()
    samples.suptitle("lowest weights: given label → predicted label", fontsize=9)
    for axis, i, guess in zip(samples.subplots(3, 8).flat, worst.tolist(), predicted, strict=True):
        axis.imshow(images[i, 0].numpy(), cmap="gray_r")
        axis.set_title(f"{int(labels[i])} → {guess}", fontsize=8, pad=2)
        axis.set_axis_off()
    whole.savefig(given.out, dpi=160)

    kept = weights > 0.25  # weights start at 0.5
    clean_images, clean_labels = data.upper
    wrong = float(corrupted[~kept].float().mean())
    print(
        f"{int((~kept).sum())} samples have lost more than half of their weight, {wrong:.1%} of "
        "them are wrong."
    )
    sets = {
        "all noisy data": (images, labels),
        "the validation set alone": (clean_images, clean_labels),
        "kept samples and validation set": (
            torch.cat([images[kept], clean_images]),
            torch.cat([labels[kept], clean_labels]),
        ),
    }
    for name, (some_images, some_labels) in sets.items():
        torch.manual_seed(0)
        classifier = retrain(module.classifier, some_images, some_labels)
        error = float((classifier(data.test[0]).argmax(1) != data.test[1]).float().mean())
        print(f"test error after retraining on {name}: {error:.4f}")


if __name__ == "__main__":
    main()
