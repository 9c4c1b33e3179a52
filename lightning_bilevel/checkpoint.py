"""Checkpoints: written as a whole, loaded without running code, refused by other problems."""

from __future__ import annotations

import os
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_bilevel.core.problem import Start
from lightning_bilevel.output import write_whole
from lightning_bilevel.solvers.base import BilevelOptimizer

# The key of the bilevel run in a checkpoint of Lightning.
KEY = "lightning_bilevel"


class WholeFileIO(TorchCheckpointIO):
    """Writes and reads checkpoints as Lightning does, without torn files and foreign code.

    Lightning writes to the folder of temporary files and moves the file from there. Between two
    file systems the move is a copy, and a killed process leaves a part of it.
    """

    @override
    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        write_whole(Path(path), lambda file: torch.save(checkpoint, file))

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: Any = None
    ) -> Any:
        try:
            # torch's own default is True only since 2.6.
            loaded = super().load_checkpoint(path, map_location, weights_only is not False)
            if "pytorch-lightning_version" not in loaded:
                raise ValueError("it is a file of torch, but not of `Trainer.save_checkpoint`")
        except Exception as error:
            # Bytes of another format are read as instructions, which fail with any error.
            raise MisconfigurationException(
                f"`ckpt_path={str(path)!r}` is not a whole checkpoint of tensors and plain values: "
                f"{error!r}"
            ) from error
        return loaded


@dataclass(frozen=True)
class Record:
    """What a checkpoint has of a bilevel run, beside what Lightning saves.

    Attributes:
        solver: The kind of solver; empty on mini-batches.
        upper: The number of upper-level variables.
        lower: The number of lower-level variables.
        start: The gradients at the start of the run.
        last: The weights that the run goes on from, if others are shown.
    """

    solver: str
    upper: int
    lower: int
    start: Start | None = None
    last: dict[str, Any] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the record as plain data."""
        return {**vars(self), "start": self.start and asdict(self.start)}

    @classmethod
    def load(cls, checkpoint: dict[str, Any]) -> Record | None:
        """Return the record of a checkpoint; None if it has none."""
        saved = checkpoint.get(KEY)
        return saved and cls(**{**saved, "start": saved["start"] and Start(**saved["start"])})


def check_record(
    call: str, checkpoint: dict[str, Any], solver: BilevelOptimizer, *, resumes: bool
) -> None:
    """Refuse a checkpoint that does not fit the module or the solver.

    Args:
        call: The name of the module that loads the checkpoint.
        checkpoint: The loaded checkpoint.
        solver: A new solver of the module.
        resumes: Whether a run goes on from the checkpoint; otherwise only its parameters are used.
    """
    saved, kind, why = Record.load(checkpoint), type(solver).__name__, ""
    upper, lower = (sum(p.numel() for p in group["params"]) for group in solver.param_groups)
    if saved is None:
        why = "is not of a bilevel run" if resumes else ""
    elif (saved.upper, saved.lower) != (upper, lower):
        why = (
            f"has {saved.upper} upper-level and {saved.lower} lower-level variables, the module "
            f"has {upper} and {lower}: it belongs to another problem"
        )
    elif resumes and saved.solver != kind:
        why = f"was written by {saved.solver}, whose state {kind} cannot go on from"
    if why:
        raise MisconfigurationException(f"the checkpoint given to `{call}` {why}.")


def leave_out_partials(call: str, checkpoint: dict[str, Any]) -> None:
    """Remove solvers with constants from the saved hyper-parameters, as they are no plain data."""
    kept = checkpoint.get("hyper_parameters", {})
    partials = [key for key, value in kept.items() if isinstance(value, partial)]
    for key in partials:
        del kept[key]
    if partials:
        warnings.warn(
            f"`{call}` keeps {', '.join(partials)} out of its checkpoint, which holds data and no "
            f"code: say `save_hyperparameters(ignore={partials})`.",
            stacklevel=3,
        )
