"""A module's losses as functions of flat vectors, evaluated anywhere without touching its live parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = ["ModuleFunctions", "parameters_of"]

Declared = nn.Module | nn.Parameter | Sequence[nn.Module | nn.Parameter]


def parameters_of(declared: Declared) -> list[list[nn.Parameter]]:
    """Return the trainable parameters of each declared module or parameter."""
    items = [declared] if isinstance(declared, (nn.Module, nn.Parameter)) else list(declared)
    for item in items:
        if not isinstance(item, (nn.Module, nn.Parameter)):
            raise TypeError(f"a level was declared with a {type(item).__name__}: it takes modules and parameters.")
    return [[item] if isinstance(item, nn.Parameter) else [p for p in item.parameters() if p.requires_grad] for item in items]


# Where a tensor stands: dictionaries of layers, and its name there; several if layers share it.
Tensors = dict[str, Tensor | None]
Places = list[tuple[Tensors, str]]


class ModuleFunctions:
    """Calls a module's methods with other parameters than its own, and with buffers that are thrown away.

    It does what ``torch.func.functional_call`` does, which finds out anew at each call where the tensors belong: on small
    networks that took longer than the arithmetic of the solver.

    Args:
        module: The module.
        upper: Its upper-level parameters.
        lower: Its lower-level parameters.
    """

    def __init__(self, module: nn.Module, upper: Iterable[nn.Parameter], lower: Iterable[nn.Parameter]) -> None:
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
        # later. It writes into these copies, which are made good again whenever their version says they were written to.
        self.shadows = [(homes[i], buffer, buffer.clone()) for i, buffer in buffers.items()]

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
        for number, (places, buffer, shadow) in enumerate(self.shadows):
            if shadow._version:
                shadow = buffer.clone()
                self.shadows[number] = (places, buffer, shadow)
            new.append((places, shadow))
        own = [(entries, name, entries[name]) for places, _ in new for entries, name in places]
        try:
            for places, tensor in new:
                for entries, name in places:
                    entries[name] = tensor
            return getattr(self.module, method)(*args)
        finally:
            for entries, name, mine in own:
                entries[name] = mine
