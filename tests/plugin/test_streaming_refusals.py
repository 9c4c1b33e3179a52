"""What a run on mini-batches refuses, each with a way out, and what it survives."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from modules import MILD, Weighting, samples, weighting_data
from records import Recorder
from running import same_parameters, trainer
from streaming import Streamed, Touching, loader, loaders
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from lightning_bilevel import (
    AID,
    BOME,
    DARTS,
    F2SA,
    ITD,
    SLM,
    SOBA,
    BilevelError,
    CertificateReport,
    Chunks,
    Envelope,
    FullBatchDataModule,
    HJFBiO,
    KKTMonitor,
    LastCheckpoint,
    MoreauGapMonitor,
    SolverMonitor,
)

pytestmark = pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")


def fitted(tmp_path: Path, module: Any, data: Any, **options: Any) -> Any:
    run = trainer(tmp_path, **{"max_epochs": 3, **options})
    run.fit(module, data, loader(20, 3, 20))
    return module


def refused(tmp_path: Path, words: str, module: Any, data: Any = None, **options: Any) -> None:
    with pytest.raises(MisconfigurationException, match=words):
        fitted(tmp_path, module, loaders() if data is None else data, **options)


LEVELS = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("upper", "lower")}


def full() -> FullBatchDataModule:
    return FullBatchDataModule(samples(20, 1), samples(30, 2), samples(20, 3))


class TestDeterministicSolvers:
    @pytest.mark.parametrize(
        ("solver", "words"),
        [
            (MILD, "compares values of f and g.*Use `StreamingIVSP`"),
            (SLM, "compares values of f and g.*Use `F2SA`"),
            (BOME, "compares values of f and g.*Use `F2SA`"),
            (ITD, "differentiates several steps.*Use `SOBA`"),
            (AID, "needs products with one matrix. Use `AID.linear_solver=.neumann.*"),
        ],
    )
    def test_changing_batches(self, tmp_path: Path, solver: Any, words: str) -> None:
        refused(tmp_path, words, Weighting(solver=solver))

    @pytest.mark.parametrize(("solver", "name"), [(MILD, "StreamingIVSP"), (BOME, "F2SA")])
    def test_dropout(self, tmp_path: Path, solver: Any, name: str) -> None:
        module = Streamed(solver=solver)
        with pytest.raises(BilevelError, match=f"Or use `{name}` on mini-batches"):
            trainer(tmp_path, max_steps=2).fit(module, datamodule=full())

    def test_dropout_on_full_batches_of_a_stochastic_solver(self, tmp_path: Path) -> None:
        with pytest.raises(BilevelError, match="Or use `F2SA` on mini-batches"):
            trainer(tmp_path, max_steps=2).fit(Streamed(), datamodule=full())

    @pytest.mark.parametrize("solver", [HJFBiO, DARTS, partial(SOBA, products="difference")])
    def test_half_precision_of_differences(self, tmp_path: Path, solver: Any) -> None:
        words = "small differences of large numbers would be lost. Use 32-true or 64-true"
        refused(tmp_path, words, Streamed(solver=solver), precision="bf16-mixed")

    @pytest.mark.parametrize("solver", [SOBA, partial(DARTS, xi=0.0), partial(AID, N=1)])
    def test_without_differences_it_is_no_matter(self, solver: Any) -> None:
        made = solver([{"params": [v], "level": n} for n, v in LEVELS.items()])
        assert not made.takes_differences

    def test_half_precision(self, tmp_path: Path) -> None:
        words = "not supported with IVSP on all data: .* Use 32-true or 64-true"
        refused(tmp_path, words, Weighting(), precision="bf16-mixed")

    def test_half_precision_on_full_batches(self, tmp_path: Path) -> None:
        module = Weighting(solver=F2SA)
        with pytest.raises(MisconfigurationException, match="with F2SA on all data"):
            trainer(tmp_path, max_steps=2, precision="bf16-mixed").fit(
                module, datamodule=weighting_data()
            )


class TestTrainer:
    @pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
    def test_other_half_precision(self, tmp_path: Path, precision: Any) -> None:
        words = f"precision='{precision}'.*Use 32-true or 64-true or bf16-mixed"
        refused(tmp_path, words, Streamed(), precision=precision)

    def test_clipping_by_the_trainer(self, tmp_path: Path) -> None:
        words = r"gradient_clip_val=1.0.*clip by the solver's `upper_clip` and `lower_clip`"
        refused(tmp_path, words, Streamed(), gradient_clip_val=1.0)

    def test_clipping_by_the_solver(self, tmp_path: Path) -> None:
        """A step of plain gradient descent is at most the rate times the bound."""
        module = Streamed(solver=partial(F2SA, alpha=0.1, lower_clip=1e-3))
        before = module.point[1]
        fitted(tmp_path, module, loaders(), max_steps=1)
        moved = float(torch.linalg.vector_norm(module.point[1] - before))
        assert moved == pytest.approx(0.1 * 1e-3, rel=1e-3)

    def test_accumulation(self, tmp_path: Path) -> None:
        words = r"accumulate_grad_batches=2.*let the loader yield the larger batch, as `Chunks`"
        refused(tmp_path, words, Streamed(), accumulate_grad_batches=2)

    @pytest.mark.parametrize("kind", [list, Chunks])
    @pytest.mark.parametrize("made", [Streamed, Touching])
    def test_chunks_are_the_larger_batch(self, tmp_path: Path, made: Any, kind: Any) -> None:
        """The way out that the sentence names: a list of chunks is one batch."""
        whole = {"upper": samples(20, 1), "lower": samples(30, 2)}
        parts = {
            level: kind([tuple(t[a:b] for t in batch) for a, b in ((0, 8), (8, len(batch[0])))])
            for level, batch in whole.items()
        }
        ends = []
        for batch in (whole, parts):
            module = made(norm=False, dropout=0.0)
            data = DataLoader([batch, batch], batch_size=None)  # type: ignore[arg-type, list-item]
            fitted(tmp_path, module, data, precision="64-true")
            ends.append(module)
        for p, q in zip(ends[0].parameters(), ends[1].parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-9)

    def test_a_monitor_looks_at_chunks(self, tmp_path: Path) -> None:
        parts = {"upper": [samples(8, 1), samples(9, 3)], "lower": [samples(8, 2), samples(9, 4)]}
        module = Streamed(norm=False, envelope=Envelope(rho=0.1, sigma=0.0, delta=0.1))
        data = DataLoader([parts, parts], batch_size=None)  # type: ignore[arg-type, list-item]
        fitted(tmp_path, module, data, callbacks=[MoreauGapMonitor()])
        seen = module.certify(sample=True)
        assert "(102 upper and 102 lower samples)" in seen.evaluated_on  # of six batches


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


class Once:
    """A loader that can be gone through only once."""

    def __init__(self, batches: list[Any]) -> None:
        self.iterator = iter(batches)

    def __iter__(self) -> Any:
        return self.iterator


class TestLoaders:
    def test_an_empty_iterable(self, tmp_path: Path) -> None:
        data = {**loaders(), "upper": DataLoader(Nothing())}
        refused(tmp_path, "made no outer iteration in a whole epoch", Streamed(), data)

    def test_a_training_step_of_the_users_own(self, tmp_path: Path) -> None:
        class Mine(Streamed):
            def training_step(self, batch: Any, batch_idx: int = 0) -> None:
                pass

        refused(tmp_path, r"must call `super\(\).training_step", Mine())


class TestIndices:
    def test_weights_without_the_numbers_of_their_samples(self, tmp_path: Path) -> None:
        class Unnumbered(Streamed):
            def lower_loss(self, batch: Any) -> Tensor:
                losses = cross_entropy(self.network(batch[0]), batch[1], reduction="none")
                return (self.logits.sigmoid() * losses).mean()

        words = r"lower_loss` fails on the first mini-batch .*belongs to a sample by its number"
        refused(tmp_path, words, Unnumbered())

    def test_an_index_error_of_the_loss(self, tmp_path: Path) -> None:
        refused(tmp_path, "IndexError.*carried in the batch", Streamed(count=7))


class TestSchedulers:
    COSINE = partial(CosineAnnealingLR, T_max=5)

    def test_no_torch_optimiser(self, tmp_path: Path) -> None:
        module = Streamed(solver=F2SA, scheduler=self.COSINE)
        refused(tmp_path, "no level of F2SA has a torch optimiser.*`lower_optimizer`", module)

    def test_a_plateau_of_what(self, tmp_path: Path) -> None:
        module = Streamed(scheduler=ReduceLROnPlateau)
        refused(tmp_path, "its `monitor` None is not logged", module)

    def test_a_plateau_of_what_is_not_logged(self, tmp_path: Path) -> None:
        plan = {"scheduler": ReduceLROnPlateau, "monitor": "val_los"}
        refused(tmp_path, "'val_los' is not logged.*val_loss", Streamed(scheduler=plan))


class Sick(Streamed):
    """The loss of some lower batches is not a number.

    Args:
        sick: Their numbers, from 0.
    """

    def __init__(self, *sick: int) -> None:
        super().__init__(norm=False, dropout=0.0)
        self.sick = sick
        self.points: list[Tensor] = []

    def lower_loss(self, batch: Any) -> Tensor:
        value = super().lower_loss(batch)
        return value * float("nan") if self.trainer.global_step in self.sick else value

    def on_train_batch_end(self, *args: Any) -> None:
        self.points.append(self.point[1])


class TestNotFinite:
    def test_a_batch_is_skipped_and_counted(self, tmp_path: Path) -> None:
        module = Sick(1, 2)
        history = Recorder()
        run = trainer(tmp_path, max_steps=6, callbacks=[history, SolverMonitor()])
        run.fit(module, loaders(), loader(20, 3, 20))
        assert [step["skipped"] for step in history.steps] == [0, 1, 2, 2, 2, 2]
        assert [step["taken"] for step in history.steps] == [True, False, False, True, True, True]
        assert torch.equal(module.points[0], module.points[1])
        assert torch.equal(module.points[0], module.points[2])
        assert not torch.equal(module.points[2], module.points[3])
        assert float(run.callback_metrics["bilevel/skipped"]) == 2.0
        assert run.global_step == 6

    def test_running_statistics_are_taken_back_too(self, tmp_path: Path) -> None:
        """A sick input would stay in the statistics of batch normalisation for ever."""

        class SickInputs(Streamed):
            def upper_loss(self, batch: Any) -> Tensor:
                inputs = batch[0].clone()
                if self.trainer.global_step == 2:
                    inputs[0] = float("inf")
                return super().upper_loss((inputs, *batch[1:]))

            def on_train_batch_end(self, *args: Any) -> None:
                statistics.append(self.network[1].running_mean.clone())

        statistics: list[Tensor] = []
        fitted(tmp_path, SickInputs(), loaders(), max_steps=4)
        assert torch.equal(statistics[1], statistics[2])
        assert not torch.equal(statistics[0], statistics[1])
        assert not torch.equal(statistics[2], statistics[3])
        assert all(bool(found.isfinite().all()) for found in statistics)

    def test_the_run_ends_at_the_last_good_point(self, tmp_path: Path) -> None:
        module = Sick(*range(5, 99))
        last = LastCheckpoint(tmp_path)
        run = trainer(tmp_path, max_steps=40, callbacks=[last], enable_checkpointing=True)
        with pytest.raises(BilevelError, match="10 mini-batches in a row were not finite"):
            run.fit(module, loaders(), loader(20, 3, 20))
        assert torch.equal(module.point[1], module.points[4])
        saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
        assert torch.equal(saved["state_dict"]["logits"], module.logits)
        again = Sick()
        run = trainer(tmp_path, max_steps=16, callbacks=[last], enable_checkpointing=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a plain loader starts its epoch again
            run.fit(again, loaders(), loader(20, 3, 20), ckpt_path=tmp_path / "last.ckpt")
        assert again.last_step is not None
        assert again.last_step.taken  # type: ignore[attr-defined]


class TestMonitors:
    ENVELOPE = Envelope(0.1, 1.0, 1e-3)

    def monitors(self) -> list[Any]:
        return [
            KKTMonitor(every_n_steps=2),
            MoreauGapMonitor(every_n_steps=2),
            SolverMonitor(),
            CertificateReport(),
        ]

    def test_they_look_at_a_fixed_sample(self, tmp_path: Path, capsys: Any) -> None:
        module = Streamed(envelope=self.ENVELOPE)
        fitted(tmp_path, module, loaders(), callbacks=self.monitors())
        sample = "a fixed sample, the first 8 batches of this run (40 upper and 80 lower samples)"
        seen = module.certify(sample=True)
        assert seen.evaluated_on == f"{sample}, in eval mode"
        printed = capsys.readouterr()
        assert "all data (20 upper and 30 lower samples), in eval mode" in printed.out
        assert "all certificates of this run" in printed.out

    def test_they_leave_the_run_alone(self, tmp_path: Path) -> None:
        ends = []
        for callbacks in ([], self.monitors()):
            torch.manual_seed(1)
            module = Streamed(envelope=self.ENVELOPE)
            fitted(tmp_path, module, loaders(), callbacks=callbacks)
            ends.append(module)
        assert same_parameters(*ends)

    def test_too_few_passes_make_a_less_accurate_certificate(
        self, tmp_path: Path, capsys: Any
    ) -> None:
        """An envelope so wide that the proximal point is not found in the allowed passes."""
        module = Streamed(envelope=Envelope(1e3, 0.0, 1e-9))
        report = CertificateReport(tolerance=1e-4, passes=5)
        fitted(tmp_path, module, loaders(), callbacks=[KKTMonitor(tolerance=1e-4), report])
        found = report.certificate
        assert found is not None
        assert found.tolerance > 1e-4
        words = f"z to {found.tolerance:.1e} after 5 passes, so R may be larger by"
        assert words in found.evaluated_on
        assert words in " ".join(capsys.readouterr().out.split())
        # More passes find a lower point of the envelope, and so a larger gap.
        better = module.certify(tolerance=1e-4, passes=50)
        assert better.tolerance < found.tolerance
        assert better.residual > found.residual

    def test_they_never_end_it(self, tmp_path: Path) -> None:
        """A loss that fails in eval mode."""

        class Fragile(Streamed):
            def lower_loss(self, batch: Any) -> Tensor:
                value = super().lower_loss(batch)
                return value if self.training else value * float("nan")

        module = Fragile(envelope=self.ENVELOPE)
        callbacks = [KKTMonitor(), CertificateReport()]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fitted(tmp_path, module, loaders(), callbacks=callbacks)
        assert module.last_step is not None
        assert module.last_step.iteration == 12
        words = [str(warning.message) for warning in said]
        assert any("KKTMonitor has no certificate to look at" in text for text in words)
        assert any("There is no certificate: The lower-level function g" in text for text in words)

    def test_the_certificate_can_be_left_out(self, tmp_path: Path) -> None:
        report = CertificateReport(batches=0)
        module = Streamed(envelope=self.ENVELOPE)
        fitted(tmp_path, module, loaders(), callbacks=[report])
        assert report.certificate is None
        assert module.evaluation_time == 0.0

    def test_loaders_that_cannot_be_gone_through_again(self, tmp_path: Path) -> None:
        batches = [{"upper": samples(5, s), "lower": samples(10, s)} for s in range(4)]
        module = Streamed(envelope=self.ENVELOPE)
        fitted(tmp_path, module, Once(batches), max_epochs=1)
        with pytest.raises(MisconfigurationException, match="yields nothing when it is gone"):
            module.certify()


def test_units_are_rates_on_mini_batches(tmp_path: Path) -> None:
    module = Streamed(upper_unit=10.0)
    with pytest.raises(ValueError, match="a level's `lr` takes the place of its unit"):
        fitted(tmp_path, module, loaders())
