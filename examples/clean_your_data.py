"""Find wrong labels in your own data, by a few samples whose labels are right.

Run: python examples/clean_your_data.py [TRAIN TRUSTED [TEST]] [--label COLUMN] [--id COLUMN]

Each set is a folder with a folder of images for each class (cat/1.png, dog/2.png), or a CSV file
with a column of labels, numbers, and perhaps a column of names; by default the digits of
scikit-learn, 40 % of them with a wrong label. A weight for each training sample is learned on
mini-batches. suspects.csv has all samples, lowest weight first. Simple methods stand beside.
"""

from __future__ import annotations

import argparse
import csv
import logging
import math
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor

import lightning_bilevel as lb
from lightning_bilevel import TableRMS
from lightning_bilevel.modules.reweighting import missed_errors as missed

SIZE = (32, 32)  # of all images
Data = tuple[Tensor, list[str], list[str], list[str]]  # inputs, labels, names, columns of a CSV


def network(inputs: Tensor, classes: int) -> nn.Module:
    size = inputs[0].numel()
    return nn.Sequential(nn.Flatten(), nn.Linear(size, 128), nn.ReLU(), nn.Linear(128, classes))


def open_image(file: str) -> Tensor:
    with Image.open(file) as image:
        if image.mode[0] in "IF":
            sys.exit(f"{file} has more than 8 bits per value: scale all images to 8 bits first.")
        return pil_to_tensor(image.convert("RGB").resize(SIZE)).double()


def read(path: Path, label: str, name: str) -> Data:
    if path.is_dir():
        folder = ImageFolder(str(path), loader=open_image)
        labels = [folder.classes[number] for number in folder.targets]
        names = [Path(file).relative_to(path).as_posix() for file, _ in folder.samples]
        return torch.stack([image for image, _ in folder]), labels, names, []
    inputs, labels, names = [], [], []
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, skipinitialspace=True)
        if label not in (known := reader.fieldnames or []):
            sys.exit(f"{path} has no column {label!r}, see --label. It has {', '.join(known)}.")
        columns = sorted(set(known) - {label, name})
        for row in reader:
            line = f"line {reader.line_num}"
            try:
                inputs.append([float(row[column]) for column in columns])
            except (TypeError, ValueError):
                inputs.append([math.nan])
            if not all(map(math.isfinite, inputs[-1])):
                sys.exit(f"{path}, {line}: a feature is not a number (see --id for names): {row}")
            labels.append(str(row[label]))
            names.append(row.get(name) or line)
    return torch.tensor(inputs, dtype=torch.float64), labels, names, columns


def write_digits(folder: Path) -> Tensor:
    data = lb.DigitsCleaning(n_train=1000, n_validation=100, corruption=0.4, kind="pair")
    data.setup()
    sets = {"train": data.lower, "trusted": data.upper, "test": data.test}
    for name, (images, labels, *_) in sets.items():
        truth = data.clean_labels if name == "train" else labels
        names = [f"{i} is {digit}" for i, digit in enumerate(truth.tolist())]
        rows = zip(names, labels.tolist(), *images.flatten(1).T.tolist(), strict=True)
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["id", "label", *range(64)], *rows])
    return data.corrupted


def prepare(sets: list[Data]) -> list[tuple[Tensor, Tensor]]:
    """Inputs with mean 0 and variance 1 in each feature or colour, and the numbers of classes."""
    first, all_labels, _, all_columns = sets[0]
    classes = sorted(set(all_labels))
    dims = (0, 2, 3)[: first.ndim - 1]
    spread, mean = torch.std_mean(first, dims, correction=0, keepdim=True)
    data = []
    for inputs, labels, _, columns in sets:
        if columns != all_columns:
            sys.exit(f"All sets must have the same features: {all_columns} and {columns} differ.")
        if (found := sorted(set(labels))) != classes:
            sys.exit(f"All sets must have the same classes: {classes} and {found} differ.")
        scaled = (inputs - mean) / torch.where(spread > 0, spread, 1.0)
        data.append((scaled.float(), torch.tensor([classes.index(label) for label in labels])))
    if len(data) == 2:
        u, v = data.pop()
        if v.bincount().min() < 3:
            sys.exit("Without a test set a third of TRUSTED is held out: give three of each class.")
        order, third = v.argsort(), torch.arange(len(v)) % 3 == 2
        data += [(u[order[part]], v[order[part]]) for part in (~third, third)]
    return data


