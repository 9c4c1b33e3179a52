"""The second copy of the lower level, and its exchange with the first.

A loss reads the module's own parameters. To evaluate it at z, the content of y and z changes
places: the hooks of parameters and modules and their compiled code stay what they are.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer


@contextmanager
def exchanged(own: Sequence[Tensor], other: Sequence[Tensor]) -> Iterator[None]:
    """Exchange the content of tensors, and exchange it back, also after an exception."""
    _exchange(own, other)
    try:
        yield
    finally:
        _exchange(own, other)


def _exchange(own: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    for a, b in zip(own, other, strict=True):
        a.data, b.data = b.data, a.data


class Shadow:
    """The variable z: a copy of the trainable lower-level parameters, and of their buffers.

    Args:
        module: The module.
        parameters: Its lower-level parameters, y.

    Attributes:
        parameters: These.
        buffers: The buffers that evaluations of the lower level may write to: the running
            statistics of all layers, and every buffer of a layer that has such a parameter.
        z: The second copy of the parameters. Its gradients are those of z.
        z_buffers: The buffers that evaluations at z write to.
    """

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        self.parameters, own = parameters, set(parameters)
        self.buffers = [
            buffer
            for layer in module.modules()
            if isinstance(layer, _NormBase) or not own.isdisjoint(layer.parameters(recurse=False))
            for buffer in layer.buffers(recurse=False)
        ]
        self.z = [nn.Parameter(p.detach().clone()) for p in self.parameters]
        self.z_buffers = [b.clone() for b in self.buffers]

    def exchanged(self) -> AbstractContextManager[None]:
        """Evaluate the module at z, with the buffers of z."""
        return exchanged([*self.parameters, *self.buffers], [*self.z, *self.z_buffers])

    def distance(self) -> Tensor:
        r"""Return :math:`|y - z|^2`."""
        pairs = zip(self.parameters, self.z, strict=True)
        return torch.stack([(z.detach() - y.detach()).square().sum() for y, z in pairs]).sum()

    @torch.no_grad()
    def add_proximal_pull(self, rho: float, gap: float | Tensor) -> None:
        r"""Add :math:`(z - y)/\rho` to the gradient of z, and ``gap`` times that to y's."""
        for y, z in zip(self.parameters, self.z, strict=True):
            pull = (z - y).div_(rho)
            if z.grad is not None:
                z.grad.add_(pull)
            if y.grad is not None:
                y.grad.add_(pull.mul_(gap))

    def copy_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return an optimiser of z like one of y, with an empty state."""
        own = vars(optimizer)
        if any(isinstance(value, Optimizer) for value in own.values()):
            raise ValueError(
                f"`{type(optimizer).__name__}` wraps another optimiser, which cannot be copied for "
                "z: give the inner one."
            )
        copies = dict(zip(self.parameters, self.z, strict=True))
        made = copy.copy(optimizer)
        # `copy` keeps the constructor's three entries only; a scheduler wraps `step` of the
        # instance.
        vars(made).update(
            (name, OrderedDict() if name.endswith("_hooks") else value)
            for name, value in own.items()
            if name != "step"
        )
        made.state = defaultdict(dict)
        made.param_groups = [
            {**group, "params": [copies[p] for p in group["params"] if p in copies]}
            for group in optimizer.param_groups
        ]
        return made
