"""Buffers that training writes to, such as running statistics: they follow the accepted points."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from modules import MILD, Encoded, Weighting, samples, weighting_data
from running import same_parameters, trainer
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_bilevel import (
    MEHA,
    BilevelError,
    BilevelModule,
    Box,
    CertificateMonitor,
    Chunks,
    Envelope,
    FullBatchDataModule,
)


class Normed(Weighting):
    """A classifier with batch normalisation below."""

    def __init__(self, solver: Any = MILD, **norm: Any) -> None:
        super().__init__(solver=solver)
        self.classifier = nn.Sequential(
            nn.Linear(2, 8), nn.BatchNorm1d(8, **norm), nn.Sigmoid(), nn.Linear(8, 3)
        )
        self.declare(
            upper=self.logits,
            lower=self.classifier,
            upper_set=Box(-5, 5),
            lower_set=Box(-5, 5),
            solver=solver,
        )


class Spectral(Weighting):
    """A classifier whose first layer has spectral norm 1, below."""

    def __init__(self, solver: Any = MILD, old: bool = False) -> None:
        super().__init__(solver=solver)
        norm: Any = torch.nn.utils.spectral_norm if old else spectral_norm
        self.classifier = nn.Sequential(norm(nn.Linear(2, 8)), nn.Tanh(), nn.Linear(8, 3))
        self.declare(
            upper=self.logits,
            lower=self.classifier,
            upper_set=Box(-5, 5),
            lower_set=Box(-5, 5),
            solver=solver,
        )


class NormedEncoder(Encoded):
    """Batch normalisation in the part of g that is declared as depending on x alone."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh())
        self.declare(
            upper=self.encoder,
            lower=self.head,
            upper_set=Box(-9, 9),
            lower_set=Box(-9, 9),
            solver=MILD,
        )

    def lower_features(self, batch: Any) -> Tensor:
        return self.encoder(batch[0])

    def lower_loss(self, batch: Any, features: Tensor) -> Tensor:  # type: ignore[override]
        return nn.functional.cross_entropy(self.head(features), batch[1])


