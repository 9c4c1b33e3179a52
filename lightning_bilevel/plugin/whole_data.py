"""All data of a run on mini-batches, for its certificate: gathered once, evaluated in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import CombinedLoader
from torch import nn

from lightning_bilevel.core.chunks import Chunks, as_chunks, samples_in, tensors
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.distributed import any_of, total
from lightning_bilevel.exact import ModuleFunctions, problem_of
from lightning_bilevel.levels import Declaration

__all__ = ["Data", "evaluating", "gathered", "kept", "problem_on_data"]

LEVELS = ("upper", "lower")
# Data are gathered up to so many bytes of a level: they stay in memory together.
_MEMORY = 2**30


class Data(NamedTuple):
    """The data of a certificate.

    Attributes:
        batch: ``{"upper": Chunks, "lower": Chunks}``, on the host.
        name: What they are, in words.
    """

    batch: dict[str, Any]
    name: str


def kept(trainer: Any, batches: list[dict[str, Any]]) -> Data:
    """Return some batches of training as one."""
    batch = {level: _chunks([b[level] for b in batches]) for level in LEVELS}
    what = f"a fixed sample, the first {len(batches)} batches of this run"
    return Data(batch, f"{what} ({_counted(batch, trainer)}), in eval mode")


def gathered(trainer: Any, batches: int, loaders: Any = None) -> Data:
    """Go through the training loaders once, each level to its own end, and keep what they yield.

    The random numbers of the run are the same afterwards. Each process has its own part of the
    data, and their name is that of all parts together, which f and g are evaluated on.

    Args:
        trainer: The Trainer of the run.
        batches: The most batches of a level. They and 1 GiB per level are the limit, above which
            the data are a sample.
        loaders: Its training loaders, which a Trainer that has evaluated since does not know.
    """
    loaders = trainer.train_dataloader if loaders is None else loaders
    if trainer.limit_train_batches != 1.0:
        batches = int(min(batches, trainer.num_training_batches))
    with torch.random.fork_rng([]):
        parts, complete = _go_through(trainer, loaders, batches)
    batch = {level: _chunks(parts[level]) for level in LEVELS}
    if trainer.world_size > 1:
        complete = not any_of([not complete], trainer.strategy.root_device)[0]
    what = "all data" if complete else f"a sample, the first {batches} batches or 1 GiB of a level"
    return Data(batch, f"{what} ({_counted(batch, trainer)}), in eval mode")


def problem_on_data(module: Any, declared: Declaration, trainer: Any, data: Data) -> BilevelProblem:
    """Return f and g on data that stay on the host, a chunk at a time on the device.

    Args:
        module: The bilevel module.
        declared: Its declaration.
        trainer: Its Trainer.
        data: The data.
    """
    functions = _OnDevice(module, declared.upper.parameters, declared.lower.parameters)
    sets = declared.upper.feasible, declared.lower.feasible
    problem = problem_of(functions, data.batch, *sets)
    if trainer is not None and trainer.world_size > 1:
        device = trainer.strategy.root_device
        mine = torch.tensor(_samples(data.batch), dtype=torch.float64, device=device).clamp(min=1)
        upper, lower = (mine / total(mine.clone())).tolist()
        problem = problem.on_this_rank(upper, lower, total)
    return problem


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode, with gradients and without autocast, and back afterwards."""
    modes = [(layer, layer.training) for layer in module.modules()]
    device = next(module.parameters()).device
    module.eval()
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            yield
    finally:
        for layer, training in modes:
            layer.training = training


class _OnDevice(ModuleFunctions):
    """Moves a chunk to the device for the call alone."""

    def _run(self, method: str, args: tuple[Any, ...]) -> Any:
        device = next(self.module.parameters()).device
        part, *rest = args
        return super()._run(method, (move_data_to_device(part, device), *rest))


def _go_through(trainer: Any, loaders: Any, batches: int) -> tuple[dict[str, list[Any]], bool]:
    """Return the parts of each level, and whether they are all."""
    # Either one loader for each level, or one that yields both.
    apart = isinstance(loaders, Mapping) and set(LEVELS) <= set(loaders)
    parts: dict[str, list[Any]] = {level: [] for level in LEVELS}
    sizes = dict.fromkeys(LEVELS, 0)
    complete = True
    shown: dict[str, Any] = {}
    combined = CombinedLoader(loaders if apart else {"both": loaders}, "max_size")
    for number, (fresh, _, _) in enumerate(combined):
        if number == batches or max(sizes.values()) >= _MEMORY:
            complete = False
            break
        # The hooks of the module may look at both levels: one that has ended shows its last part.
        shown.update((name, part) for name, part in fresh.items() if part is not None)
        batch = _transferred(trainer, dict(shown) if apart else shown["both"])
        for level in LEVELS:
            if fresh[level if apart else "both"] is not None:
                part = move_data_to_device(batch[level], "cpu")
                parts[level].append(part)
                sizes[level] += sum(t.numel() * t.element_size() for t in tensors(part))
    for level in LEVELS:
        if not parts[level]:
            raise MisconfigurationException(
                f"the training loader of the {level} level yields nothing when it is gone through "
                "once more, for the certificate: a loader must start again at each `iter`. Give "
                "the data yourself, `certify(batch=...)`."
            )
    return parts, complete


def _transferred(trainer: Any, batch: Any) -> Any:
    """Return a batch after the hooks that training lets it go through."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _chunks(parts: list[Any]) -> Chunks:
    flat = [chunk for part in parts for chunk in as_chunks(part).batches]
    counted = all(samples_in(chunk) for chunk in flat)
    return Chunks(flat, None if counted else [1 / len(flat)] * len(flat))


def _samples(batch: dict[str, Any]) -> list[int]:
    return [sum(map(samples_in, as_chunks(batch[level]).batches)) for level in LEVELS]


def _counted(batch: dict[str, Any], trainer: Any) -> str:
    """Say how many samples the data have, over all processes."""
    counts, processes = _samples(batch), ""
    if trainer.world_size > 1:
        counts = total(torch.tensor(counts, device=trainer.strategy.root_device)).tolist()
        processes = f" of {trainer.world_size} processes, with what their samplers repeat"
    return f"{counts[0]} upper and {counts[1]} lower samples{processes}"
