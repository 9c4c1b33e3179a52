"""LightningCLI for bilevel modules: with monitors and the certificate, `certify` and `probe`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from jsonargparse.typing import PositiveFloat
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

# Imported so that YAML can use the short names of its classes.
import lightning_bilevel.modules as _modules  # noqa: F401
from lightning_bilevel.callbacks.certificate import CertificateMonitor, CertificateReport, as_text
from lightning_bilevel.callbacks.ends import LastCheckpoint, OptimizationBudget, write_whole_files
from lightning_bilevel.callbacks.monitors import PenaltyMonitor, SolverMonitor, solver_of
from lightning_bilevel.checkpoint import WholeFileIO
from lightning_bilevel.core.certificate import Certificate
from lightning_bilevel.data.fullbatch import FullBatchDataModule, Repeated
from lightning_bilevel.logging import run_folder
from lightning_bilevel.output import table, write_whole
from lightning_bilevel.reading import Tally
from lightning_bilevel.solvers.ivsp.solver import IVSP
from lightning_bilevel.whole_data import gathered

# A Trainer that restores a run of any number of epochs, and writes nothing.
WITHOUT_STEPS: dict[str, Any] = {"max_steps": 0, "max_epochs": -1, "num_sanity_val_steps": 0}
WITHOUT_STEPS |= dict.fromkeys(("fast_dev_run", "logger", "enable_checkpointing"), False)
WITHOUT_STEPS |= dict.fromkeys(("enable_progress_bar", "enable_model_summary"), False)


class BilevelTrainer(Trainer):
    """A Trainer that also reads a run, without training or writing files.

    For that it is made with :data:`WITHOUT_STEPS`.
    """

    def certify(
        self,
        model: Any,
        datamodule: Any = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
        tolerance: PositiveFloat | None = None,
        proved: bool = False,
    ) -> Certificate:
        """Print the certificate of a checkpoint.

        Args:
            model: The module that the checkpoint was saved with.
            datamodule: Its data.
            ckpt_path: The checkpoint.
            weights_only: As for fit.
            tolerance: The accuracy of the proximal point.
            proved: Look at the theorem's point.
        """
        if not ckpt_path:
            raise MisconfigurationException("`certify` needs `--ckpt_path FILE`.")
        self.fit(model, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=weights_only)
        batch = None if model.on_mini_batches else self._whole_batch(datamodule)
        found: Certificate | None = model.certify(batch=batch, tolerance=tolerance, proved=proved)
        name, solver = type(model).__name__, solver_of(self)
        if found is None:
            raise MisconfigurationException(f"`{name}` has no Moreau envelope to certify by.")
        title = f"{type(solver).__name__} on {name}, {Path(ckpt_path).name}"
        callbacks = cast(Any, self).callbacks
        tally = next((c.tally for c in callbacks if isinstance(c, CertificateReport)), Tally())
        rank_zero_only(print)(as_text(title, found, tally, solver))
        return found

    def probe(
        self,
        model: Any,
        datamodule: Any = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Print the constants that IVSP would choose for a problem, and why.

        Args:
            model: The problem.
            datamodule: Its data.
            ckpt_path: Not used; the config of a fit may have one.
            weights_only: Not used either.
        """
        self.fit(model, datamodule=datamodule)
        problem = model.problem_on(self._whole_batch(datamodule))
        delta = 1e-3 if model.envelope is None else model.envelope.delta
        given = solver_of(self).hyper_parameters
        rows = [
            (name, why if given.get(name) is None else f"{why}; given: {given[name]:g}")
            for name, why in IVSP(model.parameter_groups(), delta=delta).probe(problem)
        ]
        title = f"IVSP on {type(model).__name__}, delta {delta:g}: what it would choose"
        rank_zero_only(print)(
            f"{table(title, rows)}\nFrom {problem.calls.passes} passes of f and g at the start. "
            "What the config leaves out, IVSP chooses so."
        )

    def _whole_batch(self, datamodule: Any) -> Any:
        """Return the batch of a full-batch run, or all data of one on mini-batches."""
        loader: Any = self.train_dataloader
        if not getattr(loader, "full_batch", False):
            if not isinstance(datamodule, FullBatchDataModule):
                return gathered(self, batches=1000).batch
            loader = FullBatchDataModule.train_dataloader(datamodule)
        batch = loader.batch if isinstance(loader, Repeated) else next(iter(loader))
        batch = self.precision_plugin.convert_input(batch)
        return move_data_to_device(batch, self.strategy.root_device)


