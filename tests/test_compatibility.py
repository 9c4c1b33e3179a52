"""What a Lightning user tries first: flags, callbacks, loggers, strategies, kinds of modules."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ProgressBar,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader, rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.imports import RequirementCache
from modules import MILD, Encoded, Weighting, samples, weighting_data
from running import same_parameters, trainer
from streaming import Streamed, loaders
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_bilevel import (
    IVSP,
    BilevelMixin,
    Box,
    CertificateMonitor,
    CertificateReport,
    Envelope,
    FullBatchDataModule,
    LastCheckpoint,
    OptimizationBudget,
    PenaltyMonitor,
    SolverCallable,
    SolverMonitor,
    stochastic,
)
from lightning_bilevel.reading import reading

pytestmark = pytest.mark.compatibility

BATCH = {"upper": samples(20, 1), "lower": samples(30, 2)}


def fitted(
    tmp_path: Path, module: Any = None, steps: int = 6, data: Any = None, **options: Any
) -> tuple[Any, Trainer]:
    module = Weighting() if module is None else module
    ours = trainer(tmp_path, **{"max_steps": steps, "log_every_n_steps": 5, **options})
    ours.fit(module, datamodule=data or weighting_data())
    return module, ours


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Weighting:
    """The module after six steps of a Trainer with nothing on."""
    module: Weighting = fitted(tmp_path_factory.mktemp("plain"))[0]
    return module


class TestFlags:
    """Flags of the Trainer that must not change the path."""

    @pytest.mark.parametrize(
        "flags",
        [
            {"log_every_n_steps": 1},
            {"check_val_every_n_epoch": 2},
            {"val_check_interval": 2},
            {"num_sanity_val_steps": 0},
            {"limit_val_batches": 0},
            {"detect_anomaly": True},
            {"deterministic": True},
            {"inference_mode": False},
            {"profiler": "simple"},
            {"reload_dataloaders_every_n_epochs": 1},
            {"max_time": "00:01:00:00"},
            {"enable_checkpointing": True},
            {"enable_model_summary": True},
            {
                "barebones": True,
                "enable_model_summary": None,
                "enable_progress_bar": None,
                "logger": None,
            }
            | {"enable_checkpointing": None, "log_every_n_steps": None},
            {"sync_batchnorm": True},
        ],
        ids=lambda flags: next(iter(flags)),
    )
    def test_the_path_is_that_of_the_plain_trainer(
        self, tmp_path: Path, plain: Weighting, flags: dict[str, Any]
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module, _ = fitted(tmp_path, **flags)
        assert same_parameters(module, plain)

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            ({"accumulate_grad_batches": 2}, "yield the larger batch, as `Chunks`"),
            ({"gradient_clip_val": 1.0}, "does not reach the steps of a bilevel solver"),
            ({"precision": "bf16-mixed"}, "with IVSP on all data: .* Use 32-true or"),
            ({"precision": "16-true"}, "is not supported with IVSP on"),
        ],
    )
    def test_what_cannot_be_is_refused(
        self, tmp_path: Path, flags: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(MisconfigurationException, match=words):
            fitted(tmp_path, **flags)

    @pytest.mark.parametrize(
        "callback",
        [
            LearningRateMonitor(),
            Timer(),
            TQDMProgressBar(),
            EarlyStopping("bilevel/upper", check_on_train_epoch_end=True),
            ModelCheckpoint(monitor="bilevel/upper"),
            RichProgressBar if RequirementCache("rich") else None,
        ],
        ids=lambda callback: getattr(callback, "__name__", type(callback).__name__),
    )
    def test_callbacks_of_lightning_do_not_change_the_path(
        self, tmp_path: Path, plain: Weighting, callback: Any
    ) -> None:
        if callback is None:
            pytest.skip("rich is not installed")
        callback = callback() if isinstance(callback, type) else callback
        logger = CSVLogger(tmp_path)
        bar = {"enable_progress_bar": True} if isinstance(callback, ProgressBar) else {}
        checkpoints = (
            {"enable_checkpointing": True} if isinstance(callback, ModelCheckpoint) else {}
        )
        module, _ = fitted(tmp_path, callbacks=[callback], logger=logger, **bar, **checkpoints)
        assert same_parameters(module, plain)

    def test_callbacks_of_ours_do_not_change_the_path(
        self, tmp_path: Path, plain: Weighting
    ) -> None:
        ours = [
            PenaltyMonitor(),
            CertificateMonitor(),
            SolverMonitor(),
            CertificateReport(),
        ]
        loggers = [CSVLogger(tmp_path), TensorBoardLogger(tmp_path)]
        module, _ = fitted(
            tmp_path,
            callbacks=[*ours, LastCheckpoint(tmp_path)],
            logger=loggers,
            enable_checkpointing=True,
        )
        assert same_parameters(module, plain)
        assert (tmp_path / "last.ckpt").is_file()


class TestAveragedWeights:
    """Callbacks that write an average into the module when fit ends."""

    def test_an_exponential_average(self, tmp_path: Path, plain: Weighting) -> None:
        """The solver's path is its own, and the certificate says what it is of."""
        path: list[Tensor] = []

        class Reader(Callback):
            def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
                path.append(pl_module.logits.detach().clone())

        averaging = WeightAveraging(use_buffers=False)
        module, _ = fitted(tmp_path, callbacks=[Reader(), averaging])
        assert torch.equal(path[-1], plain.logits)
        torch.testing.assert_close(module.logits.detach(), torch.stack(path).mean(0))
        assert module.certify().point.startswith("weights that were written after iteration 6")
        assert plain.certify().point == "the last iterate, iteration 6"

    def test_swa(self, tmp_path: Path) -> None:
        averaging = StochasticWeightAveraging(swa_lrs=[0.1, 0.1], swa_epoch_start=1)
        module, _ = fitted(
            tmp_path,
            steps=-1,
            max_epochs=3,
            callbacks=[averaging],
            data=weighting_data(epoch_length=2),
        )
        assert module.last_step.iteration == 6
        assert module.certify().point.startswith("weights that were written after iteration 6")


