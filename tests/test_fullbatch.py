"""Full-batch data: the same object each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modules import Weighting, samples, weighting_data
from test_mixin import trainer

from lightning_bilevel import Chunks, FullBatchDataModule
from lightning_bilevel.data.fullbatch import as_chunks


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_every_step_gets_the_same_tensors(tmp_path: Any, precision: str) -> None:
    seen = []

    class Watching(Weighting):
        def training_step(self, batch: Any, batch_idx: int = 0) -> None:
            seen.append((batch["upper"][0].data_ptr(), batch["upper"][0].dtype))
            super().training_step(batch, batch_idx)

    data = weighting_data(epoch_length=3)
    trainer(tmp_path, max_epochs=2, precision=precision).fit(Watching(), datamodule=data)
    assert len(seen) == 6
    assert len(set(seen)) == 1
    assert {dtype for _, dtype in seen} == {torch.float64 if precision == "64-true" else torch.float32}


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_chunks_go_through_the_trainer_and_are_recognised(tmp_path: Any, precision: str) -> None:
    parts = [tuple(t[i : i + 12] for t in samples(30, 2)) for i in (0, 12, 24)]
    data = FullBatchDataModule(samples(20, 1), Chunks(parts), validation=samples(20, 3), epoch_length=5)
    module = Weighting()
    trainer(tmp_path, max_epochs=1, precision=precision).fit(module, datamodule=data)
    assert module.last_step is not None
    # the batch counts as the same one: f at the current point was not evaluated again
    assert module.last_step.calls.upper == module.last_step.trials  # type: ignore[attr-defined]


def test_epoch_length_is_the_number_of_batches() -> None:
    data = FullBatchDataModule(1, 2, epoch_length=7)
    assert list(data.train_dataloader()) == [{"upper": 1, "lower": 2}] * 7
    assert len(data.train_dataloader()) == 7


def test_epoch_length_is_positive() -> None:
    with pytest.raises(ValueError, match=r"`FullBatchDataModule\(epoch_length=0\)` must be at least 1"):
        FullBatchDataModule(epoch_length=0)


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        (torch.ones(3), 1),
        ((torch.ones(3), torch.ones(3)), 1),
        ([torch.ones(3), torch.ones(3)], 1),
        (None, 1),
        ([(torch.ones(3),), (torch.ones(1),)], 2),
        ([{"a": torch.ones(3)}] * 4, 4),
    ],
)
def test_what_counts_as_chunks(batch: Any, parts: int) -> None:
    assert len(as_chunks(batch).batches) == parts


def test_chunks_weigh_their_samples() -> None:
    assert as_chunks([(torch.ones(3),), (torch.ones(1),)]).shares == [0.75, 0.25]
    assert Chunks([1, 2], [2.0, 3.0]).shares == [2.0, 3.0]


def test_chunks_need_weights_that_fit() -> None:
    with pytest.raises(ValueError, match="1 batches and 2 weights"):
        Chunks([1], [1.0, 2.0])
    with pytest.raises(ValueError, match="0 batches"):
        Chunks([])
    with pytest.raises(ValueError, match="cannot tell how many samples each part has: give `weights`"):
        _ = Chunks([1, 2]).shares
