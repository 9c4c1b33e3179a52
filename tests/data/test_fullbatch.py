"""Full-batch data: the same object each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from modules import Encoded, Weighting, samples, weighting_data
from running import trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_bilevel import (
    Chunks,
    DatasetCleaning,
    FewShot,
    FullBatchDataModule,
    GlyphEpisodes,
    HyperCleaning,
    SineProblem,
)
from lightning_bilevel.core.chunks import as_chunks


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
    assert {dtype for _, dtype in seen} == {
        torch.float64 if precision == "64-true" else torch.float32
    }


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_chunks_go_through_the_trainer_and_are_recognised(tmp_path: Any, precision: str) -> None:
    parts = [tuple(t[i : i + 12] for t in samples(30, 2)) for i in (0, 12, 24)]
    data = FullBatchDataModule(
        samples(20, 1), Chunks(parts), validation=samples(20, 3), epoch_length=5
    )
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
    with pytest.raises(
        ValueError, match=r"`FullBatchDataModule\(epoch_length=0\)` must be at least 1"
    ):
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


def test_chunks_without_tensors_need_weights() -> None:
    with pytest.raises(
        ValueError, match="cannot tell how many samples each part has: give `weights`"
    ):
        _ = Chunks([1, 2]).shares


class Predicting(Weighting):
    def forward(self, batch: Any) -> Tensor:
        return self.classifier(batch[0])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.upper_loss(batch), batch_size=len(batch[0]))


class TestWithoutValidation:
    """Data without a validation batch: nothing is validated."""

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"num_sanity_val_steps": 0},
            {"num_sanity_val_steps": -1},
            {"limit_val_batches": 0.5},
            {"val_check_interval": 2},
            {"check_val_every_n_epoch": 2},
            {"reload_dataloaders_every_n_epochs": 1},
            {"callbacks": [EarlyStopping("bilevel/upper", patience=50)]},
            {"callbacks": [ModelCheckpoint(monitor="bilevel/upper")], "enable_checkpointing": True},
            {"enable_progress_bar": True},
        ],
        ids=lambda options: " ".join(options) or "nothing",
    )
    def test_it_is_skipped(self, tmp_path: Any, options: dict[str, Any]) -> None:
        module = Weighting()  # whose `validation_step` could do nothing with an empty batch
        run = trainer(tmp_path, **{"max_epochs": 3, **options})
        run.fit(
            module, datamodule=FullBatchDataModule(samples(20, 1), samples(30, 2), epoch_length=4)
        )
        assert module.last_step is not None
        assert module.last_step.iteration == 12
        assert "val_loss" not in run.callback_metrics

    def test_early_stopping_stops(self, tmp_path: Any) -> None:
        module, stop = Weighting(), EarlyStopping("bilevel/upper", mode="max", patience=1)
        run = trainer(tmp_path, max_epochs=50, callbacks=[stop])
        run.fit(
            module, datamodule=FullBatchDataModule(samples(20, 1), samples(30, 2), epoch_length=4)
        )
        assert 0 < stop.stopped_epoch < 49

    def test_a_problem_without_data_is_validated_all_the_same(self, tmp_path: Any) -> None:
        run, module = trainer(tmp_path, max_epochs=1), SineProblem(n=3)
        run.fit(module, datamodule=FullBatchDataModule(epoch_length=2))
        assert "x_error" in run.callback_metrics
        for told in (run.validate, run.test):
            assert "x_error" in told(module, datamodule=FullBatchDataModule())[0]

    @pytest.mark.parametrize(
        ("what", "sentence"),
        [
            ("test", "`FullBatchDataModule` has no test set: give it one, or leave out"),
            ("predict", "`FullBatchDataModule` has no test set: give it one"),
        ],
    )
    def test_what_is_asked_for_is_missed(self, tmp_path: Any, what: str, sentence: str) -> None:
        with pytest.raises(MisconfigurationException, match=sentence):
            getattr(trainer(tmp_path), what)(
                Predicting(), datamodule=FullBatchDataModule(samples(20, 1), samples(30, 2))
            )


class TestPredict:
    def test_the_test_batch_is_predicted(self, tmp_path: Any) -> None:
        module, test = Predicting(), samples(7, 4)
        (found,) = trainer(tmp_path).predict(module, datamodule=FullBatchDataModule(test=test))  # type: ignore[misc]
        assert torch.equal(found, module(test).detach())  # type: ignore[arg-type]

    def test_ready_modules(self, tmp_path: Any) -> None:
        images, labels = torch.rand(15, 1, 8, 8), torch.arange(15) % 3
        sets: Any = [TensorDataset(images[i::3], labels[i::3]) for i in range(3)]
        data = DatasetCleaning(*sets, chunk_size=2)
        module: Any = HyperCleaning(n_train=5, inputs=64, hidden=4, classes=3)
        found = trainer(tmp_path).predict(module, datamodule=data)
        assert [tuple(part.shape) for part in found or []] == [(2, 3), (2, 3), (1, 3)]
        assert torch.equal(torch.cat(found), module(images[2::3]).detach())  # type: ignore[arg-type]

        options = {"n_train": 2, "n_validation": 2, "n_test": 2, "ways": 2}
        options |= {"train_classes": 4, "validation_classes": 4, "test_classes": 4}
        episodes = GlyphEpisodes(**options)  # type: ignore[arg-type]
        module = FewShot(tasks=2, ways=2, channels=2)
        (logits,) = trainer(tmp_path).predict(module, datamodule=episodes)  # type: ignore[misc]
        assert logits.shape == (2, 10, 2)  # type: ignore[union-attr]


class TestWhatIsNoBatch:
    def test_a_level_that_needs_no_data(self, tmp_path: Any) -> None:
        class Distance(Weighting):
            def upper_loss(self, batch: Any) -> Tensor:
                assert batch == {}
                return sum(((p - 1) ** 2).sum() for p in self.classifier.parameters())  # type: ignore[return-value]

        module = Distance()
        data = FullBatchDataModule({}, samples(30, 2), epoch_length=3)
        trainer(tmp_path, max_epochs=1).fit(module, datamodule=data)
        assert module.last_step is not None

    @pytest.mark.parametrize("name", ["upper", "lower", "validation"])
    @pytest.mark.parametrize("kind", [DataLoader, CombinedLoader, TensorDataset])
    def test_a_loader(self, tmp_path: Any, name: str, kind: type) -> None:
        dataset = TensorDataset(*samples(20, 1))
        given: Any = {
            DataLoader: DataLoader(dataset),
            CombinedLoader: CombinedLoader([DataLoader(dataset)]),
        }.get(kind, dataset)
        data = FullBatchDataModule(
            **{"upper": samples(20, 1), "lower": samples(30, 2), name: given}
        )
        with pytest.raises(MisconfigurationException) as refused:
            trainer(tmp_path).fit(Weighting(), datamodule=data)
        assert f"`FullBatchDataModule({name}=...)` is a {kind.__name__}: give its tensors" in str(
            refused.value
        )
        assert '{"upper": loader, "lower": loader}' in str(refused.value)

    def test_a_loader_to_test_on(self, tmp_path: Any) -> None:
        data = FullBatchDataModule(test=DataLoader(TensorDataset(*samples(20, 1))))
        with pytest.raises(
            MisconfigurationException, match=r"`FullBatchDataModule\(test=...\)` is a DataLoader"
        ):
            trainer(tmp_path).test(Predicting(), datamodule=data)

    def test_the_way_out_for_loaders(self, tmp_path: Any) -> None:
        loaders = {
            "upper": DataLoader(TensorDataset(*samples(20, 1)), 20),
            "lower": DataLoader(TensorDataset(*samples(30, 2)), 30),
        }
        module = Encoded()
        trainer(tmp_path, max_epochs=1, log_every_n_steps=1).fit(module, loaders)
        assert module.last_step is not None
