"""Runs on a growing sample: the stages, their end on all data, their checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import parallel
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from modules import MILD, Weighting, samples
from records import Recorder, same
from running import same_parameters, trainer
from torch import Tensor

from lightning_bilevel import (
    F2SA,
    IVSP,
    CertificateMonitor,
    DigitsCleaning,
    FullBatchDataModule,
    Growing,
    HyperCleaning,
)
from lightning_bilevel.data.fullbatch import NestedSample

BATCH = {"upper": samples(20, 1), "lower": samples(60, 2)}


class Sizes(Recorder):
    """The records, and the samples of each iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.sizes.append(len(batch["lower"][0]))


def fitted(
    tmp_path: Path, growing: Growing | None, steps: int, solver: Any = MILD, *callbacks: Any
) -> tuple[Any, Sizes, Any]:
    module = Weighting(60, solver=solver)
    records = Sizes()
    run = trainer(tmp_path, max_steps=steps, callbacks=[records, *callbacks])
    data = FullBatchDataModule(**BATCH, validation=samples(20, 3), growing=growing, epoch_length=5)
    run.fit(module, datamodule=data)
    return module, records, run


@pytest.mark.parametrize("solver", [MILD, IVSP, partial(F2SA, T=2)])
def test_a_first_sample_as_large_as_the_data_is_the_full_batch(tmp_path: Path, solver: Any) -> None:
    full, steps, _ = fitted(tmp_path, None, 8, solver)
    grown, same_steps, _ = fitted(tmp_path, Growing(start=60), 8, solver)
    assert same_parameters(full, grown)
    assert steps.steps == same_steps.steps


def test_a_stage_is_the_run_on_its_sample_and_then_the_sample_grows(tmp_path: Path) -> None:
    growing = Growing(start=15, factor=2, every=4)
    module, records, _ = fitted(tmp_path, growing, 14)
    assert records.sizes == [15] * 4 + [30] * 4 + [60] * 6
    # The same by hand: one solver, which is given one problem after another.
    other = Weighting(60)
    solver = other._declaration.new_solver()
    sample = NestedSample(growing, BATCH)
    whole = other.bilevel_problem(BATCH)
    for k in range(14):
        batch = sample.at(k)
        if sample.begins:
            solver.problem_changed()
        if sample.begins or k == 0:
            problem = other.bilevel_problem(batch)
            problem.sampled_from(whole, sample.share)
        solver.step(problem=problem)
    assert same_parameters(module, other)
    assert module.last_step.passes == solver.progress.passes


def test_smoothing_and_penalty_go_on_and_the_point_is_evaluated_anew(tmp_path: Path) -> None:
    _, records, _ = fitted(tmp_path, Growing(start=15, factor=2, every=4), 14)
    mu = [step["mu"] for step in records.steps]
    assert mu == sorted(mu, reverse=True)
    for k, step in enumerate(records.steps):
        # One more evaluation of f: before, the point is known on the smaller sample only.
        assert step["calls"]["upper"] == step["trials"] + (k in (0, 4, 8)), k


def test_passes_are_those_over_all_data(tmp_path: Path) -> None:
    _, records, _ = fitted(tmp_path, Growing(start=15, factor=2, every=100), 5)
    upper = sum(step["calls"]["upper"] for step in records.steps)
    lower = sum(step["calls"]["lower"] + 2 * step["calls"]["gap"] for step in records.steps)
    assert records.steps[-1]["passes"] == pytest.approx(15 / 20 * upper + 15 / 60 * lower)


def test_the_theorem_is_about_the_last_stage(tmp_path: Path) -> None:
    growing = Growing(start=15, factor=2, every=4)
    early, _, _ = fitted(tmp_path, growing, 7)
    assert early.proved is None
    with pytest.raises(MisconfigurationException, match="no recent iteration was on all data"):
        early.certify(proved=True)
    late, records, _ = fitted(tmp_path, growing, 20)
    kept = late.proved
    # 12 iterations are on all data; the point is of the second half of these.
    assert kept is not None
    assert kept.iteration > 8 + 6
    assert kept.iterations == 20
    of_half = [step for step in records.steps[14:] if not step["penalty_updated"]]
    assert kept.omega >= min(step["step"] / step["mu"] for step in of_half)


def test_certificate_and_monitor_are_of_all_data(tmp_path: Path) -> None:
    monitor = CertificateMonitor(every_n_steps=2)
    module, _, _ = fitted(tmp_path, Growing(start=15, every=100), 6, MILD, monitor)
    certificate = module.certify()
    assert certificate.evaluated_on == ""
    problem = Weighting(60).bilevel_problem(BATCH)
    assert certificate.upper == pytest.approx(problem.upper(*module.point).value)
    assert monitor.best is not None
    assert monitor.best.kkt == min(monitor.best.kkt, module.certify(tolerance=1e-3).kkt)
    # The weights of samples that no stage has seen have not moved.
    inside = NestedSample(Growing(start=15), BATCH).at(0)["lower"][2]
    moved = module.logits.detach().nonzero().reshape(-1)
    assert set(moved.tolist()) == set(inside.tolist())


@pytest.mark.parametrize("solver", ["paper", "own", "f2sa"])
def test_a_run_resumes_bit_for_bit_in_any_stage_and_at_its_border(
    tmp_path: Path, solver: str
) -> None:
    def run(**fit: Any) -> tuple[Any, Sizes, Any]:
        module, its_data = parallel.problem("growing", parallel.SOLVERS[solver])
        records = Sizes()

        class Saving(Recorder):
            def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
                if not fit:
                    trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

        made = trainer(tmp_path, max_steps=9, callbacks=[records, Saving()])
        made.fit(module, datamodule=its_data, **fit)
        state = made.optimizers[0].state_dict()["state"]
        del state["progress"]["optimization_time"]
        return module.state_dict(), records, state

    whole = run()
    assert whole[1].sizes == [10] * 3 + [20] * 3 + [37] * 3
    for stop in range(1, 9):
        resumed = run(ckpt_path=tmp_path / f"{stop}.ckpt", weights_only=True)
        assert same(resumed[0], whole[0]), stop
        assert same(resumed[1].steps, whole[1].steps[stop:]), stop
        assert resumed[1].sizes == whole[1].sizes[stop:], stop
        assert same(resumed[2], whole[2]), stop


@pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer`")
def test_a_batch_that_changes_within_a_stage_is_refused(tmp_path: Path) -> None:
    class Augmented(Weighting):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            def noisy(level: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                return (level[0] + 0.1 * torch.randn_like(level[0]), *level[1:])

            if isinstance(batch, dict):
                return {name: noisy(level) for name, level in batch.items()}
            return batch

    data = FullBatchDataModule(**BATCH, growing=Growing(start=15))
    with pytest.raises(
        MisconfigurationException, match="a batch with other values than the one before"
    ):
        trainer(tmp_path, max_steps=3).fit(Augmented(60, solver=MILD), datamodule=data)


def test_hyper_cleaning_grows(tmp_path: Path) -> None:
    digits = DigitsCleaning(300, 200, growing=Growing(start=40, every=3), epoch_length=4)
    module = HyperCleaning(300, inputs=64, hidden=4)
    records = Sizes()
    trainer(tmp_path, max_steps=10, callbacks=[records]).fit(module, datamodule=digits)
    assert records.sizes == [40] * 3 + [300] * 7
    assert len(module.logits) == 300
