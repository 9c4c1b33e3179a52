"""A module's losses as functions of flat vectors, and the problem on a batch.

The functions touch neither the module's parameters nor its running statistics.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed
from torch import Tensor, nn

from lightning_bilevel.core.chunks import as_chunks, leaves, tensors
from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.lower import Function, Part, weighted
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import ConvexSet

__all__ = ["BatchProblem", "ModuleFunctions", "functions_of", "problem_of"]

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
                    if tensor is not None:
                        place = cast(dict[str, Tensor | None], entries), name
                        homes.setdefault(id(tensor), []).append(place)
        levels = [list(upper), list(lower)]
        self.homes = [[homes[id(p)] for p in level] for level in levels]
        self.shapes = [[p.shape for p in level] for level in levels]
        self.sizes = [[p.numel() for p in level] for level in levels]
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
        for homes, shapes, sizes, vector in zip(
            self.homes, self.shapes, self.sizes, (x, y), strict=True
        ):
            if vector is not None:
                blocks = torch.split(vector, sizes) if len(sizes) > 1 else (vector,)
                for places, shape, block in zip(homes, shapes, blocks, strict=True):
                    new.append((places, block.view(shape)))
        try:
            own = [(entries, name, entries[name]) for places, _ in new for entries, name in places]
        except KeyError as error:
            raise BilevelError(
                f"a parameter or buffer {error} of the module is no longer where it was when the "
                "run started: pruning and other changes of parameters in the middle of a run make "
                "it another problem. Do it before `Trainer.fit`."
            ) from error
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


def functions_of(module: Any) -> ModuleFunctions:
    """Return the losses of a bilevel module, with all its buffers protected."""
    upper, lower = module._declared().levels
    return ModuleFunctions(module, upper.parameters, lower.parameters, module.buffers())


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
    has_features = module.lower_features is not None
    has_outputs = module.lower_outputs is not None

    def upper_loss(part: Any) -> Function:
        return lambda x, y: call("upper_loss", part, x=x, y=y)

    def lower_loss(part: Any) -> Function:
        if has_features:
            return lambda features, y: call("lower_loss", part, features, y=y)
        if has_outputs:
            return lambda x, outputs: call("lower_loss", part, outputs, x=x)
        return lambda x, y: call("lower_loss", part, x=x, y=y)

    def features(part: Any) -> Part:
        return lambda x: call("lower_features", part, x=x)

    def outputs(part: Any) -> Part:
        return lambda y: call("lower_outputs", part, y=y)

    def constraints(part: Any) -> Function:
        return lambda x, y: torch.stack(call("constraints", part, x=x, y=y))

    upper, lower = (as_chunks(batch[level]) for level in ("upper", "lower"))
    of_upper, of_lower = (
        list(zip(chunks.batches, chunks.shares, strict=True)) for chunks in (upper, lower)
    )
    problem = BilevelProblem(
        [weighted(upper_loss(part), share) for part, share in of_upper],
        [weighted(lower_loss(part), share) for part, share in of_lower],
        upper_set,
        lower_set,
        features=[features(part) for part in lower.batches] if has_features else None,
        outputs=[outputs(part) for part in lower.batches] if has_outputs else None,
    )
    if getattr(module, "constraints", None) is not None:
        problem.residual_terms = [weighted(constraints(part), share) for part, share in of_upper]
    return problem


class BatchProblem:
    """f and g on a batch.

    Attributes:
        batch: The batch, as all processes have it.
        part: The part that this process evaluates; the batch itself if each evaluates all of it.
        problem: f and g on the batch.
    """

    def __init__(self, batch: dict[str, Any], part: Any, problem: BilevelProblem) -> None:
        self.batch, self.part, self.problem = batch, part, problem
        self._levels = batch["upper"], batch["lower"]
        self._leaves = list(leaves(batch))
        # The version of a tensor counts in-place changes.
        self._versions = [(tensor, tensor._version) for tensor in tensors(batch)]

    def is_of(self, batch: Any) -> bool:
        """Whether a batch is this one, unchanged, or equal to it.

        A loader of one whole batch collates equal tensors anew in each epoch.
        """
        for tensor, version in self._versions:
            if tensor._version != version:
                return False
        upper, lower = self._levels
        if batch is self.batch and batch["upper"] is upper and batch["lower"] is lower:
            return True
        found = list(leaves(batch))
        return len(found) == len(self._leaves) and all(map(_equal, found, self._leaves))


def _equal(new: Any, old: Any) -> bool:
    if new is old or not (isinstance(new, Tensor) and isinstance(old, Tensor)):
        return new is old or (type(new) is type(old) and bool(new == old))
    kind = new.dtype, new.device, new.shape
    return kind == (old.dtype, old.device, old.shape) and torch.equal(new, old)
