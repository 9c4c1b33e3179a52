"""Layers that are not differentiable everywhere, which the convergence theorem excludes.

Only modules can be seen. A call such as ``torch.relu`` cannot: a module that makes one says so in
an attribute ``kinks``, a tuple of names.
"""

from __future__ import annotations

from torch import nn

from lightning_bilevel.plugin.functional import Declared

__all__ = ["kinks_of"]

_KINKED = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.PReLU,
    nn.RReLU,
    nn.SELU,
    nn.Hardtanh,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardshrink,
    nn.Softshrink,
    nn.Threshold,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
)


def kinks_of(declared: Declared) -> list[str]:
    """Return the names of what is not differentiable in the declared modules, each once."""
    items = [declared] if isinstance(declared, (nn.Module, nn.Parameter)) else list(declared)
    found: list[str] = []
    for item in items:
        for module in item.modules() if isinstance(item, nn.Module) else ():
            found.extend(getattr(module, "kinks", ()))
            # The slopes of an ELU at 0 are 1 and alpha.
            if isinstance(module, _KINKED) or (isinstance(module, nn.ELU) and module.alpha != 1.0):
                found.append(type(module).__name__)
    return list(dict.fromkeys(found))
