"""What Lightning does around a run on mini-batches: counting, saving, stopping, averaging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import OPTIONS, SAMPLES, Cleaner, batches, loader, network
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.cli import ReduceLROnPlateau
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from lightning_bilevel import BilevelModule, Envelope
from lightning_bilevel.stochastic import DARTS, F2BA, F2SA, MEHA, SOBA, VPBGD, Method, StreamingIVSP

pytestmark = [
    pytest.mark.compatibility,
    pytest.mark.filterwarnings("ignore:.*manual optimization.*"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint.*"),
]
METHODS = [F2SA(), VPBGD(), F2BA(), MEHA(), StreamingIVSP(), SOBA(), DARTS()]


class Validated(Cleaner):
    """A module with every hook, none of which calls ``super()``."""

    values: tuple[float, ...] = (3.0, 2.0, 1.0)

    def setup(self, stage: str) -> None: ...
    def on_fit_start(self) -> None: ...
    def on_train_start(self) -> None: ...
    def on_train_epoch_end(self) -> None: ...
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...
    def on_validation_start(self) -> None: ...
    def on_fit_end(self) -> None: ...

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = self.values[min(self.current_epoch, len(self.values) - 1)]
        self.log("val_loss", value, batch_size=1)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        loss = cross_entropy(self.network(batch["upper"][0]), batch["upper"][1])
        self.log("test_loss", loss, batch_size=1)


def trainer(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    saves = any(isinstance(c, ModelCheckpoint) for c in callbacks)
    given: dict[str, Any] = {"max_epochs": 3, "log_every_n_steps": 1, **OPTIONS, **options}
    return Trainer(
        default_root_dir=folder, callbacks=[*callbacks], enable_checkpointing=saves, **given
    )


def data(count: int = 5) -> tuple[Any, Any]:
    return loader(batches(count, torch.float32)), loader(batches(1, torch.float32, seed=5))


class Points(Callback):
    """The weights after each step."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.logged: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen.append(pl_module.logits.detach().clone())
        self.logged.append(trainer.global_step)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_steps": 8}, 8),
        ({"fast_dev_run": 2}, 2),
        ({"overfit_batches": 2}, 6),
        ({"limit_train_batches": 3}, 9),
        ({"max_epochs": 2, "min_steps": 13}, 13),
        ({"val_check_interval": 2, "check_val_every_n_epoch": None, "max_steps": 7}, 7),
    ],
    ids=str,
)
def test_steps_are_batches(options: dict[str, Any], steps: int, tmp_path: Path) -> None:
    module = Validated()
    if "min_steps" in options:
        options = {**options, "max_epochs": 3, "max_steps": 13}
    run = trainer(tmp_path, **options)
    run.fit(module, *data())
    assert run.global_step == steps
    assert module.mini_batches is not None
    assert module.mini_batches.step is not None
    assert module.mini_batches.step.k == steps


def test_an_epoch_ends_the_accumulation(tmp_path: Path) -> None:
    """As in automatic optimisation."""
    module, points = Validated(accumulate=2), Points()
    run = trainer(tmp_path, points)
    run.fit(module, *data(5))
    assert points.logged == [0, 1, 1, 2, 3, 3, 4, 4, 5, 6, 6, 7, 7, 8, 9]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_the_first_gap_is_zero(method: Method, tmp_path: Path) -> None:
    """With z = y, dropout and all; its part in the gradient of x cancels to the bit."""
    module, points = Validated(method), Points()
    run = trainer(tmp_path, points, max_steps=1)
    run.fit(module, *data())
    assert float(run.callback_metrics["bilevel/gap"]) == 0.0
    assert module.last_step is not None
    assert float(module.last_step.gap) == 0.0
    if not isinstance(method, (SOBA, DARTS)):
        assert torch.equal(points.seen[0], torch.zeros(SAMPLES))


def test_checkpoints_at_steps(tmp_path: Path) -> None:
    points = Points()
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    trainer(tmp_path, saving, points).fit(Validated(), *data())
    assert {p.name for p in tmp_path.glob("*.ckpt")} == {f"step={k}.ckpt" for k in (4, 8, 12)}
    for k in (4, 8, 12):
        saved = torch.load(tmp_path / f"step={k}.ckpt", weights_only=True)
        assert saved["global_step"] == k
        assert torch.equal(saved["state_dict"]["logits"], points.seen[k - 1])


