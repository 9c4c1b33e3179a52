"""A module's losses as functions of flat vectors, and the problem on a batch.

The functions touch neither the module's parameters nor its running statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed
from torch import Tensor, nn

from lightning_bilevel.core.chunks import Chunks, as_chunks, leaves
from lightning_bilevel.core.lower import Function, Part, weighted
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import ConvexSet

# The places of a tensor: the dictionary of a layer and the name in it, for each layer that has it.
Places = list[tuple[dict[str, Tensor | None], str]]


class ModuleFunctions:
    """Calls a module's methods with other parameters, and with copies of some of its buffers.

    ``torch.func.functional_call`` does the same, but looks up the places of the tensors at each
    call: on small networks that took longer than the arithmetic of the solver.

    Args:
        module: The module.
        upper: Its upper-level parameters.
        lower: Its lower-level parameters.
        protected: The buffers that calls may write to. Batch normalisation updates its running
            statistics at every call, also at trial points that are rejected later: in copies.
    """

    def __init__(
        self,
        module: nn.Module,
        upper: Iterable[nn.Parameter],
        lower: Iterable[nn.Parameter],
        protected: Iterable[Tensor] = (),
    ) -> None:
        self.module = module
        homes: dict[int, Places] = {}
        for layer in module.modules():
            for entries in (layer._parameters, layer._buffers):
                for name, tensor in entries.items():
                    place = cast(dict[str, Tensor | None], entries), name
                    homes.setdefault(id(tensor), []).append(place)
        # Each level's parameters: their sizes in the flat vector, their places and shapes.
        self.levels = [
            ([p.numel() for p in level], [(homes[id(p)], p.shape) for p in level])
            for level in (list(upper), list(lower))
        ]
        self.copies = [(homes[id(buffer)], buffer.clone()) for buffer in protected]

    def protect_written(self) -> None:
        """Protect only the buffers that the calls so far have written to.

        Their copies are changed: losses that depend on them differ from call to call, and are
        refused as random ones are.
        """
        self.copies = [pair for pair in self.copies if not torch.equal(_own(pair[0]), pair[1])]
        for _, copy in self.copies:
            if copy.is_floating_point():
                copy.mul_(0.5).add_(0.25)

    @property
    def buffers(self) -> list[Tensor]:
        """The module's own buffers that are protected."""
        return [_own(places) for places, _ in self.copies]

    def call(
        self, method: str, *args: Any, x: Tensor | None = None, y: Tensor | None = None
    ) -> Any:
        """Return module.method(*args) at flat x and y; None keeps the module's own parameters."""
        new = list(self.copies)
        for (sizes, blocks), vector in zip(self.levels, (x, y), strict=True):
            if vector is not None:
                parts = torch.split(vector, sizes) if len(sizes) > 1 else (vector,)
                for (places, shape), part in zip(blocks, parts, strict=True):
                    new.append((places, part.view(shape)))
        own = [(entries, name, entries[name]) for places, _ in new for entries, name in places]
        try:
            for places, tensor in new:
                for entries, name in places:
                    entries[name] = tensor
            return self._run(method, args)
        finally:
            # A call may have put another tensor into the place of a buffer.
            self.copies = [(places, _own(places).detach()) for places, _ in self.copies]
            for entries, name, mine in own:
                entries[name] = mine

    def _run(self, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(self.module, method)(*args)

    def update_buffers(self, batch: dict[str, Any], *, shared: bool) -> None:
        """Evaluate the losses once at the module's own point, so that running statistics follow.

        Where processes evaluate a part each, all of them take the buffers of the first one.
        """
        module: Any = self.module
        split = module.lower_features or module.lower_outputs
        for part in as_chunks(batch["lower"]).batches:
            module.lower_loss(part, *([] if split is None else [split(part)]))
        for part in as_chunks(batch["upper"]).batches:
            module.upper_loss(part)
        for buffer in self.buffers if shared else ():
            torch.distributed.broadcast(buffer, 0)


def _own(places: Places) -> Tensor:
    entries, name = places[0]
    return cast(Tensor, entries[name])


def problem_of(
    functions: ModuleFunctions, batch: dict[str, Any], upper_set: ConvexSet, lower_set: ConvexSet
) -> BilevelProblem:
    """Return f and g on a batch ``{"upper": ..., "lower": ...}``.

    They are the losses of a module, summed over the chunks with their shares as weights.
    """
    call, module = functions.call, functions.module
    of_upper, of_lower = as_chunks(batch["upper"]), as_chunks(batch["lower"])

    def upper_loss(part: Any) -> Function:
        return lambda x, y: call("upper_loss", part, x=x, y=y)

    def lower_loss(part: Any) -> Function:
        if module.lower_features is not None:
            return lambda features, y: call("lower_loss", part, features, y=y)
        if module.lower_outputs is not None:
            return lambda x, outputs: call("lower_loss", part, outputs, x=x)
        return lambda x, y: call("lower_loss", part, x=x, y=y)

    def constraints(part: Any) -> Function:
        return lambda x, y: torch.stack(call("constraints", part, x=x, y=y))

    def of_chunks(make: Callable[[Any], Function], chunks: Chunks) -> list[Function]:
        pairs = zip(chunks.batches, chunks.shares, strict=True)
        return [weighted(make(part), share) for part, share in pairs]

    def split_off(name: str, level: str) -> list[Part] | None:
        """Return the part of g that depends on one level alone, on each chunk."""

        def on(part: Any) -> Part:
            return lambda vector: call(name, part, **{level: vector})

        return None if getattr(module, name) is None else list(map(on, of_lower.batches))

    problem = BilevelProblem(
        of_chunks(upper_loss, of_upper),
        of_chunks(lower_loss, of_lower),
        upper_set,
        lower_set,
        features=split_off("lower_features", "x"),
        outputs=split_off("lower_outputs", "y"),
    )
    if getattr(module, "constraints", None) is not None:
        problem.residual_terms = of_chunks(constraints, of_upper)
    return problem


@dataclass(eq=False)
class BatchProblem:
    """f and g on a batch.

    Attributes:
        batch: The batch, as all processes have it.
        part: The part that this process evaluates; the batch itself if each evaluates all of it.
        problem: f and g on the batch.
    """

    batch: dict[str, Any]
    part: Any
    problem: BilevelProblem

    def __post_init__(self) -> None:
        # The version of a tensor counts in-place changes.
        self._leaves = [(leaf, getattr(leaf, "_version", 0)) for leaf in leaves(self.batch)]

    def is_of(self, batch: Any) -> bool:
        """Whether a batch is this one, unchanged, or equal to it.

        A loader of one whole batch collates equal tensors anew in each epoch.
        """
        found = list(leaves(batch))
        return len(found) == len(self._leaves) and all(map(_is_same, found, self._leaves))


def _is_same(new: Any, known: tuple[Any, int]) -> bool:
    old, version = known
    if isinstance(old, Tensor):
        if old._version != version or not isinstance(new, Tensor):
            return False
        kinds = (new.dtype, new.device), (old.dtype, old.device)
        return new is old or (kinds[0] == kinds[1] and torch.equal(new, old))
    return new is old or (type(new) is type(old) and bool(new == old))