class Points(Callback):
    """The weights after each step."""

    def __init__(self) -> None:
        self.points: list[tuple[Tensor, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.points.append(pl_module.point)


def by_hand(
    module: BilevelModule, points: list[tuple[Tensor, Tensor]], lower: Any, upper: Any
) -> BilevelModule:
    """Visit the points one after another with plain calls of the losses."""
    for point in points:
        module.point = point
        features = module.lower_features
        for part in lower:
            module.lower_loss(part, features(part)) if features is not None else module.lower_loss(
                part
            )
        for part in upper:
            module.upper_loss(part)
    return module


def same_buffers(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.buffers(), b.buffers(), strict=True))


MEHA_STEPS = partial(MEHA, alpha=0.02, beta=0.02, eta=0.02, gamma=0.5)


@pytest.mark.parametrize(
    "module", [Normed(), Normed(MEHA_STEPS), Normed(momentum=None), NormedEncoder()]
)
def test_running_statistics_are_those_of_the_accepted_points(
    tmp_path: Path, module: BilevelModule
) -> None:
    """One update per outer iteration, at its last point: trials and inner loops leave no trace."""
    other, points = copy.deepcopy(module), Points()
    trainer(tmp_path, max_steps=7, callbacks=[points]).fit(module, datamodule=weighting_data())
    expected = by_hand(other, points.points, [samples(30, 2)], [samples(20, 1)])
    assert same_buffers(module, expected)
    assert int(next(b for name, b in module.named_buffers() if "tracked" in name)) == 14


def test_chunks_update_statistics_one_after_another(tmp_path: Path) -> None:
    module, points = Normed(), Points()
    other = copy.deepcopy(module)
    parts = [tuple(t[i : i + 10] for t in samples(30, 2)) for i in (0, 10, 20)]
    data = FullBatchDataModule(samples(20, 1), Chunks(parts))
    trainer(tmp_path, max_steps=3, callbacks=[points]).fit(module, datamodule=data)
    assert same_buffers(module, by_hand(other, points.points, parts, [samples(20, 1)]))


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_evaluation_is_of_the_model_that_was_trained(tmp_path: Path, precision: Any) -> None:
    module = Normed()
    module.logits = nn.Parameter(torch.zeros(500))
    module.declare(upper=module.logits, lower=module.classifier, solver=MILD)
    trainer(tmp_path, max_steps=60, precision=precision).fit(
        module,
        datamodule=FullBatchDataModule(samples(500, 1), samples(500, 2), validation=samples(20, 3)),
    )
    inputs, labels, _ = samples(500, 7)
    inputs = inputs.to(module.logits.dtype)
    errors = []
    for mode in (True, False):
        module.train(mode)
        errors.append(float((module.classifier(inputs).argmax(1) != labels).double().mean()))
    assert errors[1] == pytest.approx(errors[0], abs=0.02)
    assert errors[0] < 0.3  # it has learnt something


@pytest.mark.parametrize("old", [False, True])
def test_buffers_that_change_the_losses_are_refused(tmp_path: Path, old: bool) -> None:
    """Each call would evaluate another function: g would depend on the trials before."""
    words = "at the same point: .* Nor may a loss depend on vectors of a spectral norm. Or run on"
    with pytest.raises(BilevelError, match=words):
        trainer(tmp_path, max_steps=4).fit(Spectral(old=old), datamodule=weighting_data())


@pytest.mark.parametrize("make", [Normed, NormedEncoder])
def test_a_resumed_run_has_the_same_buffers(tmp_path: Path, make: Any) -> None:
    whole, first, second = make(), make(), make()
    trainer(tmp_path, max_steps=12).fit(whole, datamodule=weighting_data())
    stopped = trainer(tmp_path, max_steps=5)
    stopped.fit(first, datamodule=weighting_data())
    stopped.save_checkpoint(tmp_path / "stop.ckpt")
    trainer(tmp_path, max_steps=12).fit(
        second, datamodule=weighting_data(), ckpt_path=tmp_path / "stop.ckpt"
    )
    assert same_parameters(whole, second)
    assert same_buffers(whole, second)


def test_a_module_without_such_buffers_is_evaluated_no_more_often(tmp_path: Path) -> None:
    class Counted(Weighting):
        evaluations = 0

        def upper_loss(self, batch: Any) -> Tensor:
            self.evaluations += 1
            return super().upper_loss(batch)

    module = Counted(solver=MEHA_STEPS, envelope=Envelope(0.1, 1.0, 1e-3))
    trainer(tmp_path, max_steps=6).fit(
        module, datamodule=FullBatchDataModule(samples(20, 1), samples(30, 2))
    )
    assert module.evaluations == 2 + 6  # the two looks before the first step, and one per step


def test_frozen_statistics_stay_as_they_are(tmp_path: Path) -> None:
    module = Normed()
    module.classifier[1].eval()  # type: ignore[operator]
    warnings.filterwarnings("ignore", message="Found 1 module")
    trainer(tmp_path, max_steps=3).fit(module, datamodule=weighting_data())
    assert int(module.classifier[1].num_batches_tracked) == 0  # type: ignore[arg-type]


def test_the_best_point_comes_with_its_buffers(tmp_path: Path) -> None:
    module, points = Normed(), Points()
    seen: list[Tensor] = []

    class Means(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            seen.append(pl_module.classifier[1].running_mean.clone())

    monitor = CertificateMonitor(restore_best=True, every_n_steps=1)
    trainer(tmp_path, max_steps=25, callbacks=[points, Means(), monitor]).fit(
        module, datamodule=weighting_data()
    )
    assert monitor.best is not None
    best = monitor.best.iteration
    assert best < 25
    assert torch.equal(module.point[1], points.points[best - 1][1])
    assert torch.equal(module.classifier[1].running_mean, seen[best - 1])  # type: ignore[arg-type]
