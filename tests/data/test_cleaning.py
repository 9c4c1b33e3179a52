"""The data of hyper-cleaning: splits, wrong labels, the user's own data, and bad input."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule
from running import trainer
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

from lightning_bilevel import BilevelMixin
from lightning_bilevel.core.chunks import as_chunks
from lightning_bilevel.data.cleaning import (
    CleaningData,
    DatasetCleaning,
    DigitsCleaning,
    Splits,
    corrupt_labels,
)
from lightning_bilevel.data.downloads import FashionMNISTCleaning, MNISTCleaning
from lightning_bilevel.data.samples import draw

REAL = Path(os.environ.get("LIGHTNING_BILEVEL_DATA") or "no data")


def numbered(n: int, start: int = 0, size: int = 4) -> Tensor:
    """Images that are all different: bytes, with the image's number in the first two pixels."""
    images = torch.randint(0, 256, (n, size, size), dtype=torch.uint8)
    number = torch.arange(start, start + n)
    images[:, 0, 0], images[:, 0, 1] = number // 256, number % 256
    return images


def numbers(images: Tensor) -> list[int]:
    pixels = (images[:, 0, 0, :2] * 255).round().long()
    return (256 * pixels[:, 0] + pixels[:, 1]).tolist()


class Tiny(CleaningData):
    """400 numbered images of 5 classes, label = number mod 5, the last 100 of them for the test."""

    classes = 5

    def __init__(self, n_train: int = 200, n_validation: int = 100, **options: Any) -> None:
        super().__init__(n_train=n_train, n_validation=n_validation, **options)

    def load(self, generator: torch.Generator) -> Splits:
        images, labels = numbered(400), torch.arange(400) % 5
        sizes = {"n_train": self.n_train, "n_validation": self.n_validation, "n_test": self.n_test}
        return Splits(*draw("Tiny", (images, labels), sizes, generator))


def tiny(**options: Any) -> Tiny:
    data = Tiny(**options)
    data.setup()
    return data


def pairs(n: int, start: int = 0, classes: int = 3) -> TensorDataset:
    return TensorDataset(numbered(n, start), torch.arange(n) % classes)


# Corruption


def corrupted(
    rate: float, kind: Any = "uniform", seed: int = 0, n: int = 1001, classes: int = 7
) -> tuple[Tensor, ...]:
    labels = torch.arange(n) % classes
    return labels, *corrupt_labels(
        labels, classes, rate, kind, generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize("kind", ["uniform", "pair"])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.999, 1.0])
def test_exactly_the_asked_share_is_wrong(rate: float, kind: Any) -> None:
    labels, noisy, mask = corrupted(rate, kind)
    assert int(mask.sum()) == round(rate * len(labels))
    assert torch.equal(noisy != labels, mask)
    assert noisy.dtype == torch.int64
    assert 0 <= int(noisy.min()) <= int(noisy.max()) <= 6


def test_uniform_hits_all_other_classes_alike() -> None:
    labels, noisy, mask = corrupted(1.0, n=7 * 3000)
    counts = torch.zeros(7, 7).index_put_((labels, noisy), torch.ones(len(labels)), accumulate=True)
    assert mask.all()
    assert (counts.diagonal() == 0).all()
    # 500 expected in each, with a deviation of about 20.
    others = counts[~torch.eye(7, dtype=torch.bool)]
    assert 400 < float(others.min()) <= float(others.max()) < 600


def test_pair_turns_a_label_into_the_next_class() -> None:
    labels, noisy, mask = corrupted(0.5, "pair")
    assert torch.equal(noisy[mask], (labels[mask] + 1) % 7)


@pytest.mark.parametrize("kind", ["uniform", "pair"])
def test_a_higher_rate_corrupts_the_same_labels_and_more(kind: Any) -> None:
    (_, few, some), (_, many, more) = corrupted(0.2, kind), corrupted(0.7, kind)
    assert (more | ~some).all()
    assert torch.equal(few[some], many[some])


