"""A module's losses as functions of flat vectors, evaluated anywhere without touching its live parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_bilevel.core.errors import BilevelError

__all__ = ["ModuleFunctions", "parameters_of"]

Declared = nn.Module | nn.Parameter | Sequence[nn.Module | nn.Parameter]


def parameters_of(declared: Declared) -> list[list[nn.Parameter]]:
    """Return the parameters of each declared module or parameter, the frozen ones too."""
    items = [declared] if isinstance(declared, (nn.Module, nn.Parameter)) else list(declared)
    for item in items:
        if not isinstance(item, (nn.Module, nn.Parameter)):
            raise TypeError(f"a level was declared with a {type(item).__name__}: it takes modules and parameters.")
    return [[item] if isinstance(item, nn.Parameter) else list(item.parameters()) for item in items]


# Where a tensor stands: dictionaries of layers, and its name there; several if layers share it.
Tensors = dict[str, Tensor | None]
Places = list[tuple[Tensors, str]]


@dataclass
class _Shadow:
    """A copy that a call may write to, in place of a buffer; and whether any call has."""

    places: Places
    buffer: Tensor
    version: int
    copy: Tensor
    written: bool = False

    def fresh(self) -> Tensor:
        """Return the copy, made anew if it was written to, or if the buffer was."""
        now = self.live
        if self.written or now is not self.buffer or now._version != self.version:
            self.buffer, self.version, self.copy = now, now._version, now.clone()
        return self.copy

    @property
    def live(self) -> Tensor:
        """The module's own buffer."""
        entries, name = self.places[0]
        return cast(Tensor, entries[name])

    def look(self) -> None:
        """See whether the call that just ended wrote to the copy, or put another tensor in its place."""
        self.written = self.written or self.copy._version > 0 or self.live is not self.copy

    def compare(self) -> None:
        """See whether calls wrote to the copy in a way that its version does not tell, as torch's batch normalisation does."""
        self.written = self.written or not torch.equal(self.copy, self.buffer)


class ModuleFunctions:
    """Calls a module's methods with other parameters than its own, and with buffers that are thrown away.

    It does what ``torch.func.functional_call`` does, which finds out anew at each call where the tensors belong: on small
    networks that took longer than the arithmetic of the solver.

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
            buffers |= {id(buffer): buffer for buffer in layer._buffers.values() if buffer is not None}
        levels = [list(upper), list(lower)]
        self.homes = [[homes[id(p)] for p in level] for level in levels]
        self.shapes = [[p.shape for p in level] for level in levels]
        self.sizes = [[p.numel() for p in level] for level in levels]
        # A batch-normalisation layer writes its running statistics on every call, also at trial points that are rejected
        # later. It writes into these copies.
        known = {id(buffer) for buffer in written}
        self.shadows = [_Shadow(homes[i], buffer, buffer._version, buffer.clone(), i in known) for i, buffer in buffers.items()]

    def compare_buffers(self) -> None:
        """Look for all buffers that the calls so far have written to."""
        for shadow in self.shadows:
            shadow.compare()

    @property
    def written_buffers(self) -> list[Tensor]:
        """The module's buffers that calls write to, such as the running statistics of batch normalisation."""
        return [shadow.live for shadow in self.shadows if shadow.written]

    def function(self, method: str, *args: Any, scale: float = 1.0) -> Callable[[Tensor, Tensor], Any]:
        """Return (x, y) -> scale * module.method(*args) for flat x and y."""

        def evaluate(x: Tensor, y: Tensor) -> Any:
            value = self._call(method, (x, y), args)
            return value if scale == 1.0 else scale * value

        return evaluate

    def encoder(self, method: str, *args: Any) -> Callable[[Tensor], Any]:
        """Return x -> module.method(*args) for flat x."""
        return lambda x: self._call(method, (x, None), args)

    def decoder(self, method: str, *args: Any, scale: float = 1.0) -> Callable[[Any, Tensor], Any]:
        """Return (features, y) -> scale * module.method(*args, features) for flat y."""

        def evaluate(features: Any, y: Tensor) -> Any:
            value = self._call(method, (None, y), (*args, features))
            return value if scale == 1.0 else scale * value

        return evaluate

    def body(self, method: str, *args: Any) -> Callable[[Tensor], Any]:
        """Return y -> module.method(*args) for flat y."""
        return lambda y: self._call(method, (None, y), args)

    def weighing(self, method: str, *args: Any, scale: float = 1.0) -> Callable[[Tensor, Any], Any]:
        """Return (x, outputs) -> scale * module.method(*args, outputs) for flat x."""

        def evaluate(x: Tensor, outputs: Any) -> Any:
            value = self._call(method, (x, None), (*args, outputs))
            return value if scale == 1.0 else scale * value

        return evaluate

    def _call(self, method: str, point: tuple[Tensor | None, Tensor | None], args: tuple[Any, ...]) -> Any:
        new: list[tuple[Places, Tensor]] = []
        for homes, shapes, sizes, vector in zip(self.homes, self.shapes, self.sizes, point, strict=True):
            if vector is not None:
                blocks = torch.split(vector, sizes) if len(sizes) > 1 else (vector,)
                new.extend((places, block.view(shape)) for places, shape, block in zip(homes, shapes, blocks, strict=True))
        try:
            new.extend((shadow.places, shadow.fresh()) for shadow in self.shadows)
            own = [(entries, name, entries[name]) for places, _ in new for entries, name in places]
        except KeyError as error:
            raise BilevelError(
                f"a parameter or buffer {error} of the module is no longer where it was when the run started: pruning and other "
                "changes of parameters in the middle of a run make it another problem. Do it before `Trainer.fit`."
            ) from error
        try:
            for places, tensor in new:
                for entries, name in places:
                    entries[name] = tensor
            return getattr(self.module, method)(*args)
        finally:
            for shadow in self.shadows:
                shadow.look()
            for entries, name, mine in own:
                entries[name] = mine