@pytest.mark.integration
def test_no_certificate_json_is_lost_without_a_logger(tmp_path: Path) -> None:
    fitted(tmp_path, callbacks=[CertificateReport()])
    assert (tmp_path / "certificate.json").is_file()


class TestMetrics:
    """What stands in ``callback_metrics`` when somebody looks."""

    @pytest.mark.parametrize("watched", [True, False])
    def test_a_callback_sees_the_value_of_each_step_or_of_the_last_logged_one(
        self, tmp_path: Path, watched: bool
    ) -> None:
        """Of each step where a callback monitors such a number."""
        seen: list[tuple[float, float]] = []

        class Reader(Callback):
            def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
                seen.append(
                    (float(trainer.callback_metrics["bilevel/upper"]), pl_module.last_step.upper)
                )

        stop = EarlyStopping("bilevel/upper", check_on_train_epoch_end=True)
        callbacks = [Reader(), *([stop] if watched else [])]
        _, ours = fitted(tmp_path, steps=12, callbacks=callbacks)
        assert len(seen) == 12
        truth = [truth for _, truth in seen]
        if not watched:  # logged: iterations 1, 5, 10; the end of an epoch shows its last number
            truth = [truth[i] for i in [0] * 4 + [4] * 5 + [9] * 3]
        assert [value for value, _ in seen] == pytest.approx(truth, rel=1e-6)
        assert float(ours.callback_metrics["bilevel/upper"]) == pytest.approx(seen[-1][1], rel=1e-6)

    def test_logged_metrics_and_the_usual_bar_have_the_main_values(self, tmp_path: Path) -> None:
        module, ours = fitted(tmp_path, steps=6, log_every_n_steps=3)
        assert float(ours.logged_metrics["bilevel/upper"]) == pytest.approx(
            module.last_step.upper, rel=1e-6
        )
        assert set(ours.progress_bar_metrics) >= {
            "upper",
            "moreau_gap",
            "penalty",
        }
        assert ours.progress_bar_metrics["moreau_gap"] == module.last_step.residual

    def test_what_a_monitor_found_goes_with_the_next_iteration(self, tmp_path: Path) -> None:
        seen: list[bool] = []

        class Reader(Callback):
            def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
                seen.append("bilevel/kkt_residual" in trainer.callback_metrics)

        callbacks = [CertificateMonitor(every_n_steps=3), Reader()]
        _, ours = fitted(tmp_path, steps=9, callbacks=callbacks)
        assert seen == [False, False, True] * 3
        assert "bilevel/kkt_residual" in ours.callback_metrics

    @pytest.mark.parametrize("validation", [True, False])
    def test_early_stopping_waits_for_no_old_value(self, tmp_path: Path, validation: bool) -> None:
        """Other monitors look within their share of the time; early stopping waits for this one."""
        scores: list[tuple[int, float]] = []

        class Recorded(EarlyStopping):
            def _run_early_stopping_check(self, trainer: Trainer) -> None:
                scores.append((trainer.global_step, float(trainer.callback_metrics[self.monitor])))
                super()._run_early_stopping_check(trainer)

        watched = Recorded("bilevel/kkt_stationarity", patience=50)
        limits = {} if validation else {"limit_val_batches": 0}
        monitor = CertificateMonitor(share=0.0)
        module, _ = fitted(
            tmp_path,
            steps=30,
            callbacks=[watched, monitor],
            data=weighting_data(epoch_length=5),
            **limits,
        )
        every, _ = fitted(
            tmp_path,
            steps=30,
            callbacks=[CertificateMonitor(every_n_steps=5)],
            data=weighting_data(epoch_length=5),
        )
        assert [step for step, _ in scores] == list(range(5, 31, 5))
        assert len({value for _, value in scores}) == 6  # each its own
        assert same_parameters(module, every)

    def test_a_checkpoint_every_few_steps_is_scored_by_its_own_point(self, tmp_path: Path) -> None:
        saved = ModelCheckpoint(
            tmp_path, monitor="bilevel/violation", save_top_k=-1, every_n_train_steps=2
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*manual optimization.*")
            fitted(
                tmp_path,
                steps=8,
                callbacks=[saved, CertificateMonitor(share=0.0)],
                enable_checkpointing=True,
            )
        other = CertificateMonitor(every_n_steps=2)
        violations: list[float] = []

        class Reader(Callback):
            def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
                if "bilevel/violation" in trainer.callback_metrics:
                    violations.append(float(trainer.callback_metrics["bilevel/violation"]))

        fitted(tmp_path, steps=8, callbacks=[other, Reader()])
        assert sorted(float(score) for score in saved.best_k_models.values()) == pytest.approx(
            sorted(violations)
        )


def test_a_run_resumed_after_restore_best_goes_on_from_its_last_point(tmp_path: Path) -> None:
    """The file has the best point for a reader, and the last one for the run that goes on."""

    def run(steps: int, folder: str, **resume: Any) -> tuple[Any, CertificateMonitor]:
        monitor = CertificateMonitor(restore_best=True, every_n_steps=1)
        callbacks = [monitor, CertificateReport(), LastCheckpoint(tmp_path / folder)]
        return fitted_with(steps, callbacks, **resume), monitor

    def fitted_with(steps: int, callbacks: list[Any], **resume: Any) -> Any:
        module = Weighting()
        ours = trainer(tmp_path, max_steps=steps, callbacks=callbacks, enable_checkpointing=True)
        ours.fit(module, datamodule=weighting_data(), **resume)
        return module

    plain = fitted_with(40, [LastCheckpoint(tmp_path / "plain")])
    first, monitor = run(20, "best")
    assert monitor.best is not None
    assert monitor.best.iteration < 20
    weights = torch.load(tmp_path / "best" / "last.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(weights["logits"], monitor.best.x)
    assert torch.equal(first.logits, monitor.best.x)
    kept = [CertificateMonitor(), CertificateReport(), LastCheckpoint(tmp_path / "best")]
    resumed = fitted_with(40, kept, ckpt_path=tmp_path / "best" / "last.ckpt")
    assert same_parameters(resumed, plain)


def test_a_run_goes_on_from_its_last_point_whatever_was_restored(tmp_path: Path) -> None:
    module, run = fitted(tmp_path)
    x, y = module.point
    for factor in (0.5, 0.25):
        module.restore((factor * x, factor * y), 1.0)
    run.save_checkpoint(tmp_path / "twice.ckpt")
    saved = torch.load(tmp_path / "twice.ckpt", weights_only=True)
    assert torch.equal(saved["state_dict"]["logits"], 0.25 * x)
    assert torch.equal(saved["lightning_bilevel"]["last"]["logits"], x)


def test_a_run_that_goes_on_after_restore_has_its_own_point_and_multiplier(tmp_path: Path) -> None:
    class Back(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if module.last_step.iteration == 3:
                module.restore(module.point, 123.0)

    module, run = fitted(tmp_path, callbacks=[Back()])
    certificate = module.certify()
    assert certificate.multiplier == module.last_step.multiplier
    run.save_checkpoint(tmp_path / "on.ckpt")
    saved = torch.load(tmp_path / "on.ckpt", weights_only=True)
    assert saved["lightning_bilevel"]["last"] is None


class TestFrozen:
    def test_what_is_frozen_after_declare_stays(self, tmp_path: Path) -> None:
        module = Weighting()
        module.classifier.bias.requires_grad_(False)
        bias = module.classifier.bias.detach().clone()
        fitted(tmp_path, module)
        assert torch.equal(module.classifier.bias, bias)
        assert len(module.point[1]) == 6

    def test_a_finetuning_callback_freezes(self, tmp_path: Path) -> None:
        class Freeze(BaseFinetuning):
            def freeze_before_training(self, pl_module: Any) -> None:
                self.freeze(pl_module.encoder[0], train_bn=False)
                pl_module.encoder[0].bias.requires_grad_(True)

            def finetune_function(self, *args: Any) -> None: ...

        module = Encoded()
        weight = module.encoder[0].weight.detach().clone()
        fitted(
            tmp_path,
            module,
            callbacks=[Freeze()],
            data=FullBatchDataModule(samples(20, 1), samples(10, 2)),
        )
        assert torch.equal(module.encoder[0].weight, weight)  # type: ignore[arg-type]
        assert module.last_step is not None

    def test_one_that_unfreezes_is_told_so(self, tmp_path: Path) -> None:
        class Unfreeze(BaseFinetuning):
            def freeze_before_training(self, pl_module: Any) -> None:
                pl_module.classifier.bias.requires_grad_(False)

            def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
                if epoch == 1:
                    self.unfreeze_and_add_param_group(pl_module.classifier, optimizer)

        warnings.filterwarnings("ignore", message="The provided params to be frozen already exist")
        with pytest.raises(
            ValueError,
            match="cannot take parameters into a run whose vectors x and y have a fixed length",
        ):
            fitted(tmp_path, callbacks=[Unfreeze()], steps=30)

    def test_a_level_that_is_frozen_whole_is_refused(self, tmp_path: Path) -> None:
        module = Weighting()
        module.classifier.requires_grad_(False)
        with pytest.raises(
            ValueError, match=r"`Weighting.declare\(lower=...\)` has no trainable parameter"
        ):
            fitted(tmp_path, module)

    def test_a_parameter_twice_in_a_level_is_refused(self) -> None:
        module = Weighting()
        with pytest.raises(ValueError, match=r"declare\(lower=...\)` has .* or has one twice"):
            module.declare(
                upper=module.logits,
                lower=[module.classifier, module.classifier.weight],
                solver=MILD,
            )

    def test_the_frozen_part_of_several_sets_leaves_its_set(self) -> None:
        module = Weighting()
        module.bound = nn.Parameter(torch.zeros(2), requires_grad=False)
        sets = [Box(-1, 1), Box(-9, 9)]
        module.declare(
            upper=[module.bound, module.logits],
            lower=module.classifier,
            upper_set=sets,
            solver=MILD,
        )
        module.point = 20 * torch.ones(30), module.point[1]
        assert torch.equal(
            module.bilevel_problem(BATCH).upper_set.project(module.point[0]), 9 * torch.ones(30)
        )


class TestTrainingStep:
    def test_one_that_never_steps_is_noticed(self, tmp_path: Path) -> None:
        class Mine(Weighting):
            def training_step(self, batch: Any, batch_idx: int = 0) -> None: ...

        with pytest.raises(
            MisconfigurationException,
            match=r"`Mine` made no outer iteration in a whole epoch",
        ):
            fitted(tmp_path, Mine(), max_epochs=1)

    def test_one_that_calls_ours_is_fine(self, tmp_path: Path) -> None:
        class Mine(Weighting):
            def training_step(self, batch: Any, batch_idx: int = 0) -> None:
                super().training_step(batch, batch_idx)

        assert same_parameters(fitted(tmp_path, Mine())[0], fitted(tmp_path)[0])

    def test_one_that_never_steps_is_noticed_with_callbacks_too(self, tmp_path: Path) -> None:
        class Mine(Weighting):
            def training_step(self, batch: Any, batch_idx: int = 0) -> None: ...

        callbacks = [
            CertificateReport(),
            CertificateMonitor(every_n_steps=1),
            OptimizationBudget("1m"),
            PenaltyMonitor(),
            SolverMonitor(),
        ]
        with pytest.raises(MisconfigurationException, match="made no outer iteration"):
            fitted(tmp_path, Mine(), max_epochs=1, callbacks=callbacks)

    @pytest.mark.parametrize("optimizers", [1, 2])
    def test_another_optimizer_is_refused(self, tmp_path: Path, optimizers: int) -> None:
        class Mine(Weighting):
            def configure_optimizers(self) -> Any:
                made = [torch.optim.Adam(self.parameters()) for _ in range(optimizers)]
                return made[0] if optimizers == 1 else made

        with pytest.raises(MisconfigurationException, match="0 with parameters of the upper"):
            fitted(tmp_path, Mine())

    def test_automatic_optimization_is_refused(self, tmp_path: Path) -> None:
        module = Weighting()
        module.automatic_optimization = True
        with pytest.raises(
            MisconfigurationException, match="must leave `automatic_optimization` at False"
        ):
            fitted(tmp_path, module)

    def test_a_scheduler_beside_the_solver_is_fine(self, tmp_path: Path) -> None:
        class Mine(Weighting):
            def configure_optimizers(self) -> Any:
                solver = super().configure_optimizers()
                return [solver], [torch.optim.lr_scheduler.ConstantLR(solver, factor=1.0)]

        assert fitted(tmp_path, Mine())[0].last_step.iteration == 6


class TestMiniBatches:
    """Batches that change: what the certificate is of, and an ended loader is named."""

    @staticmethod
    def loaders(sizes: dict[str, int], mode: str) -> Any:
        made = {}
        for (level, size), batch in zip(
            sizes.items(), (samples(20, 1), samples(30, 2)), strict=True
        ):
            made[level] = DataLoader(TensorDataset(*batch), batch_size=size, shuffle=False)
        return CombinedLoader(made, mode)  # type: ignore[arg-type]

    def run(self, tmp_path: Path, loader: Any) -> Any:
        meha = stochastic.MEHA(gamma=0.5)
        module = Weighting(solver=None, method=meha, envelope=Envelope(0.1, 1.0, 1e-3))
        trainer(tmp_path, max_steps=6).fit(
            module, loader, DataLoader(TensorDataset(*samples(20, 3)), batch_size=20)
        )
        return module

    def test_the_certificate_after_mini_batches_is_of_all_data(self, tmp_path: Path) -> None:
        module = self.run(tmp_path, self.loaders({"upper": 5, "lower": 10}, "max_size_cycle"))
        certificate = module.certify()
        label = "all data (20 upper and 30 lower samples), in eval mode"
        assert ("evaluated on", label) in certificate.rows()
        assert label in reading(certificate)
        assert (
            module.certify(batch=BATCH).evaluated_on
            == "the given batch (20 upper and 30 lower samples), in eval mode"
        )

    def test_a_full_batch_that_is_collated_anew_is_the_same_problem(self, tmp_path: Path) -> None:
        module = Weighting()
        loader = self.loaders({"upper": 20, "lower": 30}, "max_size_cycle")
        validation = DataLoader(TensorDataset(*samples(20, 3)), batch_size=20)
        trainer(tmp_path, max_steps=6).fit(module, loader, validation)
        assert module.certify().evaluated_on == ""
        # Nothing about the current point was evaluated anew: one pass of f per trial.
        assert module.last_step is not None
        assert module.last_step.calls.upper == module.last_step.trials  # type: ignore[attr-defined]
        assert same_parameters(module, fitted(tmp_path)[0])


class Cleaner(BilevelMixin, LightningModule):
    """The README's class, with its hyper-parameters saved."""

    def __init__(self, n_train: int, solver: SolverCallable = IVSP) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.save_hyperparameters()
        self.logits = nn.Parameter(torch.zeros(n_train))
        self.classifier = nn.Linear(2, 3)
        self.declare(
            upper=self.logits,
            lower=self.classifier,
            upper_set=Box(-100, 100),
            lower_set=Box(-100, 100),
            solver=solver,
        )

    def upper_loss(self, batch: Any) -> Tensor:
        inputs, labels, _ = batch
        return cross_entropy(self.classifier(inputs), labels)

    def lower_loss(self, batch: Any) -> Tensor:
        inputs, labels, _ = batch
        return (
            self.logits.sigmoid() * cross_entropy(self.classifier(inputs), labels, reduction="none")
        ).mean()


class TestSavedModules:
    def test_saved_hyperparameters_load_and_resume(self, tmp_path: Path) -> None:
        data = FullBatchDataModule(BATCH["upper"], BATCH["lower"])
        module, ours = fitted(tmp_path, Cleaner(30), data=data)
        ours.save_checkpoint(tmp_path / "cleaner.ckpt")
        loaded = Cleaner.load_from_checkpoint(tmp_path / "cleaner.ckpt")
        assert loaded.hparams["solver"] is IVSP
        assert same_parameters(loaded, module)
        whole, _ = fitted(tmp_path, Cleaner(30), steps=12, data=data)
        resumed = Cleaner(30)
        trainer(tmp_path, max_steps=12).fit(
            resumed, datamodule=data, ckpt_path=tmp_path / "cleaner.ckpt"
        )
        assert same_parameters(resumed, whole)

    def test_a_solver_with_its_constants_is_left_out_with_a_word(self, tmp_path: Path) -> None:
        data = FullBatchDataModule(BATCH["upper"], BATCH["lower"])
        module, ours = fitted(tmp_path, Cleaner(30, solver=MILD), data=data)
        with pytest.warns(
            UserWarning,
            match="`Cleaner` keeps solver out of its checkpoint, which holds data and no code",
        ):
            ours.save_checkpoint(tmp_path / "cleaner.ckpt")
        loaded = Cleaner.load_from_checkpoint(tmp_path / "cleaner.ckpt", solver=MILD)
        assert same_parameters(loaded, module)

    @pytest.mark.parametrize("solver", [MILD, IVSP])
    def test_a_loaded_module_has_the_certificate_of_its_run(
        self, tmp_path: Path, solver: Any
    ) -> None:
        """Without a Trainer, and with another one; with the constants that the run chose."""
        module, ours = fitted(tmp_path, Weighting(solver=solver), enable_checkpointing=True)
        expected = module.certify()
        ours.save_checkpoint(tmp_path / "run.ckpt")
        loaded = Weighting.load_from_checkpoint(tmp_path / "run.ckpt", solver=solver)
        assert loaded.envelope == module.envelope
        assert loaded.certify(batch=BATCH) == expected
        other = Weighting.load_from_checkpoint(tmp_path / "run.ckpt", solver=solver)
        trainer(tmp_path).validate(other, datamodule=weighting_data(), verbose=False)
        assert other.certify(batch=BATCH) == expected

    def test_certify_says_what_it_needs(self) -> None:
        with pytest.raises(
            RuntimeError,
            match=(
                r"call it after `Trainer.fit` in the same process, or give it one, `certify\(batch"
            ),
        ):
            Weighting().certify()

    def test_a_module_is_pickled_after_fit(self, tmp_path: Path) -> None:
        module, _ = fitted(tmp_path)
        for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module), reloaded(module)):
            assert same_parameters(other, module)
            assert other.certify(batch=BATCH) == module.certify()

    def test_a_pickled_module_is_fitted_on(self, tmp_path: Path) -> None:
        module, _ = fitted(tmp_path)
        other = pickle.loads(pickle.dumps(module))
        assert same_parameters(fitted(tmp_path, module)[0], fitted(tmp_path, other)[0])


def reloaded(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_compiled_module_is_fitted_without_tracing_the_solver(tmp_path: Path) -> None:
    """Dynamo would trace the line search for minutes: it must not compile more with more steps."""
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    class Forward(Weighting):
        def forward(self, inputs: Tensor) -> Tensor:
            logits: Tensor = self.classifier(inputs)
            return logits

        def upper_loss(self, batch: Any) -> Tensor:
            return cross_entropy(self(batch[0]), batch[1])

    module = Forward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(tmp_path, max_steps=6).fit(
            torch.compile(module, backend=backend), datamodule=weighting_data()
        )  # type: ignore[arg-type]
    # Forward, with and without gradients; the solver would be dozens.
    assert 1 <= len(compiled) <= 4
    torch.testing.assert_close(module.logits, fitted(tmp_path)[0].logits)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_compiled_part_of_the_lower_level(tmp_path: Path, streamed: bool) -> None:
    """It is compiled, and the path is that of the module as it was."""
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    def run(compile: bool) -> Any:
        module: Any = Streamed(dropout=0.0) if streamed else Weighting()
        part = module.network if streamed else module.classifier
        if compile:
            part.compile(backend=backend)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            trainer(tmp_path, max_steps=4, limit_val_batches=0).fit(
                module, loaders() if streamed else weighting_data()
            )
        return module

    assert same_parameters(run(compile=True), run(compile=False))
    assert len(compiled) <= 8
    assert compiled or torch.__version__.startswith("2.4.")  # which compiles nothing here


def test_fabric_takes_the_problem_as_a_closure() -> None:
    module, plain = Weighting(), Weighting()
    fabric = Fabric(accelerator="cpu", devices=1)
    solver = fabric.setup_optimizers(MILD(module._declared().groups()))
    reference, problem = MILD(plain._declared().groups()), plain.bilevel_problem(BATCH)
    ours = module.bilevel_problem(BATCH)
    for _ in range(5):
        info = solver.step(lambda: ours)
        assert info.upper == reference.step(problem=problem).upper
    assert same_parameters(module, plain)


@pytest.mark.parametrize("given", [None, 3.0])
def test_a_step_without_a_problem_is_refused(given: Any) -> None:
    with pytest.raises(
        TypeError, match=r"`IVSP.step` was given a (NoneType|float): it needs f and g"
    ):
        MILD(Weighting()._declared().groups()).step(lambda: given)


class Collectives(SingleDeviceStrategy):
    """One process that writes down what it would say to others."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.said: list[str] = []

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self.said.append("broadcast")
        return super().broadcast(obj, src)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.said.append("barrier")

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        self.said.append("reduce")
        return super().reduce(tensor, *args, **kwargs)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self.said.append("decision")
        return super().reduce_boolean_decision(decision, all)


def test_the_first_process_says_to_the_others_what_they_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process makes the same collective calls: none is in code for the first process only."""

    def conversation(rank: int) -> list[str]:
        monkeypatch.setattr(rank_zero_only, "rank", rank)
        monkeypatch.setattr(Collectives, "is_global_zero", property(lambda self: rank == 0))
        strategy, folder = Collectives(), tmp_path / str(rank)
        monitors = [
            PenaltyMonitor(),
            CertificateMonitor(restore_best=True, every_n_steps=1),
            SolverMonitor(),
        ]
        callbacks = [
            *monitors,
            CertificateReport(),
            LastCheckpoint(folder, "1ms"),
        ]
        logger = TensorBoardLogger(folder)
        fitted(
            folder,
            callbacks=callbacks,
            strategy=strategy,
            logger=logger,
            enable_checkpointing=True,
            log_every_n_steps=2,
        )
        return strategy.said

    first, second = conversation(0), conversation(1)
    assert "broadcast" in first
    assert second == first