@pytest.mark.parametrize(
    "given", [{"rate": 1.5}, {"rate": float("nan")}, {"rate": 0.5, "classes": 1}]
)
def test_corruption_refuses_what_makes_no_sense(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="needs two classes, a share from 0 to 1, and 'uniform'"):
        corrupted(**given)


# The batches


def test_batches_are_what_a_module_is_promised() -> None:
    data = tiny(n_test=50)
    images, noisy, index = data.lower
    assert images.shape == (200, 1, 4, 4)
    assert images.dtype == torch.float32
    assert 0.0 <= float(images.min()) < float(images.max()) <= 1.0
    assert torch.equal(index, torch.arange(200))
    assert data.corrupted is not None
    assert data.clean_labels is not None
    # Labels stay with their images.
    assert torch.equal(data.clean_labels, torch.tensor(numbers(images)) % 5)
    assert torch.equal(noisy != data.clean_labels, data.corrupted)
    assert int(data.corrupted.sum()) == 100
    for images, labels in (data.upper, data.test):
        assert torch.equal(labels, torch.tensor(numbers(images)) % 5)  # and are clean
    assert (data.n_train, data.classes, data.image_shape) == (200, 5, (1, 4, 4))
    assert len(data.upper[1]) == 100
    assert len(data.test[1]) == 50


def test_sets_are_disjoint_and_use_all_there_is() -> None:
    data = tiny()
    parts = [numbers(batch[0]) for batch in (data.lower, data.upper, data.test)]
    assert [len(part) for part in parts] == [200, 100, 100]
    assert sorted(number for part in parts for number in part) == list(range(400))


def test_the_seed_decides_everything_and_nothing_else_does() -> None:
    def outcome(seed: int, **options: Any) -> tuple[list[int], list[int], list[int]]:
        data = tiny(seed=seed, **options)
        assert data.corrupted is not None
        return (
            numbers(data.lower[0]),
            numbers(data.upper[0]),
            (data.lower[1] * data.corrupted).tolist(),
        )

    torch.manual_seed(1)
    first = outcome(3)
    torch.manual_seed(2)
    assert outcome(3) == first
    assert all(a != b for a, b in zip(outcome(4), first, strict=True))
    assert outcome(3, n_test=7) == first
    assert outcome(3, corruption=0.1)[:2] == first[:2]


def test_the_global_random_state_is_left_alone() -> None:
    dataset = pairs(30), pairs(9, start=100)
    before = torch.get_rng_state()
    DatasetCleaning(*dataset, corruption=0.5)
    corrupted(0.5)
    assert torch.equal(torch.get_rng_state(), before)


def test_setup_happens_once() -> None:
    data = tiny()
    lower = data.lower
    data.setup("test")
    assert data.lower is lower


@pytest.mark.parametrize("chunk_size", [1, 64, 200, 1000])
def test_chunks_put_together_are_the_whole(chunk_size: int) -> None:
    torch.manual_seed(0)
    whole = tiny()
    torch.manual_seed(0)
    parts = tiny(chunk_size=chunk_size)
    for name in ("lower", "upper", "test"):
        chunks = as_chunks(getattr(parts, name))
        assert len(chunks.batches) == -(-len(getattr(whole, name)[0]) // chunk_size)
        assert max(len(chunk[0]) for chunk in chunks.batches) <= chunk_size
        for position, tensor in enumerate(getattr(whole, name)):
            assert torch.equal(torch.cat([chunk[position] for chunk in chunks.batches]), tensor)
        assert sum(chunks.shares) == pytest.approx(1.0)
    validation, test = parts.val_dataloader()
    assert torch.equal(torch.cat([images for images, _ in validation]), whole.upper[0])
    assert torch.equal(torch.cat([labels for _, labels in test]), whole.test[1])
    assert len(test) == len(list(test)) == len(list(parts.test_dataloader()))


def test_loaders_without_chunks_give_one_batch() -> None:
    data = tiny(epoch_length=7)
    assert len(data.train_dataloader()) == 7
    assert next(iter(data.train_dataloader()))["lower"] is data.lower
    validation, test = ([*loader] for loader in data.val_dataloader())
    assert [len(batch[0]) for batch in validation] == [100]
    assert [len(batch[0]) for batch in test] == [100]
    assert [len(batch) for batch in data.test_dataloader()] == [2]


class Cleaner(BilevelMixin, LightningModule):
    def __init__(self, data: CleaningData) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(data.n_train))
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(torch.Size(data.image_shape).numel(), data.classes)
        )
        self.declare(upper=self.logits, lower=self.classifier)
        self.evaluated: list[tuple[int, int, torch.dtype]] = []

    def upper_loss(self, batch: Any) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.classifier(images), labels)

    def lower_loss(self, batch: Any) -> Tensor:
        images, labels, index = batch
        losses = nn.functional.cross_entropy(self.classifier(images), labels, reduction="none")
        return (torch.sigmoid(self.logits[index]) * losses).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluated.append((dataloader_idx, len(batch[1]), batch[0].dtype))
        self.log("loss", self.upper_loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.upper_loss(batch))


