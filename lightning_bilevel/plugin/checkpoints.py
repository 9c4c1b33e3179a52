"""Checkpoints: written as a whole, loaded without running what they contain, and refused where they do not belong."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_bilevel.files import write_whole
from lightning_bilevel.solvers.base import BilevelOptimizer

__all__ = ["WholeFileIO", "check_record", "record"]

# The record's key in a checkpoint, and the number of what a checkpoint holds: one more with each change that old code misreads.
KEY = "lightning_bilevel"
FORMAT = 1


class WholeFileIO(TorchCheckpointIO):
    """Lightning's way to write and read checkpoints, with neither torn files nor foreign code.

    Lightning writes to the folder of temporary files and moves the file from there; between two file systems that is a copy,
    of which a killed process leaves a part.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        write_whole(Path(path), lambda file: torch.save(checkpoint, file))

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, loc: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if weights_only is None:
            weights_only = True  # torch's own default only from 2.6 on
        try:
            if "://" in str(path):
                loaded: Any = super().load_checkpoint(path, map_location, weights_only)
            else:
                loaded = torch.load(path, map_location=map_location, weights_only=weights_only)
        except FileNotFoundError as error:
            raise MisconfigurationException(f"`ckpt_path={str(path)!r}`: there is no such file.") from error
        except OSError:
            raise
        except Exception as error:  # bytes of something else are taken for instructions, which fail in any way
            told = isinstance(error, (RuntimeError, EOFError, ValueError, UnpicklingError))
            why = (str(error) or "it ends too early").splitlines()[0] if told else "torch cannot read it"
            raise MisconfigurationException(
                f"`ckpt_path={str(path)!r}` is not a whole checkpoint of tensors and plain values: {why}"
            ) from error
        if not isinstance(loaded, dict) or "pytorch-lightning_version" not in loaded:
            raise MisconfigurationException(
                f"`ckpt_path={str(path)!r}` is a file of torch, but no checkpoint of Lightning: it must be what "
                "`Trainer.save_checkpoint` or a checkpoint callback has written. A bare state dict goes into the module with "
                "`load_state_dict`."
            )
        return loaded


def record(solver: BilevelOptimizer) -> dict[str, Any]:
    """Return what a checkpoint says about the run that it belongs to."""
    return {"format": FORMAT, "solver": type(solver).__name__, **_sizes(solver)}


def check_record(call: str, checkpoint: dict[str, Any], solver: BilevelOptimizer, *, resumes: bool) -> None:
    """Refuse a checkpoint of another kind of run.

    Args:
        call: The name of the module that is given the checkpoint.
        checkpoint: What was loaded.
        solver: The solver as it would be made now.
        resumes: Whether a run is to go on from the checkpoint; otherwise its parameters are all that is used.
    """

    def refuse(why: str) -> None:
        raise MisconfigurationException(f"the checkpoint given to `{call}` {why}.")

    saved: dict[str, Any] | None = checkpoint.get(KEY)
    if saved is None:
        if resumes:
            refuse("has no record of a bilevel run: it was written by another kind of module, and cannot be resumed by this one")
        return
    if saved["format"] > FORMAT:
        refuse(f"was written by a later version of lightning-bilevel (format {saved['format']}, known up to {FORMAT}): update it")
    mine = record(solver)
    for level in ("upper", "lower"):
        if saved[level] != mine[level]:
            refuse(f"has {saved[level]} {level}-level variables, the module has {mine[level]}: it belongs to another problem")
    if resumes and saved["solver"] != mine["solver"]:
        refuse(f"was written by {saved['solver']}, whose state {mine['solver']} cannot go on from: name the same solver")
    if resumes and checkpoint.get("optimizer_states"):
        _warn_of_constants(call, checkpoint["optimizer_states"][0]["param_groups"][0], solver)


def _sizes(solver: BilevelOptimizer) -> dict[str, int]:
    return {group["level"]: sum(p.numel() for p in group["params"]) for group in solver.param_groups}


def _warn_of_constants(call: str, saved: dict[str, Any], solver: BilevelOptimizer) -> None:
    # The learning rate is what the solver itself writes there at each step.
    # What was left out is as the run before chose it.
    own = solver.hyper_parameters
    changed = [f"{name}={saved[name]!r} (not {value!r})" for name, value in own.items() if name in saved and saved[name] != value]
    if changed:
        warnings.warn(
            f"`{call}` resumes with the constants of the checkpoint: {', '.join(changed)}. To run with others, start anew.",
            stacklevel=3,
        )
