"""Somebody's own data: a training set to be cleaned, trusted samples, and perhaps a test set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bilevel.data.features import read_features
from lightning_bilevel.data.folders import Labelled, read_folder
from lightning_bilevel.data.samples import Samples, common_images

__all__ = ["OwnData", "read_own"]

_TABLES = (".csv", ".tsv", ".txt")


class OwnData(NamedTuple):
    """Three sets with the same classes and inputs of the same shape.

    Attributes:
        train: Inputs as float32 and labels as numbers. Images are (N, C, H, W) from 0 to 1.
            Features are (N, d), each with mean 0 and variance 1 over the training samples.
        trusted: The trusted samples, in the same units.
        test: The test samples, if there are any.
        classes: The words of the labels, by number.
        ids: The name of each training sample.
        are_images: Whether the inputs are images.
    """

    train: Samples
    trusted: Samples
    test: Samples | None
    classes: list[str]
    ids: list[str]
    are_images: bool

    @property
    def unseen(self) -> list[str]:
        """The classes that no trusted sample has."""
        counts = torch.bincount(self.trusted[1], minlength=len(self.classes))
        return [word for word, count in zip(self.classes, counts, strict=True) if not count]


def read_own(
    train: Path,
    trusted: Path,
    test: Path | None = None,
    *,
    label: str | None = None,
    id_column: str | None = None,
    size: int | None = None,
) -> OwnData:
    """Read folders of images or CSV files of features; refuse what does not fit together.

    Args:
        train: The training set: a folder with one folder of images per class, or a CSV file.
        trusted: The trusted samples, in the same form.
        test: The test samples, in the same form.
        label: The column of the labels in a CSV file; None is ``label``.
        id_column: The column that names a sample of the CSV file, see
            :func:`~lightning_bilevel.data.features.read_features`.
        size: Resize all images to so many pixels in height and width.
    """
    paths = {"train": train, "trusted": trusted}
    if test is not None:
        paths["test"] = test
    are_images = _kind(paths, label, id_column, size)
    sets: dict[str, Labelled] = {}
    for name, path in paths.items():
        if are_images:
            sets[name] = read_folder(_option(name, path), path, size)
        else:
            named = name == "train"
            sets[name] = read_features(
                _option(name, path), path, label or "label", id_column, named
            )
    options = {name: _option(name, path) for name, path in paths.items()}
    inputs = _images(options, sets) if are_images else _features(options, sets)
    _check_apart(options, sets, inputs)
    classes, labels = _numbered(options, sets)
    samples = {name: (_scaled(inputs, name), labels[name]) for name in sets}
    return OwnData(
        samples["train"],
        samples["trusted"],
        samples.get("test"),
        classes,
        sets["train"].ids,
        are_images,
    )


def _option(name: str, path: Path) -> str:
    return f"clean --{name} {path}"


def _kind(
    paths: dict[str, Path], label: str | None, id_column: str | None, size: int | None
) -> bool:
    """Return whether the data are images."""
    folders = {}
    for name, path in paths.items():
        if not path.exists():
            raise ValueError(
                f"`{_option(name, path)}`: there is no such file or folder. Name a folder with one "
                "folder of images per class, or a CSV file."
            )
        folders[name] = path.is_dir()
        if not path.is_dir() and path.suffix.lower() not in _TABLES:
            raise ValueError(
                f"`{_option(name, path)}` is neither a folder of images nor a CSV file: the name "
                f"of a CSV file must end in {', '.join(_TABLES)}."
            )
    for name, folder in folders.items():
        if folder != folders["train"]:
            words = ("a CSV file", "a folder of images")
            raise ValueError(
                f"`{_option(name, paths[name])}` is {words[folder]} and "
                f"`{_option('train', paths['train'])}` {words[not folder]}: all sets must have the "
                "same form."
            )
    wrong: dict[str, object] = {"label": label, "id": id_column}
    form = "a CSV file; the label of an image is the name of its folder, its id the path"
    if not folders["train"]:
        wrong = {"size": size}
        form = "images"
    for option, value in wrong.items():
        if value is not None:
            raise ValueError(f"`clean --{option} {value}` is for {form}: leave it out.")
    if size is not None and size < 1:
        raise ValueError(f"`clean --size {size}` must be at least 1: it is a number of pixels.")
    return folders["train"]


def _images(options: dict[str, str], sets: dict[str, Labelled]) -> dict[str, Tensor]:
    channels = max(samples.inputs.shape[1] for samples in sets.values())
    shape = sets["train"].inputs.shape[2:]
    for name, samples in sets.items():
        if samples.inputs.shape[2:] != shape:
            raise ValueError(
                f"`{options[name]}` has images of {_pixels(samples.inputs)} pixels and "
                f"`{options['train']}` of {_pixels(sets['train'].inputs)}: all must have the same "
                "size. `--size 32` resizes all of them to 32x32."
            )
    return {name: part.inputs.expand(-1, channels, -1, -1) for name, part in sets.items()}


def _features(options: dict[str, str], sets: dict[str, Labelled]) -> dict[str, Tensor]:
    """Return the features of all sets in the order of the training set."""
    columns = sets["train"].columns
    ordered = {}
    for name, samples in sets.items():
        missing = [column for column in columns if column not in samples.columns]
        more = [column for column in samples.columns if column not in columns]
        if missing or more:
            what = "lacks" if missing else "has"
            raise ValueError(
                f"`{options[name]}` {what} the column {(missing or more)[0]!r}, unlike "
                f"`{options['train']}`: the features of all sets must agree."
            )
        order = [samples.columns.index(column) for column in columns]
        ordered[name] = samples.inputs[:, order]
    return ordered


def _check_apart(
    options: dict[str, str], sets: dict[str, Labelled], inputs: dict[str, Tensor]
) -> None:
    what = "rows" if sets["train"].columns else "images"
    for name, other in (("trusted", "train"), ("test", "train"), ("test", "trusted")):
        if name not in sets:
            continue
        common = common_images(inputs[other], inputs[name])
        if common:
            ids = sets[other].ids
            listed = ", ".join(dict.fromkeys(ids[i] for i, _ in common[:5]))
            more = ", ..." if len(common) > 5 else ""
            advice = (
                "a trusted sample needs no cleaning, so leave it out of the training set"
                if name == "trusted"
                else "an error on samples that were learned from says nothing, so leave them out "
                "of one of the two"
            )
            raise ValueError(
                f"`{options[name]}` has {len(common)} of the {what} of `{options[other]}` "
                f"({listed}{more}): {advice}."
            )


def _numbered(
    options: dict[str, str], sets: dict[str, Labelled]
) -> tuple[list[str], dict[str, Tensor]]:
    """Return the classes, which are the labels of the training set, and the labels by number."""
    classes = _sorted(set(sets["train"].labels))
    if len(classes) < 2:
        raise ValueError(
            f"`{options['train']}` has one class only, {classes[0]!r}: there must be at least two."
        )
    numbers = {word: number for number, word in enumerate(classes)}
    for name, samples in sets.items():
        for word, sample in zip(samples.labels, samples.ids, strict=True):
            if word not in numbers:
                raise ValueError(
                    f"`{options[name]}` has the label {word!r} (sample {sample}), which no "
                    f"training sample has: the classes are {_listed(classes)}."
                )
    count = len(sets["trusted"].labels)
    if count < len(classes):
        raise ValueError(
            f"`{options['trusted']}` has {count} samples for {len(classes)} classes: there must "
            "be at least as many trusted samples as classes, better ten of each."
        )
    return classes, {
        name: torch.tensor([numbers[word] for word in samples.labels])
        for name, samples in sets.items()
    }


def _scaled(inputs: dict[str, Tensor], name: str) -> Tensor:
    if inputs["train"].dtype == torch.uint8:
        return inputs[name].float() / 255
    mean = inputs["train"].mean(0)
    spread = inputs["train"].std(0, correction=0)
    # A feature that is always the same stays 0.
    return ((inputs[name] - mean) / torch.where(spread > 0, spread, 1.0)).float()


def _sorted(words: set[str]) -> list[str]:
    """Sort numbers as numbers, other words as words."""
    try:
        return sorted(words, key=float)
    except ValueError:
        return sorted(words)


def _listed(words: Sequence[str]) -> str:
    shown = ", ".join(words[:10])
    return f"{shown}, ..." if len(words) > 10 else shown


def _pixels(images: Tensor) -> str:
    height, width = images.shape[2:]
    return f"{width}x{height}"