def test_a_trainer_fits_validates_and_tests_on_it(tmp_path: Path) -> None:
    data = Tiny(epoch_length=2)
    data.image_shape = (1, 4, 4)
    module = Cleaner(data)
    run = trainer(tmp_path, max_epochs=2, precision="64-true")
    run.fit(module, datamodule=data)
    assert [entry[:2] for entry in module.evaluated[-2:]] == [(0, 100), (1, 100)]
    assert {dtype for *_, dtype in module.evaluated} == {torch.float64}
    whole = run.test(module, datamodule=data, verbose=False)[0]["loss"]
    assert data.test is not None
    with torch.no_grad():
        assert whole == pytest.approx(
            float(module.upper_loss((data.test[0].double(), data.test[1])))
        )


def test_chunks_train_like_the_whole(tmp_path: Path) -> None:
    train, validation = pairs(30), pairs(20, start=100)
    weights = []
    for chunk_size in (None, 7):
        data = DatasetCleaning(train, validation, epoch_length=3, chunk_size=chunk_size)
        torch.manual_seed(0)
        module = Cleaner(data)
        trainer(tmp_path, max_epochs=1, precision="64-true").fit(module, datamodule=data)
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    torch.testing.assert_close(*weights, rtol=1e-9, atol=1e-12)


# MNIST and FashionMNIST


def write_idx(folder: Path, prefix: str, images: Tensor, labels: Tensor) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    header = struct.pack(">4i", 0x803, *images.shape)
    (folder / f"{prefix}-images-idx3-ubyte").write_bytes(header + images.numpy().tobytes())
    labels_header = struct.pack(">2i", 0x801, len(labels))
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(
        labels_header + labels.to(torch.uint8).numpy().tobytes()
    )