def train(x: Tensor, y: Tensor, mix: Tensor) -> nn.Module:
    """A fresh network, by Adam on -log (p mix)[label] with its probabilities p."""
    model = network(x, len(mix))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    for _ in range(max(300, 8 * len(y) // 64)):
        chosen = torch.randint(len(y), (min(64, len(y)),))
        optimizer.zero_grad()
        p = model(x[chosen]).softmax(1) @ mix
        nn.functional.nll_loss(p.clamp(min=1e-8).log(), y[chosen]).backward()
        optimizer.step()
    return model.requires_grad_(False).eval()


def learn_weights(x: Tensor, y: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """A weight for each training sample; with more passes the weights move less in each."""
    n, batch = len(y), min(64, max(len(y) // 4, 1))
    steps = max(800, 7 * n // batch)
    passes, weights = steps * batch / n, lb.SampleWeights(n)
    module = lb.Reweighting(
        network(x, int(y.max()) + 1),
        weights,
        upper_optimizer=partial(TableRMS, lr=10 / passes),
        lower_optimizer=partial(torch.optim.AdamW, lr=min(2e-5 * passes, 1e-3)),
    )
    upper = DataLoader(TensorDataset(u, v), min(batch, len(v)), shuffle=True, drop_last=True)
    lower = DataLoader(TensorDataset(x, y, torch.arange(n)), batch, shuffle=True, drop_last=True)
    trainer = Trainer(accelerator="cpu", max_steps=steps, max_epochs=-1, barebones=True)
    trainer.fit(module, {"upper": upper, "lower": lower})
    return weights.values()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sets", nargs="*", type=Path, help="TRAIN TRUSTED [TEST]")
    parser.add_argument("--label", default="label", help="the column of labels in a CSV file")
    parser.add_argument("--id", default="id", help="the column of names in a CSV file")
    given = parser.parse_args(arguments)
    if len(given.sets) not in (0, 2, 3):
        parser.error("name a training set, trusted samples, and perhaps a test set")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        corrupted = None if given.sets else write_digits(Path(folder))
        paths = given.sets or [Path(folder, f"{name}.csv") for name in ("train", "trusted", "test")]
        try:
            sets = [read(path, given.label, given.id) for path in paths]
        except OSError as error:
            sys.exit(f"A set cannot be read: {error}")
    (x, y), (u, v), (inputs, truth) = prepare(sets)
    eye = torch.eye(len(classes := sorted(set(sets[0][1]))))
    print(f"{len(y)} samples of {len(classes)} classes, {len(v)} trusted, {len(truth)} for tests")

    def retrain(kept: Tensor) -> nn.Module:
        return train(torch.cat([x[kept], u]), torch.cat([y[kept], v]), eye)

    model = train(u, v, eye)
    found = {"trusted samples alone": model, "all samples": retrain(y >= 0)}
    for _ in range(3):
        model = retrain(model(x).argmax(1) == y)
    found["self-training"] = model
    # Row c is what a network of the given labels says of class c. A trusted label stays as it is.
    p = train(x, y, eye)(u).softmax(1)
    mix = torch.stack([p[v == c].mean(0) for c in range(len(eye))])
    both = torch.cat([x, u]), torch.cat([y, v + len(eye)])
    found["gold loss correction"] = train(*both, torch.cat([mix, eye], 1))
    weights = learn_weights(x, y, u, v)
    found["learned weights"] = model = retrain(weights > 0.5)
    wrong = {name: net(inputs).argmax(1) != truth for name, net in found.items()}
    trust = {name: net(x).softmax(1).gather(1, y[:, None])[:, 0] for name, net in found.items()}
    trust["learned weights"] = weights
    for name in found:
        row = f"{name:22} test error {wrong[name].float().mean():.3f}"
        if corrupted is not None:
            row += f", wrong labels missed {missed(-trust[name], corrupted):.3f}"
        print(row)
    ours = wrong.pop("learned weights")
    best = min(wrong, key=lambda name: int(wrong[name].sum()))
    gain, noise = int(wrong[best].sum() - ours.sum()), math.sqrt((ours != wrong[best]).sum())
    verdict = "better" if gain > noise else "worse" if gain < -noise else "no better"
    print(f"Learned weights are {verdict} than {best}, the best simple method here.")
    predicted = [classes[number] for number in model(x).argmax(1)]
    rows = zip([f"{w:.4f}" for w in weights], sets[0][2], sets[0][1], predicted, strict=True)
    with Path("suspects.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["weight", "id", "label", "predicted"], *sorted(rows)])


if __name__ == "__main__":
    main()
