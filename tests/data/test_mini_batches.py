"""The ready data in mini-batches: each sample once an epoch, with its number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from running import trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_bilevel import DatasetCleaning, Growing, HyperCleaning
from lightning_bilevel.data.cleaning import Table
from lightning_bilevel.stochastic import F2SA


def data(**options: Any) -> DatasetCleaning:
    torch.manual_seed(0)
    return DatasetCleaning(
        TensorDataset(torch.rand(23, 1, 2, 2), torch.arange(23) % 4),
        TensorDataset(torch.rand(9, 1, 2, 2), torch.arange(9) % 4),
        **{"corruption": 0.4, "batch_size": 5, **options},
    )


def joined(loader: DataLoader[Any]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(parts) for parts in zip(*loader, strict=True))


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_an_epoch_has_each_sample_once_with_its_label_and_number(chunk_size: int | None) -> None:
    whole = data(chunk_size=None)
    loaders = data(chunk_size=chunk_size).train_dataloader()
    assert {level: len(loader) for level, loader in loaders.items()} == {"upper": 2, "lower": 5}
    images, labels, index = joined(loaders["lower"])
    assert not torch.equal(index, torch.arange(23))  # in random order
    assert torch.equal(index.sort().values, torch.arange(23))
    assert torch.equal(images, whole.lower[0][index])
    assert torch.equal(labels, whole.lower[1][index])
    assert [len(part[0]) for part in loaders["lower"]] == [5, 5, 5, 5, 3]
    clean = joined(loaders["upper"])
    order = clean[0].flatten(1).sum(1).argsort()
    expected = whole.upper[0].flatten(1).sum(1).argsort()
    assert torch.equal(clean[0][order], whole.upper[0][expected])
    assert torch.equal(clean[1][order], whole.upper[1][expected])


def test_a_table_gives_what_a_dataset_of_tensors_gives() -> None:
    tensors = torch.rand(7, 2), torch.arange(7)
    ours = DataLoader(Table(*tensors), 3, collate_fn=tuple)
    theirs = DataLoader(TensorDataset(*tensors), 3)
    for mine, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    assert torch.equal(Table(*tensors)[4][1], torch.tensor(4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"`DatasetCleaning\(batch_size=0\)` must be at least 1"),
        ({"growing": Growing()}, "`batch_size` is for mini-batches, `growing` for full batches"),
    ],
)
def test_bad_sizes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data(**options)


def test_an_epoch_of_training_is_a_pass_over_the_longer_level(tmp_path: Any) -> None:
    module = HyperCleaning(n_train=23, inputs=4, hidden=3, classes=4, method=F2SA())
    run = trainer(tmp_path, max_epochs=2)
    run.fit(module, datamodule=data())
    assert run.global_step == 10
    assert module.last_step is not None
    assert type(module.last_step).__name__ == "StreamInfo"
    # Each weight was touched in each epoch.
    assert (module.logits != 0).all()