SETS = [(MNISTCleaning, "MNIST"), (FashionMNISTCleaning, "FashionMNIST")]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with 60 training and 20 test images under both names, in the official format."""
    for _, name in SETS:
        write_idx(tmp_path / name / "raw", "train", numbered(60, size=28), torch.arange(60) % 10)
        write_idx(
            tmp_path / name / "raw", "t10k", numbered(20, start=300, size=28), torch.arange(20) % 10
        )
    return tmp_path


@pytest.mark.parametrize(("data_class", "name"), SETS)
def test_official_files_are_read(root: Path, data_class: type[MNISTCleaning], name: str) -> None:
    data = data_class(root=str(root), n_train=30, n_validation=20)
    # Known before any data are loaded.
    assert (data.n_train, data.classes, data.image_shape) == (30, 10, (1, 28, 28))
    data.prepare_data()
    data.setup()
    assert data.clean_labels is not None
    assert data.clean_labels.tolist() == [number % 10 for number in numbers(data.lower[0])]
    training, validation = set(numbers(data.lower[0])), set(numbers(data.upper[0]))
    assert (len(training), len(validation), len(training & validation)) == (30, 20, 0)
    assert training | validation <= set(range(60))
    assert sorted(numbers(data.test[0])) == list(range(300, 320))
    assert data.source == name


def test_the_root_comes_from_the_environment(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_BILEVEL_DATA", str(root))
    data = MNISTCleaning(n_train=10, n_validation=10, n_test=5)
    data.setup()
    assert len(data.test[1]) == 5
    assert MNISTCleaning(root="elsewhere").root == Path("elsewhere")
    monkeypatch.delenv("LIGHTNING_BILEVEL_DATA")
    assert MNISTCleaning().root == Path("data")


def test_the_papers_sizes_are_the_defaults() -> None:
    data = MNISTCleaning()
    assert (data.n_train, data.n_validation, data.n_test, data.corruption, data.kind) == (
        5000,
        5000,
        None,
        0.5,
        "uniform",
    )


@pytest.mark.parametrize(("data_class", "name"), SETS)
def test_missing_data_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_class: type[MNISTCleaning], name: str
) -> None:
    from torchvision import datasets

    # Nothing listens there.
    monkeypatch.setattr(getattr(datasets, name), "mirrors", ["http://127.0.0.1:9/"])
    data = data_class(root=str(tmp_path))
    for call in (data.prepare_data, data.setup):
        with pytest.raises(
            MisconfigurationException, match=r"a download by `prepare_data\(\)`"
        ) as caught:
            call()
        message = str(caught.value)
        assert "\n" not in message
        raw = tmp_path / name / "raw"
        for word in (
            f"{data_class.__name__}(root={str(tmp_path)!r})",
            "ubyte",
            str(raw),
            f"that has {name}/raw as `root`",
            "LIGHTNING_BILEVEL_DATA",
        ):
            assert word in message
        assert caught.value.__cause__ is not None


def test_broken_files_are_explained(root: Path) -> None:
    (root / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(
        struct.pack(">4i", 0x803, 60, 28, 28) + b"\0" * 100
    )
    data = MNISTCleaning(root=str(root), n_train=10, n_validation=10)
    for call in (data.prepare_data, data.setup):
        with pytest.raises(MisconfigurationException, match="has not all of its data there"):
            call()


def test_more_samples_than_there_are(root: Path) -> None:
    def setup(**sizes: int) -> None:
        MNISTCleaning(root=str(root), **sizes).setup()

    with pytest.raises(
        ValueError,
        match=r"`MNISTCleaning\(n_train=50, n_validation=20\)` does not fit: there are 60",
    ):
        setup(n_train=50, n_validation=20)
    with pytest.raises(
        ValueError, match=r"`MNISTCleaning\(n_test=21\)` does not fit: there are 20"
    ):
        setup(n_train=30, n_validation=20, n_test=21)
    with pytest.raises(
        ValueError,
        match=(
            r"`Tiny\(n_train=300, n_validation=100, n_test=None\)` does not fit: there are 400, "
            r"and each needs at least 1"
        ),
    ):
        tiny(n_train=300)


def test_labels_that_no_class_has(root: Path) -> None:
    write_idx(root / "MNIST" / "raw", "t10k", numbered(20, size=28), torch.full((20,), 12))
    with pytest.raises(
        ValueError,
        match=r"test=...\)` must have one label per image, an integer from 0 to 9",
    ):
        MNISTCleaning(root=str(root), n_train=30, n_validation=20).setup()


@pytest.mark.parametrize(("data_class", "name"), SETS)
def test_the_real_data(data_class: type[MNISTCleaning], name: str) -> None:
    if not (REAL / name / "raw").is_dir():
        pytest.skip(f"no {name} at {REAL}: name a folder that has it in LIGHTNING_BILEVEL_DATA")
    data = data_class(root=str(REAL), seed=1)
    data.prepare_data()
    data.setup()
    assert [len(batch[1]) for batch in (data.lower, data.upper, data.test)] == [5000, 5000, 10000]
    assert data.corrupted is not None
    assert int(data.corrupted.sum()) == 2500
    assert data.test[1].unique().tolist() == list(range(10))
    both = torch.cat([data.lower[0], data.upper[0]])
    assert len(both.unique(dim=0)) == len(both)  # no image is in both sets
    assert float(data.lower[0].max()) == 1.0
    mean = {"MNIST": 0.1307, "FashionMNIST": 0.2860}[name]  # as everyone normalises with
    assert float(data.lower[0].mean()) == pytest.approx(mean, abs=5e-3)


# Digits


def test_digits() -> None:
    data = DigitsCleaning()
    assert (data.n_train, data.classes, data.image_shape) == (600, 10, (1, 8, 8))
    data.setup()
    assert [len(batch[1]) for batch in (data.lower, data.upper, data.test)] == [600, 600, 597]
    assert data.corrupted is not None
    assert int(data.corrupted.sum()) == 300
    assert (float(data.lower[0].min()), float(data.lower[0].max())) == (0.0, 1.0)
    assert data.lower[0].dtype == torch.float32
    assert len(data.upper[1].unique()) == 10


# The user's own data


class Listed(Dataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Any:
        return self.samples[i]


def test_own_data_are_taken_as_they_are() -> None:
    train, validation, test = pairs(12), pairs(6, start=20), pairs(5, start=30)
    data = DatasetCleaning(train, validation, test)
    assert isinstance(data, DatasetCleaning)
    # In the order of the data set, which the weights are to point into.
    assert numbers(data.lower[0]) == list(range(12))
    assert torch.equal(data.lower[1], train.tensors[1])
    assert data.corrupted is None
    assert data.clean_labels is None
    assert (data.n_train, data.n_validation, data.classes, data.image_shape) == (
        12,
        6,
        3,
        (1, 4, 4),
    )
    assert numbers(data.test[0]) == list(range(30, 35))
    assert len(data.val_dataloader()) == 2


def test_own_data_with_known_corruption() -> None:
    mask = torch.arange(12) < 5
    for given in (mask, mask.tolist()):
        data = DatasetCleaning(pairs(12), pairs(6, start=20), corrupted=given)
        assert data.corrupted is not None
        assert torch.equal(data.corrupted, mask)
        assert data.clean_labels is None


def test_own_data_can_be_corrupted() -> None:
    train = pairs(12)
    data = DatasetCleaning(train, pairs(6, start=20), corruption=0.5, kind="pair", seed=3)
    assert data.corrupted is not None
    assert data.clean_labels is not None
    assert int(data.corrupted.sum()) == 6
    assert torch.equal(data.lower[1] != train.tensors[1], data.corrupted)
    assert torch.equal(data.clean_labels, train.tensors[1])


def test_own_data_without_a_test_set(tmp_path: Path) -> None:
    data = DatasetCleaning(pairs(12), pairs(6, start=20), epoch_length=1)
    module = Cleaner(data)
    run = trainer(tmp_path, max_epochs=1)
    run.fit(module, datamodule=data)
    assert {entry[:2] for entry in module.evaluated} == {(0, 6)}
    with pytest.raises(MisconfigurationException, match="`DatasetCleaning` has no test set"):
        run.test(module, datamodule=data)


def test_all_kinds_of_images_and_labels_mean_the_same() -> None:
    from torchvision.transforms import functional

    images, labels = numbered(12), torch.arange(12) % 3
    validation = pairs(6, start=20)
    expected = DatasetCleaning(TensorDataset(images, labels), validation).lower
    samples: dict[str, list[tuple[Any, Any]]] = {
        "bytes": list(zip(images, labels, strict=True)),
        "floats": [
            (image.float() / 255, int(label)) for image, label in zip(images, labels, strict=True)
        ],
        "integers": list(zip(images.int(), labels, strict=True)),
        "arrays": [
            (image.numpy(), label.numpy()) for image, label in zip(images, labels, strict=True)
        ],
        "PIL": [
            (functional.to_pil_image(image), int(label))
            for image, label in zip(images, labels, strict=True)
        ],
    }
    for kind, listing in samples.items():
        lower = DatasetCleaning(Listed(listing), validation).lower
        assert all(torch.equal(a, b) for a, b in zip(lower, expected, strict=True)), kind


def test_colour_images_and_vectors_keep_their_shape() -> None:
    def shape(*of_image: int) -> tuple[int, ...]:
        sets: Any = [TensorDataset(torch.rand(n, *of_image), torch.arange(n) % 2) for n in (4, 3)]
        return DatasetCleaning(*sets).image_shape

    assert shape(3, 5, 6) == (3, 5, 6)
    assert shape(5, 6) == (1, 5, 6)
    assert shape(7) == (7,)


def test_subsets_are_read_in_their_order() -> None:
    whole = pairs(300)
    data = DatasetCleaning(
        Subset(whole, range(200)), Subset(whole, list(range(299, 199, -1))), pairs(5)
    )
    assert numbers(data.lower[0]) == list(range(200))
    assert numbers(data.upper[0]) == list(range(299, 199, -1))
    assert torch.equal(data.upper[1], whole.tensors[1][200:].flip(0))


def test_a_subclass_of_tensor_dataset_is_asked_for_its_samples() -> None:
    class Brighter(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            image, label = super().__getitem__(index)
            return image + 1, label

    data = DatasetCleaning(Brighter(torch.zeros(4, 1, 4, 4), torch.arange(4)), pairs(3))
    assert (data.lower[0] == 1).all()


def labelled(*labels: Any) -> TensorDataset:
    return TensorDataset(numbered(len(labels)), torch.tensor(labels))


VALIDATION = pairs(6, start=20)

BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "rate": (
        lambda: tiny(corruption=1.2),
        ValueError,
        r"corruption=1.2, kind='uniform'\)` needs two classes, a share from 0 to 1",
    ),
    "kind": (
        lambda: tiny(kind="odd"),
        ValueError,
        r"kind='odd'\)` needs two classes, a share from 0 to 1, and 'uniform' or 'pair'",
    ),
    "n_train": (lambda: Tiny(n_train=0), ValueError, r"`Tiny\(n_train=0\)` must be at least 1"),
    "n_validation": (
        lambda: Tiny(n_validation=-3),
        ValueError,
        r"`Tiny\(n_validation=-3\)` must be at least 1",
    ),
    "n_test": (lambda: Tiny(n_test=0), ValueError, r"`Tiny\(n_test=0\)` must be at least 1"),
    "chunk_size": (
        lambda: Tiny(chunk_size=0),
        ValueError,
        r"`Tiny\(chunk_size=0\)` must be at least 1",
    ),
    "epoch_length": (
        lambda: Tiny(epoch_length=0),
        ValueError,
        r"`Tiny\(epoch_length=0\)` must be at least 1",
    ),
    "no load": (
        lambda: CleaningData().setup(),
        NotImplementedError,
        r"`CleaningData` must define `load\(generator\)`",
    ),
    "label range": (
        lambda: DatasetCleaning(labelled(0, 1, 2, 3), VALIDATION, classes=3),
        ValueError,
        r"`DatasetCleaning\(train=...\)` must have one label per image, an integer from 0 to 2",
    ),
    "label negative": (
        lambda: DatasetCleaning(labelled(0, -1), VALIDATION),
        ValueError,
        r"`DatasetCleaning\(train=...\)` must have one label per image, an integer from 0 to 2",
    ),
    "label in validation": (
        lambda: DatasetCleaning(VALIDATION, labelled(0, 1, 5), classes=3),
        ValueError,
        r"`DatasetCleaning\(validation=...\)` must have one label per image",
    ),
    "float labels": (
        lambda: DatasetCleaning(labelled(0.0, 1.0), VALIDATION),
        ValueError,
        r"`DatasetCleaning\(train=...\)` must have one label per image, an integer",
    ),
    "word as label": (
        lambda: DatasetCleaning(Listed([(torch.rand(1, 4, 4), "cat")]), VALIDATION),
        TypeError,
        r"`DatasetCleaning\(train=...\)` must be a Dataset of pairs .*label the number of a class",
    ),
    "classes": (
        lambda: DatasetCleaning(labelled(0, 0), labelled(0), classes=1),
        ValueError,
        r"`corrupt_labels\(classes=1, .* needs two classes",
    ),
    "mask length": (
        lambda: DatasetCleaning(pairs(5), VALIDATION, corrupted=[True, False]),
        ValueError,
        r"`DatasetCleaning\(corrupted=...\)` must be True or False for each of the 5 training",
    ),
    "mask and rate": (
        lambda: DatasetCleaning(pairs(2), VALIDATION, corrupted=[True, False], corruption=0.5),
        ValueError,
        "needs `corruption=0`",
    ),
    "no pairs": (
        lambda: DatasetCleaning(Listed([{"image": 1}]), VALIDATION),
        TypeError,
        r"`DatasetCleaning\(train=...\)` must be a Dataset of pairs \(image, label\)",
    ),
    "three tensors": (
        lambda: DatasetCleaning(TensorDataset(*[torch.rand(3)] * 3), VALIDATION),
        TypeError,
        r"`DatasetCleaning\(train=...\)` must be a Dataset of pairs",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_its_rule(case: str) -> None:
    make, error, message = BAD[case]
    with pytest.raises(error, match=message):
        make()


# YAML


def from_yaml(text: str) -> CleaningData:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")
    data = parser.instantiate_classes(parser.parse_object(yaml.safe_load(text))).data
    assert isinstance(data, CleaningData)
    return data


@pytest.mark.parametrize("name", ["MNISTCleaning", "FashionMNISTCleaning", "DigitsCleaning"])
def test_ready_data_are_named_in_yaml(name: str) -> None:
    arguments = (
        "{n_train: 40, n_validation: 30, n_test: 20, corruption: 0.3, kind: pair, seed: 4, "
        "epoch_length: 9, chunk_size: 8}"
    )
    data = from_yaml(f"data: {{class_path: {name}, init_args: {arguments}}}")
    assert type(data).__name__ == name
    assert (data.n_train, data.n_validation, data.n_test, data.corruption) == (40, 30, 20, 0.3)
    assert (data.kind, data.seed, data.epoch_length, data.chunk_size) == ("pair", 4, 9, 8)


def test_own_data_are_named_in_yaml(tmp_path: Path) -> None:
    from torchvision.transforms import functional

    for part, start in (("train", 0), ("validation", 20)):
        for i, image in enumerate(numbered(6, start)):
            folder = tmp_path / part / "ab"[i % 2]
            folder.mkdir(parents=True, exist_ok=True)
            functional.to_pil_image(image).save(folder / f"{i}.png")
    folders = "\n".join(
        f"    {part}: "
        f"{{class_path: torchvision.datasets.ImageFolder, init_args: {{root: {tmp_path / part}}}}}"
        for part in ("train", "validation")
    )
    data = from_yaml(
        f"data:\n  class_path: DatasetCleaning\n  init_args:\n{folders}\n    corrupted: [true, "
        "false, false, true, false, false]"
    )
    assert (data.n_train, data.classes, data.image_shape) == (6, 2, (3, 4, 4))
    assert numbers(data.lower[0]) == [0, 2, 4, 1, 3, 5]  # as the folders are read
    assert data.corrupted is not None
    assert int(data.corrupted.sum()) == 2


@pytest.mark.parametrize(
    "name", ["MNISTCleaning", "FashionMNISTCleaning", "DigitsCleaning", "DatasetCleaning"]
)
def test_every_argument_has_a_help_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(LightningDataModule, "data")
    with pytest.raises(SystemExit):
        parser.parse_args([f"--data.help={name}"])
    options = " ".join(capsys.readouterr().out.split()).split(f"{name} ")[-1].split(" --data.")[1:]
    texts = [option.split("(type:")[0].split("(required,")[0] for option in options]
    # A text that ends with a comma is another spelling of the next option.
    texts = [text for text in texts if ".help" not in text and not text.endswith(",")]
    assert len(texts) >= 8
    assert all(len(text.split()) > 4 for text in texts), texts
