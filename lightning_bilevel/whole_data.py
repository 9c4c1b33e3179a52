"""All data of a run on mini-batches, for its certificate: gathered once, evaluated in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import CombinedLoader

from lightning_bilevel.core.chunks import Chunks, as_chunks, samples_in, tensors
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.distributed import total
from lightning_bilevel.functional import ModuleFunctions, problem_of

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


def kept(batches: list[dict[str, Any]]) -> Data:
    """Return some batches of training as one."""
    batch = {level: _chunks([b[level] for b in batches]) for level in LEVELS}
    return Data(batch, f"a fixed sample, the first {len(batches)} batches of this run")


def gathered(trainer: Any, batches: int, loaders: Any = None) -> Data:
    """Go through the training loaders once, each level to its own end, and keep what they yield.

    The random numbers of the run are the same afterwards. Each process has its own part of the
    data.

    Args:
        trainer: The Trainer of the run.
        batches: The most batches of a level. They and 1 GiB per level are the limit, above which
            the data are a sample.
        loaders: Its training loaders, which a Trainer that has evaluated since does not know.
    """
    loaders = trainer.train_dataloader if loaders is None else loaders
    if trainer.limit_train_batches != 1.0:
        batches = min(batches, trainer.num_training_batches)
    # Either one loader for each level, or one that yields both.
    apart = isinstance(loaders, Mapping) and set(LEVELS) <= set(loaders)
    parts: dict[str, list[Any]] = {level: [] for level in LEVELS}
    sizes = dict.fromkeys(LEVELS, 0)
    complete = True
    shown: dict[str, Any] = {}
    with torch.random.fork_rng([]):
        for number, (fresh, _, _) in enumerate(CombinedLoader(loaders, "max_size")):
            if number == batches or max(sizes.values()) >= _MEMORY:
                complete = False
                break
            there = [level for level in LEVELS if not apart or fresh[level] is not None]
            if apart:
                # The hooks of the module may look at both: a level at its end shows its last part.
                shown |= {name: part for name, part in fresh.items() if part is not None}
            # As training does.
            batch = trainer.precision_plugin.convert_input(dict(shown) if apart else fresh)
            batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
            for level in there:
                part = move_data_to_device(batch[level], "cpu")
                parts[level].append(part)
                sizes[level] += sum(t.numel() * t.element_size() for t in tensors(part))
    if not all(parts.values()):
        raise MisconfigurationException(
            "the training loader of a level yields nothing when it is gone through once more, for "
            "the certificate: a loader must start again at each `iter`. Give the data yourself, "
            "`certify(batch=...)`."
        )
    complete = trainer.strategy.reduce_boolean_decision(complete, all=True)
    what = "all data" if complete else f"a sample, the first {batches} batches or 1 GiB of a level"
    return Data({level: _chunks(parts[level]) for level in LEVELS}, what)


def problem_on(module: Any, data: Data) -> tuple[BilevelProblem, str]:
    """Return f and g on data that stay on the host, and what these are, over all processes."""
    trainer, declared = module.trainer, module._declared()
    functions = _OnDevice(module, declared.upper.parameters, declared.lower.parameters)
    problem = problem_of(functions, data.batch, declared.upper.feasible, declared.lower.feasible)
    counts = [sum(_sizes(as_chunks(data.batch[level]).batches)) for level in LEVELS]
    processes = ""
    if trainer.world_size > 1:
        mine, device = counts, trainer.strategy.root_device
        counts = total(torch.tensor(mine, device=device)).tolist()
        problem = problem.on_this_rank(mine[0] / counts[0], mine[1] / counts[1], total)
        processes = f" of {trainer.world_size} processes, with what their samplers repeat"
    counted = f"{counts[0]} upper and {counts[1]} lower samples{processes}"
    return problem, f"{data.name} ({counted}), in eval mode"


class _OnDevice(ModuleFunctions):
    """Moves a chunk to the device for the call alone."""

    def call(self, method: str, *args: Any, **point: Any) -> Any:
        chunk = move_data_to_device(args[0], next(self.module.parameters()).device)
        return super().call(method, chunk, *args[1:], **point)


def _chunks(parts: list[Any]) -> Chunks:
    flat = [chunk for part in parts for chunk in as_chunks(part).batches]
    sizes = _sizes(flat)
    return Chunks(flat, [size / sum(sizes) for size in sizes])


def _sizes(chunks: list[Any]) -> list[int]:
    """Return the samples of each chunk; what has no dimension is one."""
    return [samples_in(chunk) or 1 for chunk in chunks]
