"""``lightning-bilevel certify`` and ``probe``: read a run without training or writing files."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse.typing import PositiveFloat
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from lightning_bilevel.callbacks.certificate_report import as_text
from lightning_bilevel.callbacks.monitor import solver_of
from lightning_bilevel.cli.app import BilevelCLI
from lightning_bilevel.core.certificate import Certificate
from lightning_bilevel.data.fullbatch import FullBatchDataModule, Repeated
from lightning_bilevel.solvers.ivsp.solver import IVSP
from lightning_bilevel.table import table
from lightning_bilevel.whole_data import gathered

__all__ = ["WITHOUT_STEPS", "certificate_of", "certify", "probe", "probed", "restore"]

# A Trainer that restores a run of any number of epochs.
WITHOUT_STEPS: dict[str, Any] = {"max_steps": 0, "max_epochs": -1, "num_sanity_val_steps": 0}
WITHOUT_STEPS |= dict.fromkeys(("fast_dev_run", "logger", "enable_checkpointing"), False)
WITHOUT_STEPS |= dict.fromkeys(("enable_progress_bar", "enable_model_summary"), False)


def restore(trainer: Trainer, model: Any, datamodule: Any, **checkpoint: Any) -> None:
    """Give module, solver and callbacks the state of a checkpoint, or of the start of a run.

    Args:
        trainer: A ``Trainer(**WITHOUT_STEPS)``.
        model: The module that the checkpoint was saved with.
        datamodule: Its data.
        checkpoint: ``ckpt_path`` and ``weights_only``, as for ``Trainer.fit``.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`, callbacks")
        trainer.fit(model, datamodule=datamodule, **checkpoint)


def certificate_of(
    trainer: Trainer, model: Any, datamodule: Any, **options: Any
) -> Certificate | None:
    """Return the certificate of a restored module, as its run would evaluate it.

    Args:
        trainer: The Trainer that has restored it.
        model: The module.
        datamodule: Its data. A run on mini-batches asks its loaders for all of them.
        options: Those of :meth:`BilevelMixin.certify`.
    """
    batch = None if model.on_mini_batches else _whole_batch(trainer, datamodule)
    certificate: Certificate | None = model.certify(batch=batch, **options)
    return certificate


def probed(trainer: Trainer, model: Any, datamodule: Any) -> str:
    """Return the constants that IVSP would choose for a restored module, and why, as a table."""
    problem = model.problem_on(_whole_batch(trainer, datamodule))
    delta = 1e-3 if model.envelope is None else model.envelope.delta
    given = solver_of(trainer).hyper_parameters
    rows = [
        (name, why if given.get(name) is None else f"{why}; given: {given[name]:g}")
        for name, why in IVSP(model.parameter_groups(), delta=delta).probe(problem)
    ]
    title = f"IVSP on {type(model).__name__}, delta {delta:g}: what it would choose"
    return (
        f"{table(title, rows)}\nFrom {problem.calls.passes} passes of f and g at the start. "
        "What the config leaves out, IVSP chooses so."
    )


def _whole_batch(trainer: Trainer, datamodule: Any) -> Any:
    """The batch of a full-batch run, or all data of one on mini-batches."""
    loader: Any = trainer.train_dataloader
    if not getattr(loader, "full_batch", False):
        if not isinstance(datamodule, FullBatchDataModule):
            return gathered(trainer, batches=1000).batch
        loader = FullBatchDataModule.train_dataloader(datamodule)
    batch = loader.batch if isinstance(loader, Repeated) else next(iter(loader))
    batch = trainer.precision_plugin.convert_input(batch)
    return move_data_to_device(batch, trainer.strategy.root_device)


class _Reading(BilevelCLI):
    """The config of a ``fit``, and what the two commands take besides; nothing is written."""

    def __init__(self, command: str, args: Sequence[str]) -> None:
        fixed = [f"--trainer.{name}={value}" for name, value in WITHOUT_STEPS.items()]
        super().__init__(
            [*args, *fixed, "--trainer.callbacks=null", "--budget=null"],
            run=False,
            save_config_callback=None,
            parser_kwargs={"prog": f"lightning-bilevel {command}"},
        )
        self.run = (self.trainer, self.model, self.datamodule)

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument("--ckpt_path", type=str | None, help="the checkpoint to certify")
        parser.add_argument("--weights_only", type=bool | None, help="as for fit")
        # Of `certify` alone.
        parser.add_argument("--tolerance", type=PositiveFloat | None, help="of the proximal point")
        parser.add_argument("--proved", action="store_true", help="look at the theorem's point")


def certify(args: Sequence[str]) -> None:
    """Print the certificate of a checkpoint."""
    cli = _Reading("certify", args)
    path = cli.config.ckpt_path
    if not path or not Path(path).is_file():
        raise MisconfigurationException(
            f"`certify --ckpt_path {path}`: there is no such file. Name one."
        )
    restore(*cli.run, ckpt_path=path, weights_only=cli.config.weights_only)
    options = {"tolerance": cli.config.tolerance, "proved": cli.config.proved}
    certificate = certificate_of(*cli.run, **options)
    name = type(cli.model).__name__
    if certificate is None:
        raise MisconfigurationException(
            f"`{name}` has no Moreau envelope to certify by: `declare(envelope=...)` names one."
        )
    solver = solver_of(cli.trainer)
    title = f"{type(solver).__name__} on {name}, {Path(path).name}"
    text = as_text(title, certificate, cli.config_init["certificate"].tally, solver)
    rank_zero_only(print)(text)


def probe(args: Sequence[str]) -> None:
    """Print the constants that IVSP would choose for a problem, and why."""
    cli = _Reading("probe", args)
    restore(*cli.run)
    rank_zero_only(print)(probed(*cli.run))
