"""A module's losses as functions of flat vectors, which do not touch its own parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_bilevel.core.chunks import as_chunks
from lightning_bilevel.core.errors import BilevelError
from lightning_bilevel.core.lower import Function, Part, weighted
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import ConvexSet

__all__ = ["ModuleFunctions", "Shadow", "parameters_of", "problem_of"]

Declared = nn.Module | nn.Parameter | Sequence[nn.Module | nn.Parameter]


def parameters_of(declared: Declared) -> list[list[nn.Parameter]]:
    """Return the parameters of each declared module or parameter, frozen ones included."""
    items = [declared] if isinstance(declared, (nn.Module, nn.Parameter)) else list(declared)
    for item in items:
        if not isinstance(item, (nn.Module, nn.Parameter)):
            kind = type(item).__name__
            raise TypeError(f"a level takes modules and parameters, and was given a {kind}.")
    return [[item] if isinstance(item, nn.Parameter) else list(item.parameters()) for item in items]


# The places of a tensor: the dictionary of a layer and the name in it, for each layer that has it.
Tensors = dict[str, Tensor | None]
Places = list[tuple[Tensors, str]]


@dataclass
class Shadow:
    """A copy that calls write to instead of a buffer, and whether any call did."""

    places: Places
    buffer: Tensor
    version: int
    copy: Tensor
    written: bool = False

    def fresh(self) -> Tensor:
        """Return the copy; renew it first if calls write to it or if the buffer has changed."""
        now = self.live
        if self.written or now is not self.buffer or now._version != self.version:
            self.buffer = now
            self.version = now._version
            self.copy = now.clone()
        return self.copy

    @property
    def live(self) -> Tensor:
        """The module's own buffer."""
        entries, name = self.places[0]
        return cast(Tensor, entries[name])

    def check_version(self) -> None:
        """Record whether the call that just ended wrote to the copy or replaced it."""
        self.written = self.written or self.copy._version > 0 or self.live is not self.copy

    def check_numbers(self) -> None:
        """Record whether calls wrote to the copy without a new version.

        torch's batch normalisation does that.
        """
        self.written = self.written or not torch.equal(self.copy, self.buffer)


class ModuleFunctions:
    """Calls a module's methods with other parameters, and with copies of its buffers.

    ``torch.func.functional_call`` does the same, but looks up the places of the tensors at each
    call: on small networks that took longer than the arithmetic of the solver.

    Args:
        module: The module.
        upper: Its upper-level parameters.
        lower: Its lower-level parameters.
        written: Buffers that calls are known to write to.
    """

    def __init__(
        self,
        module: nn.Module,
        upper: Iterable[nn.Parameter],
        lower: Iterable[nn.Parameter],
        written: Iterable[Tensor] = (),
    ) -> None:
        self.module = module
        homes: dict[int, Places] = {}
        buffers: dict[int, Tensor] = {}
        for layer in module.modules():
            for entries in (cast(Tensors, layer._parameters), layer._buffers):
                for name, tensor in entries.items():
                    if tensor is not None:
                        homes.setdefault(id(tensor), []).append((entries, name))
            buffers |= {
                id(buffer): buffer for buffer in layer._buffers.values() if buffer is not None
            }
        levels = [list(upper), list(lower)]
        self.homes = [[homes[id(p)] for p in level] for level in levels]
        self.shapes = [[p.shape for p in level] for level in levels]
        self.sizes = [[p.numel() for p in level] for level in levels]
        # A batch-normalisation layer writes its running statistics at every call, also at trial
        # points that are rejected later. It writes into these copies.
        written_ids = {id(buffer) for buffer in written}
        self.shadows = [
            Shadow(homes[i], buffer, buffer._version, buffer.clone(), i in written_ids)
            for i, buffer in buffers.items()
        ]

    def compare_buffers(self) -> None:
        """Find all buffers that the calls so far have written to."""
        for shadow in self.shadows:
            shadow.check_numbers()

    @property
    def written_buffers(self) -> list[Tensor]:
        """The module's buffers that calls write to, such as running statistics."""
        return [shadow.live for shadow in self.shadows if shadow.written]

    def call(
        self, method: str, *args: Any, x: Tensor | None = None, y: Tensor | None = None
    ) -> Any:
        """Return module.method(*args) at flat x and y; None keeps the module's own parameters."""
        new: list[tuple[Places, Tensor]] = []
        for homes, shapes, sizes, vector in zip(
            self.homes, self.shapes, self.sizes, (x, y), strict=True
        ):
            if vector is not None:
                blocks = torch.split(vector, sizes) if len(sizes) > 1 else (vector,)
                for places, shape, block in zip(homes, shapes, blocks, strict=True):
                    new.append((places, block.view(shape)))
        try:
            new += [(shadow.places, shadow.fresh()) for shadow in self.shadows]
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
            for shadow in self.shadows:
                shadow.check_version()
            for entries, name, mine in own:
                entries[name] = mine

    def _run(self, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(self.module, method)(*args)


def problem_of(
    functions: ModuleFunctions, batch: dict[str, Any], upper_set: ConvexSet, lower_set: ConvexSet
) -> BilevelProblem:
    """Return f and g on a batch ``{"upper": ..., "lower": ...}``.

    They are the losses of a module, summed over the chunks with their shares as weights.
    """
    call = functions.call
    has_features = functions.module.lower_features is not None
    has_outputs = functions.module.lower_outputs is not None

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

    upper = as_chunks(batch["upper"])
    lower = as_chunks(batch["lower"])
    upper_parts = zip(upper.batches, upper.shares, strict=True)
    lower_parts = zip(lower.batches, lower.shares, strict=True)
    problem = BilevelProblem(
        [weighted(upper_loss(part), share) for part, share in upper_parts],
        [weighted(lower_loss(part), share) for part, share in lower_parts],
        upper_set,
        lower_set,
        features=[features(part) for part in lower.batches] if has_features else None,
        outputs=[outputs(part) for part in lower.batches] if has_outputs else None,
    )
    if getattr(functions.module, "constraints", None) is not None:
        problem.residual_terms = [
            weighted(constraints(part), share)
            for part, share in zip(upper.batches, upper.shares, strict=True)
        ]
    return problem
