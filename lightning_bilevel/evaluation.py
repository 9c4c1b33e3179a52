"""A module's losses as functions of flat vectors, evaluated anywhere without touching its live parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

__all__ = ["ModuleFunctions", "parameters_of"]

Declared = nn.Module | nn.Parameter | Sequence[nn.Module | nn.Parameter]


def parameters_of(declared: Declared) -> list[list[nn.Parameter]]:
    """Return the trainable parameters of each declared module or parameter."""
    items = [declared] if isinstance(declared, (nn.Module, nn.Parameter)) else list(declared)
    for item in items:
        if not isinstance(item, (nn.Module, nn.Parameter)):
            raise TypeError(f"a level was declared with a {type(item).__name__}: it takes modules and parameters.")
    return [[item] if isinstance(item, nn.Parameter) else [p for p in item.parameters() if p.requires_grad] for item in items]


class ModuleFunctions(nn.Module):
    """Calls a module's methods with other parameters than its own, and with buffers that are thrown away.

    Args:
        module: The module.
        upper: Its upper-level parameters.
        lower: Its lower-level parameters.
    """

    def __init__(self, module: nn.Module, upper: Iterable[nn.Parameter], lower: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.module = module
        names = {id(p): name for name, p in self.named_parameters()}
        self.layout = [[(names[id(p)], p.shape, p.numel()) for p in level] for level in (upper, lower)]
        # A batch-normalisation layer writes its running statistics on every call, also at trial points that are rejected
        # later. It writes into these copies, which are made good again whenever their version says they were written to.
        self.shadows = {name: (buffer, buffer.clone()) for name, buffer in self.named_buffers()}
        everything = [*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False)]
        self.tied = len(everything) > len(names) + len(self.shadows)

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

    def forward(self, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(self.module, method)(*args)

    def _call(self, method: str, point: tuple[Tensor | None, Tensor | None], args: tuple[Any, ...]) -> Any:
        tensors: dict[str, Tensor] = {}
        for level, vector in zip(self.layout, point, strict=True):
            if vector is not None:
                blocks = torch.split(vector, [size for _, _, size in level]) if len(level) > 1 else (vector,)
                tensors.update((name, block.view(shape)) for (name, shape, _), block in zip(level, blocks, strict=True))
        for name, (buffer, shadow) in self.shadows.items():
            if shadow._version:
                shadow = buffer.clone()
                self.shadows[name] = (buffer, shadow)
            tensors[name] = shadow
        return functional_call(self, tensors, (method, args), tie_weights=self.tied)