class _SaveConfig(SaveConfigCallback):
    """Saves the resolved config beside the logs of its run.

    Lightning's place is the same for all runs of W&B and MLflow, and of a run without a logger.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        folder = run_folder(trainer)  # a collective call
        if folder is not None and trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            config = self.parser.dump(self.config, skip_none=False)
            write_whole(folder / self.config_filename, config.encode())


class BilevelCLI(LightningCLI):
    """LightningCLI for bilevel modules; it adds monitors, and ``fit`` ends with the certificate."""

    def __init__(self, args: list[str] | None = None, **kwargs: Any) -> None:
        super().__init__(
            LightningModule,
            LightningDataModule,
            trainer_class=BilevelTrainer,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            args=args,
            **{"save_config_callback": _SaveConfig, **kwargs},
        )

    @override
    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        given = {"model", "datamodule"}
        return {**LightningCLI.subcommands(), "certify": given, "probe": given}

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        # Raised, because jsonargparse would print the usage, 50 lines, above its message.
        return super().init_parser(**{"exit_on_error": False, **kwargs})

    @override
    def _parse_ckpt_path(self) -> None:
        """Refuse what is no checkpoint by a sentence: Lightning reads the file here first."""
        if self.config.get("subcommand"):
            path = self.config[self.config.subcommand].ckpt_path
            if path and Path(path).is_file():
                WholeFileIO().load_checkpoint(path)
        super()._parse_ckpt_path()

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # A plain class: Lightning would add a second one of a callback that the config names.
        parser.add_class_arguments(CertificateMonitor, "monitor", sub_configs=True)
        parser.add_argument(
            "--budget", type=str | None, help="end fit after this time in the solver"
        )

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        keys = ("trainer", "monitor", "budget")
        settings, monitor, budget = (self._get(self.config_init, key) for key in keys)
        given = settings["callbacks"] or []
        named: list[Callback] = given if isinstance(given, list) else [given]
        # One that the config names is not added. The report comes last: it certifies the end.
        usual = [PenaltyMonitor(), SolverMonitor(), monitor, CertificateReport()]
        added = [callback for callback in usual if type(callback) not in map(type, named)]
        if budget is not None:
            added.insert(0, OptimizationBudget(budget))
            kwargs |= {"max_epochs": -1, "max_steps": -1}
        if settings["accelerator"] == "auto" and MPSAccelerator.is_available():
            kwargs["accelerator"] = "cpu"  # Apple's GPU has no float64
        if self.subcommand in ("certify", "probe"):
            self.save_config_callback = None
            kwargs |= {**WITHOUT_STEPS, "callbacks": [usual[-1]]}
        trainer = super().instantiate_trainer(**{"callbacks": [*named, *added], **kwargs})
        # Replace Lightning's own progress bar, whose drawing may take longer than a step, and its
        # checkpoint callback, but not the user's.
        callbacks = cast(Any, trainer).callbacks
        for index, callback in enumerate(callbacks):
            if type(callback) in (TQDMProgressBar, RichProgressBar) and callback not in named:
                callbacks[index] = type(callback)(refresh_rate=10)
            elif type(callback) is ModelCheckpoint and callback not in named:
                callbacks[index] = LastCheckpoint(Path(trainer.default_root_dir) / "checkpoints")
        write_whole_files(trainer)
        return trainer
