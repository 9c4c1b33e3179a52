"""``lightning-bilevel clean``: find wrong labels in your own data by a few trusted samples."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from lightning_bilevel.baselines.trusted import TrustedSamples
from lightning_bilevel.cli import clean_report
from lightning_bilevel.cli.clean_network import network_for
from lightning_bilevel.cli.clean_report import Suspects
from lightning_bilevel.cli.clean_rows import Cleaned, Methods, Recommendation, recommend
from lightning_bilevel.cli.clean_weights import plan_for
from lightning_bilevel.data.own import OwnData, read_own

__all__ = ["clean", "main"]


def clean(
    train: Path,
    trusted: Path,
    test: Path | None = None,
    out: Path = Path("suspicious.csv"),
    *,
    model: str | None = None,
    label: str | None = None,
    id_column: str | None = None,
    size: int | None = None,
    steps: int | None = None,
    seed: int = 0,
) -> Recommendation:
    """Rank the training samples by how doubtful their labels are, and say what to learn from.

    Args:
        train: The training set: a folder with one folder of images per class, or a CSV file.
        trusted: Samples whose labels are right, in the same form.
        test: Further samples with right labels; None measures errors by cross-validation over the
            trusted samples.
        out: The CSV file to write; a contact sheet of images is beside it, with the ending .png.
        model: The class path of the network, see
            :func:`~lightning_bilevel.cli.clean_network.network_for`.
        label: The column of the labels in a CSV file; None is ``label``.
        id_column: The column that names a sample of a CSV file; None is ``id``, or the row.
        size: Resize all images to so many pixels in height and width.
        steps: The mini-batches on which the weights are learned; None follows from the data.
        seed: Decides the start of each network and the order of the samples.
    """
    _check_out(out, [train, trusted, test])
    if steps is not None and steps < 1:
        raise ValueError(f"`clean --steps {steps}` must be at least 1.")
    _say(f"Reading {train} and {trusted} ...")
    data = read_own(train, trusted, test, label=label, id_column=id_column, size=size)
    _say(_counts(data))
    # Random numbers of the caller are neither used nor changed.
    with torch.random.fork_rng(devices=[]):
        rows, wrong, weights = _run(data, model, steps, seed)
    found = recommend(wrong)
    suspects = Suspects.of(data, rows[found.name], weights)
    written = clean_report.write(out, data, suspects)
    on = f"{len(data.test[1]):,} test samples" if data.test else "trusted samples held out"
    print(clean_report.errors(rows, wrong, found.name, on), end="\n\n")
    print(clean_report.advice(found, out), end="\n\n")
    if not data.are_images:
        print(clean_report.top_rows(suspects), end="\n\n")
    doubtful = int((~rows[found.name].kept).sum())
    names = " and ".join(map(str, written))
    print(
        f"{doubtful:,} of {len(data.ids):,} labels are in doubt. Written, most suspicious first: "
        f"{names}."
    )
    return found


def _run(
    data: OwnData, model: str | None, steps: int | None, seed: int
) -> tuple[dict[str, Cleaned], dict[str, Tensor], Tensor]:
    """Return what each method says, which samples it gets wrong, and the learned weights."""
    network = network_for(data.train[0], len(data.classes), model)
    samples = TrustedSamples(*data.train, *data.trusted, network)
    plan = plan_for(len(data.ids), steps)
    name = model or type(network()).__name__
    again = "" if data.test else ", and again for each of four parts of the trusted samples"
    size = f"{plan.steps:,} steps of {plan.batch_size}"
    _say(f"Learning a weight for each sample: {name}, {size}{again}.")
    layout = "{l_bar}{bar}| {elapsed} gone, {remaining} left"
    with tqdm(bar_format=layout, mininterval=0.5) as bar:
        methods = Methods(plan, seed, bar.update)
        bar.total = methods.cost(samples, folds=data.test is None)
        bar.set_description("all samples")
        rows = methods.run(samples, data.test)
        weights = methods.weights
        assert weights is not None
        if data.test is None:
            bar.set_description("cross-validation")
            wrong = methods.cross_validated(samples)
        else:
            wrong = {name: row.wrong for name, row in rows.items() if row.wrong is not None}
        # What a training costs is an estimate.
        bar.update(bar.total - bar.n)
    return rows, wrong, weights


def _check_out(out: Path, inputs: Sequence[Path | None]) -> None:
    if out.suffix.lower() != ".csv":
        raise ValueError(
            f"`clean --out {out}` must end in .csv: it is a table, and for images a picture of the "
            "same name that ends in .png is beside it."
        )
    if not out.parent.is_dir():
        raise ValueError(
            f"`clean --out {out}`: there is no folder {out.parent}; make it first, or name another."
        )
    if out.is_dir():
        raise ValueError(f"`clean --out {out}` is a folder: name a file in it.")
    if not os.access(out.parent, os.W_OK):
        raise ValueError(
            f"`clean --out {out}` cannot be written: choose another folder, or allow writing to it."
        )
    if out.resolve() in [path.resolve() for path in inputs if path is not None]:
        raise ValueError(
            f"`clean --out {out}` would overwrite your data: name another file for the result."
        )


def _counts(data: OwnData) -> str:
    inputs = data.train[0]
    if data.are_images:
        height, width = inputs.shape[2:]
        kind = "colour" if inputs.shape[1] == 3 else "grey"
        what = f"{kind} images of {width}x{height} pixels"
    else:
        what = f"rows of {inputs.shape[1]} features"
    text = (
        f"{len(inputs):,} training samples ({what}) in {len(data.classes)} classes, "
        f"{len(data.trusted[1]):,} trusted samples"
    )
    text += f", {len(data.test[1]):,} test samples." if data.test else "."
    if data.unseen:
        words = ", ".join(data.unseen)
        text += (
            f"\nNo trusted sample is of class {words}: nothing vouches for its labels, and its "
            "samples will look suspicious. Better add some."
        )
    return text


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(args: Sequence[str] | None = None) -> None:
    """Run ``lightning-bilevel clean``."""
    given = parser().parse_args(args)
    clean(**vars(given))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command; its names are the arguments of :func:`clean`."""
    made = argparse.ArgumentParser(
        "lightning-bilevel clean",
        description="Find wrong labels in a training set by a few samples whose labels are "
        "right. Learns a weight for each training sample, compares with simpler ways to learn from "
        "such data, recommends one of them, and lists the samples, the most suspicious first. "
        "Works offline, on the CPU.",
        epilog="Data are a folder with one folder of images per class (cats/1.png, dogs/2.png), or "
        "a CSV file with one row of numbers and a label for each sample.",
    )
    made.add_argument(
        "--train", type=Path, required=True, metavar="DATA", help="the samples to be cleaned"
    )
    made.add_argument(
        "--trusted",
        type=Path,
        required=True,
        metavar="DATA",
        help="other samples, whose labels are right; ten of each class or more",
    )
    made.add_argument(
        "--test",
        type=Path,
        metavar="DATA",
        help="further samples with right labels, to measure errors (default: cross-validation over "
        "the trusted samples, which takes five times as long)",
    )
    made.add_argument(
        "--out",
        type=Path,
        default=Path("suspicious.csv"),
        metavar="FILE",
        help="the table to write (default: suspicious.csv; for images also suspicious.png)",
    )
    made.add_argument(
        "--model",
        metavar="CLASS_PATH",
        help="the network, such as my_file.MyNetwork; it is made with those of the arguments "
        "inputs, channels, classes and num_classes that it has (default: an MLP, or a small "
        "convolutional network for images of more than 16x16 pixels)",
    )
    made.add_argument(
        "--label", metavar="COLUMN", help="the column of the labels in a CSV file (default: label)"
    )
    made.add_argument(
        "--id",
        dest="id_column",
        metavar="COLUMN",
        help="the column that names a sample of a CSV file (default: id, or the number of the row)",
    )
    made.add_argument(
        "--size", type=int, metavar="PIXELS", help="resize all images to this height and width"
    )
    made.add_argument(
        "--steps",
        type=int,
        help="mini-batches to learn the weights on (default: seven passes, at least 1,600 steps)",
    )
    made.add_argument("--seed", type=int, default=0, help="decides all random numbers (default: 0)")
    return made
