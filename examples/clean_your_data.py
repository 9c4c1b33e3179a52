"""Clean your own image folder: find wrong labels, and train a classifier on the other samples.

This example makes a folder of scikit-learn's digits, with half of the training labels wrong; use
your own folder instead.

Run: python examples/clean_your_data.py
"""

from __future__ import annotations

import csv
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import to_pil_image, to_tensor

from lightning_bilevel import (
    IVSP,
    BilevelProgressBar,
    CertificateReport,
    CleaningData,
    DigitsCleaning,
    HyperCleaning,
)
from lightning_bilevel.modules.retraining import retrain


def make_folder(root: Path) -> None:
    digits = DigitsCleaning()
    digits.setup()
    for name, batch in (
        ("train", digits.lower),
        ("validation", digits.upper),
        ("test", digits.test),
    ):
        for i, (image, label) in enumerate(zip(batch[0], batch[1].tolist(), strict=True)):
            folder = root / name / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            to_pil_image(image).save(folder / f"{i:04d}.png")


def read(folder: Path) -> ImageFolder:
    return ImageFolder(str(folder), transform=lambda image: to_tensor(image.convert("L")))


def main(short: bool = False, out: Path = Path("suspicious.csv")) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder))
        train, validation, test = (
            read(Path(folder) / name) for name in ("train", "validation", "test")
        )
        data = CleaningData.from_datasets(train, validation, test, epoch_length=50)
        paths = [Path(path).relative_to(folder) for path, _ in train.samples]
    torch.manual_seed(0)
    solver = partial(
        IVSP,
        mu0=0.02,
        block=20,
        gamma0=10.0,
        zeta_bar=9.0,
        rho=0.05,
        sigma=1.0,
        L_init=1.0,
        L_xy=1.0,
        L_yy=1.0,
    )
    module = HyperCleaning(n_train=len(train), inputs=64, upper_unit=100.0, solver=solver)
    watching = {
        "callbacks": [BilevelProgressBar(), CertificateReport()],
        "logger": False,
        "enable_checkpointing": False,
    }
    Trainer(accelerator="cpu", max_epochs=4 if short else 8, **watching).fit(
        module, datamodule=data
    )

    images, labels, _ = data.lower
    module.suspicious_figure(images, labels).savefig(out.with_suffix(".png"), dpi=160)
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "given_label", "predicted_label", "weight"])
        predicted = module(images).argmax(1)
        for i in module.suspicious(len(images)).tolist():
            writer.writerow(
                [paths[i], int(labels[i]), int(predicted[i]), f"{float(module.weights[i]):.3g}"]
            )
    kept = module.weights > 0.25  # weights start at 0.5
    clean = data.upper
    sets = {
        "all noisy labels": (images, labels),
        "the clean validation set alone": clean,
        "kept samples and validation set": (
            torch.cat([images[kept], clean[0]]),
            torch.cat([labels[kept], clean[1]]),
        ),
    }
    errors = {}
    for name, (some_images, some_labels) in sets.items():
        torch.manual_seed(0)
        classifier = retrain(module.classifier, some_images, some_labels)
        errors[name] = float((classifier(data.test[0]).argmax(1) != data.test[1]).float().mean())
        print(f"test error after training on {name}: {errors[name]:.3f}")
    print(
        f"{int((~kept).sum())} of {len(kept)} samples lost more than half of their weight; all are "
        f"in {out}, worst first."
    )
    return errors


if __name__ == "__main__":
    main(short="--short" in sys.argv)