def test_checkpoints_at_steps_by_a_validation_metric(tmp_path: Path) -> None:
    """Lightning #21842: from the second one on, the weights are newer than the metric.

    Lightning saves before the validation of the same step. The weights are those of the step that
    the file names.
    """

    class Counted(Validated):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", float(self.global_step), batch_size=1)

    points, name = Points(), "{step}-{val_loss:.0f}"
    saving = ModelCheckpoint(
        tmp_path, name, monitor="val_loss", every_n_train_steps=2, save_top_k=-1
    )
    run = trainer(tmp_path, saving, points, val_check_interval=2, max_epochs=1)
    run.fit(Counted(), *data(6))
    metrics = {2: 2, 4: 2, 6: 4}
    found = {path.name for path in tmp_path.glob("*.ckpt")}
    assert found == {f"step={k}-val_loss={m}.ckpt" for k, m in metrics.items()}
    for k, metric in metrics.items():
        saved = torch.load(tmp_path / f"step={k}-val_loss={metric}.ckpt", weights_only=True)
        assert torch.equal(saved["state_dict"]["logits"], points.seen[k - 1])


@pytest.mark.parametrize(
    ("monitor", "epochs", "options"),
    [("val_loss", 4, {}), ("bilevel/gap", 2, {"log_every_n_steps": 50})],
)
def test_early_stopping(monitor: str, epochs: int, options: Any, tmp_path: Path) -> None:
    stopping = EarlyStopping(monitor, patience=1, min_delta=0 if monitor == "val_loss" else 1e3)
    run = trainer(tmp_path, stopping, max_epochs=9, **options)
    run.fit(Validated(), *data())
    assert run.global_step == 5 * epochs


