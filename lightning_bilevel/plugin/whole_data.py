"""All data of a run on mini-batches, for its certificate: gathered once, evaluated in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DistributedSampler

from lightning_bilevel.core.chunks import Chunks, as_chunks, samples_in
from lightning_bilevel.core.leaves import tensors
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.plugin.declaration import Declaration
from lightning_bilevel.plugin.functional import ModuleFunctions, problem_of
from lightning_bilevel.plugin.processes import any_of, total

__all__ = ["Data", "evaluating", "gathered", "kept", "problem_on_data"]

LEVELS = ("upper", "lower")
# A level's data are gathered up to so many bytes: they stay in memory together.
_MEMORY = 2**30
_ENDED = object()


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
    name = (
        f"a fixed sample, the first {len(batches)} batches of this run "
        f"({_counted(batch, trainer)}), in eval mode"
    )
    return Data(batch, name)


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
    state = torch.get_rng_state()
    try:
        parts, complete = _go_through(trainer, loaders, batches)
    finally:
        torch.set_rng_state(state)
    batch = {level: _chunks(parts[level]) for level in LEVELS}
    if trainer.world_size > 1:
        complete = not any_of([not complete], trainer.strategy.root_device)[0]
    what = "all data" if complete else f"a sample, the first {batches} batches or 1 GiB of a level"
    again = _repeated(loaders) if complete else 0
    repeated = f", {again} of them twice so that the shares are equal" if again else ""
    return Data(batch, f"{what} ({_counted(batch, trainer)}{repeated}), in eval mode")


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
        mine = [float(_samples(as_chunks(data.batch[level]))) or 1.0 for level in LEVELS]
        sums = total(torch.tensor(mine, dtype=torch.float64, device=device)).tolist()
        problem = problem.on_this_rank(mine[0] / sums[0], mine[1] / sums[1], total)
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
    running = (
        {name: iter(loader) for name, loader in loaders.items()}
        if apart
        else {"both": iter(loaders)}
    )
    shown: dict[str, Any] = {}
    parts: dict[str, list[Any]] = {level: [] for level in LEVELS}
    sizes = dict.fromkeys(LEVELS, 0)
    complete = True
    for _ in range(batches):
        fresh = _next_of(running)
        if not fresh:
            break
        # The hooks of the module may look at both levels: one that has ended shows its last part.
        shown.update(fresh)
        batch = _transferred(trainer, dict(shown) if apart else shown["both"])
        for level in LEVELS:
            source = level if apart else "both"
            if source in fresh:
                part = move_data_to_device(batch[level], "cpu")
                parts[level].append(part)
                sizes[level] += sum(t.numel() * t.element_size() for t in tensors(part))
                if sizes[level] >= _MEMORY and running.pop(source, None) is not None:
                    complete = False
    for level in LEVELS:
        if not parts[level]:
            raise MisconfigurationException(
                f"the training loader of the {level} level yields nothing when it is gone through "
                "once more, for the certificate: a loader must start again at each `iter`. Give "
                "the data yourself, `certify(batch=...)`."
            )
    return parts, complete and not _next_of(running).keys() & {"both", *LEVELS}


def _next_of(running: dict[str, Iterator[Any]]) -> dict[str, Any]:
    """Return the next item of each iterator, and leave out those that have ended."""
    fresh = {name: next(iterator, _ENDED) for name, iterator in running.items()}
    for name, item in list(fresh.items()):
        if item is _ENDED:
            del fresh[name], running[name]
    return fresh


def _transferred(trainer: Any, batch: Any) -> Any:
    """Return a batch after the hooks that training lets it go through."""
    module = trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _chunks(parts: list[Any]) -> Chunks:
    flat = [chunk for part in parts for chunk in as_chunks(part).batches]
    counted = all(samples_in(chunk) for chunk in flat)
    return Chunks(flat) if counted else Chunks(flat, [1 / len(flat)] * len(flat))


def _samples(chunks: Chunks) -> int:
    return sum(samples_in(chunk) for chunk in chunks.batches)


def _counted(batch: dict[str, Any], trainer: Any) -> str:
    """Say how many samples the data have, over all processes."""
    counts = [_samples(batch[level]) for level in LEVELS]
    processes = ""
    if trainer.world_size > 1:
        device = trainer.strategy.root_device
        counts = total(torch.tensor(counts, device=device)).tolist()
        processes = f" of {trainer.world_size} processes"
    return f"{counts[0]} upper and {counts[1]} lower samples{processes}"


def _repeated(loaders: Any) -> int:
    """Count what the distributed samplers repeat, so that each process has equally many samples."""
    parts = loaders.values() if isinstance(loaders, Mapping) else [loaders]
    count = 0
    for loader in parts:
        sampler: Any = getattr(loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            count += max(sampler.total_size - len(cast(Any, sampler.dataset)), 0)
    return count
