"""The second copy of the lower level, and its exchange with the first.

A loss reads the module's own parameters. To evaluate it at z, the content of y and z changes
places: the hooks of parameters and modules, their sharding and their compiled code stay what they
are.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

__all__ = ["Shadow", "check_optimizer", "copy_optimizer", "exchanged"]


@contextmanager
def exchanged(own: Sequence[Tensor], other: Sequence[Tensor]) -> Iterator[None]:
    """Exchange the content of tensors, and exchange it back, also after an exception."""
    _exchange(own, other)
    try:
        yield
    finally:
        _exchange(own, other)


@torch.no_grad()
def _exchange(own: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    for a, b in zip(own, other, strict=True):
        if hasattr(a, "to_local"):
            # FSDP2 refers to the storage of its shards.
            shard, other_shard = a.to_local(), b.to_local()  # type: ignore[attr-defined]
            kept = shard.clone()
            shard.copy_(other_shard)
            other_shard.copy_(kept)
        else:
            a.data, b.data = b.data, a.data


class Shadow:
    """The variable z: a copy of the trainable lower-level parameters, and of their buffers.

    Attributes:
        parameters: The parameters of the module, y.
        buffers: The buffers that its layers may write to, such as running statistics.
        z: The second copy of the parameters. Its gradients are those of z.
        z_buffers: The buffers that evaluations at z write to.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], buffers: Iterable[Tensor]) -> None:
        self.parameters = list(parameters)
        self.buffers = list(buffers)
        self.z = [nn.Parameter(p.detach().clone()) for p in self.parameters]
        self.z_buffers = [b.clone() for b in self.buffers]
        self._both = [*self.parameters, *self.buffers], [*self.z, *self.z_buffers]

    def exchanged(self) -> AbstractContextManager[None]:
        """Evaluate the module at z, with the buffers of z."""
        return exchanged(*self._both)

    def distance(self) -> Tensor:
        r"""Return :math:`|y - z|^2`."""
        parts = [
            (z.detach() - y.detach()).square().sum()
            for y, z in zip(self.parameters, self.z, strict=True)
        ]
        return torch.stack(parts).sum()

    @torch.no_grad()
    def add_proximal_pull(self, rho: float, gap: float | Tensor) -> None:
        r"""Add :math:`(z - y)/\rho` to the gradient of z, and ``gap`` times that to y's."""
        for y, z in zip(self.parameters, self.z, strict=True):
            pull = (z - y).div_(rho)
            if z.grad is not None:
                z.grad.add_(pull)
            if y.grad is not None:
                y.grad.add_(pull.mul_(gap))

    def state(self) -> dict[str, list[Tensor]]:
        """Return z as plain data for a checkpoint."""
        return {"z": [z.detach().clone() for z in self.z], "buffers": list(self.z_buffers)}

    @torch.no_grad()
    def load(self, state: dict[str, list[Tensor]]) -> None:
        """Go on from a saved z."""
        mine, saved = [*self.z, *self.z_buffers], [*state["z"], *state["buffers"]]
        for own, value in zip(mine, saved, strict=True):
            own.copy_(value)


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimiser that evaluates its loss."""
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            f"`{type(optimizer).__name__}` evaluates its loss several times in a step, and a "
            "bilevel step has one evaluation of g at y and one at z: take an optimiser that steps "
            "by `.grad`."
        )


def copy_optimizer(optimizer: Optimizer, copies: dict[nn.Parameter, nn.Parameter]) -> Optimizer:
    """Return an optimiser like another one, with an empty state, over copies of its parameters.

    Args:
        optimizer: The optimiser; only its parameters among the keys of ``copies`` are taken.
        copies: The copy of each parameter.
    """
    if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        raise ValueError(
            f"`{type(optimizer).__name__}` wraps another optimiser, which cannot be copied for z: "
            "give the inner one."
        )
    made = copy.copy(optimizer)
    # `copy` keeps the constructor's three entries only; a scheduler wraps `step` of the instance.
    made.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    for name, value in vars(optimizer).items():
        if isinstance(value, OrderedDict) and name.endswith("_hooks"):
            made.__dict__[name] = OrderedDict()
    made.state = defaultdict(dict)
    made.param_groups = [
        {**group, "params": [copies[p] for p in group["params"] if p in copies]}
        for group in optimizer.param_groups
    ]
    return made


def follow(copied: Optimizer, optimizer: Optimizer, *, decays: bool = True) -> None:
    """Take over rates, momenta and weight decay, which a scheduler may have changed."""
    for mine, group in zip(copied.param_groups, optimizer.param_groups, strict=True):
        mine.update({name: value for name, value in group.items() if name != "params"})
        if not decays and "weight_decay" in mine:
            mine["weight_decay"] = 0.0
