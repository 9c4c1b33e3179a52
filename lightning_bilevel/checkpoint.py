"""Checkpoints: written as a whole, loaded without running code, refused by other problems."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_bilevel.output import write_whole
from lightning_bilevel.solvers.base import BilevelOptimizer

__all__ = ["KEY", "WholeFileIO", "check_record", "leave_out_partials", "record_of"]

# The key of the bilevel run in a checkpoint of Lightning.
KEY = "lightning_bilevel"


class WholeFileIO(TorchCheckpointIO):
    """Writes and reads checkpoints as Lightning does, without torn files and foreign code.

    Lightning writes to the folder of temporary files and moves the file from there. Between two
    file systems the move is a copy, and a killed process leaves a part of it.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        write_whole(Path(path), lambda file: torch.save(checkpoint, file))

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        try:
            # torch's own default is True only since 2.6.
            loaded = super().load_checkpoint(path, map_location, weights_only is not False)
            if "pytorch-lightning_version" not in loaded:
                raise ValueError("it is a file of torch, but not of `Trainer.save_checkpoint`")
        except FileNotFoundError as error:
            raise MisconfigurationException(
                f"`ckpt_path={str(path)!r}`: there is no such file."
            ) from error
        except Exception as error:
            # Bytes of another format are read as instructions, which fail with any error.
            raise MisconfigurationException(
                f"`ckpt_path={str(path)!r}` is not a whole checkpoint of tensors and plain values: "
                f"{error!r}"
            ) from error
        return loaded


def record_of(solver: BilevelOptimizer) -> dict[str, Any]:
    """Return what tells problems apart: the kind of solver and the number of variables."""
    sizes = {g["level"]: sum(p.numel() for p in g["params"]) for g in solver.param_groups}
    return {"solver": type(solver).__name__, **sizes}


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
    saved, mine = checkpoint.get(KEY), record_of(solver)
    why = ""
    if saved is None:
        why = "is not of a bilevel run" if resumes else ""
    elif any(saved[level] != mine[level] for level in ("upper", "lower")):
        why = (
            f"has {saved['upper']} upper-level and {saved['lower']} lower-level variables, the "
            f"module has {mine['upper']} and {mine['lower']}: it belongs to another problem"
        )
    elif resumes and saved["solver"] != mine["solver"]:
        why = f"was written by {saved['solver']}, whose state {mine['solver']} cannot go on from"
    if why:
        raise MisconfigurationException(f"the checkpoint given to `{call}` {why}.")
    if resumes and checkpoint.get("optimizer_states"):
        _warn_of_constants(call, checkpoint["optimizer_states"][0]["param_groups"][0], solver)


def _warn_of_constants(call: str, saved: dict[str, Any], solver: BilevelOptimizer) -> None:
    changed = [
        f"{name}={saved[name]!r} (not {value!r})"
        for name, value in solver.hyper_parameters.items()
        if name in saved and saved[name] != value
    ]
    if changed:
        warnings.warn(
            f"`{call}` resumes with the constants of the checkpoint: {', '.join(changed)}.",
            stacklevel=3,
        )


def leave_out_partials(call: str, checkpoint: dict[str, Any]) -> None:
    """Remove solvers with constants from the saved hyper-parameters, as they are no plain data."""
    kept = checkpoint.get("hyper_parameters", {})
    partials = [
        key
        for key, value in kept.items()
        if isinstance(value, partial)
        and isinstance(value.func, type)
        and issubclass(value.func, BilevelOptimizer)
    ]
    for key in partials:
        del kept[key]
    if partials:
        warnings.warn(
            f"`{call}` keeps {', '.join(partials)} out of its checkpoint, which holds data and no "
            f"code: say `save_hyperparameters(ignore={partials})`.",
            stacklevel=3,
        )