def test_logging_at_the_interval(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    rates = LearningRateMonitor("step")
    run = trainer(tmp_path, rates, logger=logger, log_every_n_steps=4)
    run.fit(Validated(scheduler=lambda o: StepLR(o, 3, 0.5)), *data(8))
    rows = [line.split(",") for line in Path(logger.log_dir, "metrics.csv").read_text().split()]
    names, *rows = rows
    gap, step = names.index("bilevel/gap"), names.index("step")
    assert [int(row[step]) for row in rows if row[gap]] == [3, 7, 11, 15, 19, 23]
    assert len(names) >= 9
    assert sum(name.startswith("lr-") for name in names) == 3  # x, and both groups of y


def test_averaged_weights(tmp_path: Path) -> None:
    """Of the module: z is no part of it."""
    torch.manual_seed(0)
    points, module = Points(), Validated()
    saving = ModelCheckpoint(tmp_path, save_last=True)
    trainer(tmp_path, EMAWeightAveraging(decay=0.5), points, saving).fit(module, *data())
    average = points.seen[0]
    for point in points.seen[1:]:
        average = average.lerp(point, 0.5)
    torch.testing.assert_close(module.logits.detach(), average, rtol=0, atol=1e-6)
    assert not torch.equal(module.logits.detach(), points.seen[-1])
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert torch.equal(saved["current_model_state"]["logits"], points.seen[-1])
    # It goes on from the point, not from the average.
    more = Points()
    run = trainer(tmp_path, EMAWeightAveraging(decay=0.5), more, max_epochs=4)
    run.fit(Validated(), *data(), ckpt_path=tmp_path / "last.ckpt")
    assert 0 < float((more.seen[0] - points.seen[-1]).abs().max()) <= 0.06


def test_swa_takes_one_optimizer(tmp_path: Path) -> None:
    """Lightning's own sentence."""

    class Plain(Validated):
        def __init__(self) -> None:
            super().__init__(net=lambda: nn.Linear(5, 3))

    with pytest.raises(MisconfigurationException, match="SWA currently works with 1 `optimizer`"):
        trainer(tmp_path, StochasticWeightAveraging(1e-2)).fit(Plain(), *data())


def test_a_second_fit_and_evaluation_between(tmp_path: Path) -> None:
    """z, counters and optimisers begin anew, as Lightning's own do."""
    module = Validated(F2SA(warmup=2), envelope=Envelope(0.1, 1.0, 1e-3))
    run = trainer(tmp_path, max_epochs=1)
    run.fit(module, *data())
    first = module.mini_batches
    assert first is not None
    assert first.step is not None
    assert "test_loss" in run.test(module, data()[1], verbose=False)[0]
    run.validate(module, data()[1], verbose=False)
    assert module.mini_batches is first  # evaluation leaves it alone
    assert first.step.k == 5
    certificate = module.certify()
    assert certificate is not None
    assert certificate.upper > 0
    points, x = Points(), module.logits.detach().clone()
    trainer(tmp_path, points, max_epochs=1).fit(module, *data())
    assert module.mini_batches is not first
    assert torch.equal(points.seen[1], x)
    assert not torch.equal(points.seen[3], x)


def test_saved_weights_for_evaluation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Validated()
    saving = ModelCheckpoint(tmp_path, monitor="val_loss", mode="max")
    run = trainer(tmp_path, saving)
    run.fit(module, *data())
    best = Validated.load_from_checkpoint(saving.best_model_path)
    assert not torch.equal(best.logits, module.logits)
    known = run.test(module, data()[1], ckpt_path="best", verbose=False)
    assert torch.equal(module.logits, best.logits)
    other = trainer(tmp_path).test(best, data()[1], verbose=False)
    again = trainer(tmp_path).test(
        Validated(), data()[1], ckpt_path=saving.best_model_path, verbose=False
    )
    trainer(tmp_path).validate(Validated(), data()[1], ckpt_path=saving.best_model_path)
    assert known == other == again


# It takes the number of steps for that of batches.
@pytest.mark.filterwarnings("ignore:.*ended before the epoch ended.*")
@pytest.mark.parametrize("at", ["on_validation_end", "on_train_epoch_end"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_without_super_resume_bit_for_bit(at: str, accumulate: int, tmp_path: Path) -> None:
    """With schedulers of all three kinds, from a checkpoint at the end of an epoch."""

    class Scheduled(Validated):
        values = (1.0, 2.0, 3.0, 4.0)

        def configure_optimizers(self) -> Any:
            above = SGD([self.logits], lr=100.0, momentum=0.5)
            weights, biases = self.network[0].weight, self.network[6].parameters()
            one, two = AdamW([weights, *self.network[1].parameters()]), SGD(biases, lr=0.1)
            return [above, one, two], [
                ReduceLROnPlateau(above, "val_loss", patience=0),
                {"scheduler": StepLR(one, 1, 0.5), "interval": "epoch"},
                {"scheduler": StepLR(two, 3, 0.5), "interval": "step"},
            ]

    def run(*callbacks: Callback, resume: Path | None = None) -> tuple[Any, Any]:
        torch.manual_seed(0)
        module = Scheduled(accumulate=accumulate)
        made = trainer(tmp_path, *callbacks)
        made.fit(module, *data(), ckpt_path=resume)
        return module, [o.state_dict()["param_groups"] for o in made.optimizers]

    saving = ModelCheckpoint(
        tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=at == "on_train_epoch_end"
    )
    whole, rates = run(saving)
    again, others = run(resume=tmp_path / "epoch=0.ckpt")
    if at == "on_validation_end":
        # As with every module: it is saved before the metric is looked at.
        rates, others = rates[1:], others[1:]
    else:
        assert whole.last_step is not None
        assert float(whole.logits.detach().abs().max()) > 0
        for name, value in whole.state_dict().items():
            assert torch.equal(value, again.state_dict()[name])
    assert rates == others


class Late(BilevelModule):
    """Makes and declares its levels where Lightning advises it for large models."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.made = False

    def setup(self, stage: str) -> None:
        if self.where == "setup":
            self.make()

    def configure_model(self) -> None:
        if self.where == "configure_model":
            self.make()

    def make(self) -> None:
        if self.made:
            return
        self.made = True
        self.logits, self.network = nn.Parameter(torch.zeros(SAMPLES)), network()
        self.declare(upper=self.logits, lower=self.network, method=F2SA())

    upper_loss, lower_loss = Cleaner.upper_loss, Cleaner.lower_loss

    def configure_optimizers(self) -> Any:
        lower = [p for p in self.network.parameters() if p.requires_grad]
        return AdamW([self.logits], lr=0.05), AdamW(lower)


@pytest.mark.parametrize("where", ["setup", "configure_model"])
def test_levels_that_are_declared_late(where: str, tmp_path: Path) -> None:
    module = Late(where)
    run = trainer(tmp_path, ModelCheckpoint(tmp_path, save_last=True))
    run.fit(module, data()[0])
    assert run.global_step == 15
    assert float(module.logits.detach().abs().max()) > 0.1
    again = Late(where)
    run = trainer(tmp_path, max_epochs=4)
    run.fit(again, data()[0], ckpt_path=tmp_path / "last.ckpt")
    assert run.global_step == 20
