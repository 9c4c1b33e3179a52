"""Checkpoints: written as a whole, loaded without running code, refused by other problems."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_bilevel.core.problem import Start
from lightning_bilevel.files import write_whole
from lightning_bilevel.plugin.declaration import Level
from lightning_bilevel.solvers.base import BilevelOptimizer

__all__ = [
    "LastPoint",
    "WholeFileIO",
    "check_record",
    "go_on_from_last",
    "load_solver",
    "saved_name",
    "saved_start",
    "saved_stream",
    "write_record",
]

# The key of the record in a checkpoint, and the version of the record. The version grows with each
# change that old code would misread.
KEY = "lightning_bilevel"
FORMAT = 1


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
        if weights_only is None:
            weights_only = True  # torch's own default only since 2.6
        try:
            if "://" in str(path):
                loaded: Any = super().load_checkpoint(path, map_location, weights_only)
            else:
                loaded = torch.load(path, map_location=map_location, weights_only=weights_only)
        except FileNotFoundError as error:
            raise MisconfigurationException(
                f"`ckpt_path={str(path)!r}`: there is no such file."
            ) from error
        except OSError:
            raise
        except Exception as error:
            # Bytes of another format are read as instructions, which can fail with any error.
            if isinstance(error, (RuntimeError, EOFError, ValueError, UnpicklingError)):
                why = (str(error) or "it ends too early").splitlines()[0]
            else:
                why = "torch cannot read it"
            raise MisconfigurationException(
                f"`ckpt_path={str(path)!r}` is not a whole checkpoint of tensors and plain values: "
                f"{why}"
            ) from error
        if not isinstance(loaded, dict) or "pytorch-lightning_version" not in loaded:
            raise MisconfigurationException(
                f"`ckpt_path={str(path)!r}` is a file of torch, but no checkpoint of Lightning: it "
                "must be what `Trainer.save_checkpoint` or a checkpoint callback has written. A "
                "bare state dict goes into the module with `load_state_dict`."
            )
        return loaded


@dataclass(frozen=True)
class LastPoint:
    """The point that a run goes on from, while the module holds an earlier one.

    Attributes:
        upper: x.
        lower: y.
        buffers: The buffers of this point, by name.
    """

    upper: Tensor
    lower: Tensor
    buffers: dict[str, Tensor]


def write_record(
    call: str,
    checkpoint: dict[str, Any],
    solver: BilevelOptimizer,
    start: Start | None,
    last: LastPoint | None,
    stream: dict[str, Any] | None = None,
) -> None:
    """Write into a checkpoint which run it belongs to.

    Args:
        call: The name of the module that is saved.
        checkpoint: The checkpoint to write into.
        solver: The solver of the run.
        start: The gradients at the start of the run.
        last: The last point of the run, if the weights are those of an earlier one.
        stream: What a run on mini-batches needs to go on exactly.
    """
    checkpoint[KEY] = _record(solver)
    if start is not None:
        checkpoint[KEY]["start"] = asdict(start)
    if last is not None:
        checkpoint[KEY]["last"] = {
            "upper": last.upper,
            "lower": last.lower,
            "buffers": last.buffers,
        }
    if stream is not None:
        checkpoint[KEY]["stream"] = stream
    _leave_out_partials(call, checkpoint)


def saved_stream(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """Return what the saved run on mini-batches needs to go on exactly; None for other runs."""
    saved: dict[str, Any] | None = checkpoint.get(KEY, {}).get("stream")
    return saved


def saved_start(checkpoint: dict[str, Any]) -> Start | None:
    """Return the gradients at the start of the saved run, if the checkpoint has them."""
    start = checkpoint.get(KEY, {}).get("start")
    return None if start is None else Start(**start)


def saved_name(checkpoint: dict[str, Any]) -> str:
    """Return which point the weights of a checkpoint are, in words; empty for the last iterate."""
    last = checkpoint.get(KEY, {}).get("last")
    return "" if last is None else "an earlier point of the run, which was restored"


def go_on_from_last(checkpoint: dict[str, Any], module: nn.Module, levels: Iterable[Level]) -> None:
    """Replace the weights in a checkpoint by the last point of its run, if it has one."""
    last = checkpoint.get(KEY, {}).get("last")
    if last is None:
        return
    state_dict = checkpoint["state_dict"]
    # A shared parameter has several names in the state dict.
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for level in levels:
        blocks = torch.split(last[level.name], [p.numel() for p in level.parameters])
        for parameter, block in zip(level.parameters, blocks, strict=True):
            weights = block.view_as(parameter)
            for name in names[id(parameter)]:
                state_dict[name] = weights
    state_dict.update(
        {name: buffer for name, buffer in last["buffers"].items() if name in state_dict}
    )


def load_solver(checkpoint: dict[str, Any], solver: BilevelOptimizer) -> bool:
    """Load the constants and the multiplier of a saved run into a new solver.

    Return False, with the solver unchanged, if the checkpoint has none for this kind of solver.
    """
    states = checkpoint.get("optimizer_states")
    if not states or checkpoint.get(KEY, {}).get("solver") != type(solver).__name__:
        return False
    solver.load_state_dict(states[0])
    return True


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

    def refuse(why: str) -> None:
        raise MisconfigurationException(f"the checkpoint given to `{call}` {why}.")

    saved: dict[str, Any] | None = checkpoint.get(KEY)
    if saved is None:
        if resumes:
            refuse(
                "has no record of a bilevel run: it was written by another kind of module, and "
                "cannot be resumed by this one"
            )
        return
    if saved["format"] > FORMAT:
        refuse(
            f"was written by a later version of lightning-bilevel (format {saved['format']}, known "
            f"up to {FORMAT}): update it"
        )
    mine = _record(solver)
    for level in ("upper", "lower"):
        if saved[level] != mine[level]:
            refuse(
                f"has {saved[level]} {level}-level variables, the module has {mine[level]}: it "
                "belongs to another problem"
            )
    if resumes and saved["solver"] != mine["solver"]:
        refuse(
            f"was written by {saved['solver']}, whose state {mine['solver']} cannot go on from: "
            "name the same solver"
        )
    if resumes and checkpoint.get("optimizer_states"):
        _warn_of_constants(call, checkpoint["optimizer_states"][0]["param_groups"][0], solver)


def _record(solver: BilevelOptimizer) -> dict[str, Any]:
    return {"format": FORMAT, "solver": type(solver).__name__, **_sizes(solver)}


def _sizes(solver: BilevelOptimizer) -> dict[str, int]:
    return {
        group["level"]: sum(p.numel() for p in group["params"]) for group in solver.param_groups
    }


def _warn_of_constants(call: str, saved: dict[str, Any], solver: BilevelOptimizer) -> None:
    # Two kinds of constants are not compared: the learning rate, which the solver writes at each
    # step, and missing constants, which the saved run has chosen.
    changed = [
        f"{name}={saved[name]!r} (not {value!r})"
        for name, value in solver.hyper_parameters.items()
        if name in saved and saved[name] != value
    ]
    if changed:
        warnings.warn(
            f"`{call}` resumes with the constants of the checkpoint: {', '.join(changed)}. To run "
            "with others, start anew.",
            stacklevel=3,
        )


def _leave_out_partials(call: str, checkpoint: dict[str, Any]) -> None:
    """Remove solvers with constants from the saved hyper-parameters, as they are no plain data."""
    kept = checkpoint.get("hyper_parameters", {})
    partials = [
        key for key, value in kept.items() if isinstance(value, partial) and _is_solver(value.func)
    ]
    for key in partials:
        del kept[key]
    if partials:
        warnings.warn(
            f"`{call}` keeps {', '.join(partials)} out of its checkpoint, which holds data and no "
            f"code. Say `save_hyperparameters(ignore={partials})`, and give it again where the "
            "module is loaded.",
            stacklevel=3,
        )


def _is_solver(made: Any) -> bool:
    return isinstance(made, type) and issubclass(made, BilevelOptimizer)
