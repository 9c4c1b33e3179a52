"""Buffers that training writes to, such as running statistics: they follow the accepted points."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed
from torch import Tensor, nn

from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.plugin.declaration import Declaration
from lightning_bilevel.plugin.functional import ModuleFunctions

__all__ = ["WrittenBuffers", "write_buffers"]

# Buffers that change the losses are updated until the losses change by less than that, or so often.
_SETTLED, _MAX_UPDATES = 1e-6, 30


class WrittenBuffers:
    """The buffers that a run writes to.

    Attributes:
        matter: Whether they change the losses, as the vectors of a spectral norm do.
    """

    def __init__(self) -> None:
        self._functions: ModuleFunctions | None = None
        self.matter = False

    @property
    def live(self) -> list[Tensor]:
        """The module's own buffers."""
        return [] if self._functions is None else self._functions.written_buffers

    def functions_of(self, module: nn.Module, declared: Declaration) -> ModuleFunctions:
        """Return a module's losses as functions, of which the buffers they write to are known from
        now on.
        """
        self._functions = ModuleFunctions(
            module, declared.upper.parameters, declared.lower.parameters, self.live
        )
        return self._functions

    def copies(self, module: nn.Module) -> dict[str, Tensor]:
        """Return copies of them by name."""
        written = {id(buffer) for buffer in self.live}
        return {
            name: buffer.detach().clone()
            for name, buffer in module.named_buffers()
            if id(buffer) in written
        }

    def examine(self, module: nn.Module, problem: BilevelProblem, x: Tensor, y: Tensor) -> None:
        """Look which buffers the evaluations so far have written to, and whether other numbers in
        them change the losses.
        """
        if self._functions is not None:
            self._functions.compare_buffers()
        kept = self.copies(module)
        if not kept:
            return
        generator = torch.Generator().manual_seed(0)  # the same in all processes
        with problem.uncounted():
            before = problem.upper(x, y).value, problem.at(x, remember=False).value(y)
            for buffer in self.live:
                if buffer.is_floating_point():
                    buffer.add_(torch.randn(buffer.shape, generator=generator).to(buffer))
            problem.forget()  # what is kept of a point would hide that it changes
            self.matter = before != (
                problem.upper(x, y).value,
                problem.at(x, remember=False).value(y),
            )
        problem.forget()
        write_buffers(module, kept)

    def follow(self, losses: Callable[[], float], shared: bool) -> None:
        """Evaluate the losses once more at the point that was reached, with the module's own
        buffers.

        Trial points write to copies of the buffers. So running statistics follow the accepted
        points, one update each. Buffers that change the losses are updated until these settle: they
        are to be functions of the point.

        Args:
            losses: Evaluates the losses at the module's own parameters and buffers, and returns
                their sum.
            shared: Whether several processes evaluate a part each: then the first one's buffers are
                those of all.
        """
        before = losses()
        if self.matter:
            for _ in range(_MAX_UPDATES):
                after = losses()
                if abs(after - before) <= _SETTLED * abs(before):
                    break
                before = after
        if shared:
            for buffer in self.live:
                torch.distributed.broadcast(buffer, 0)


def write_buffers(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    """Write numbers into a module's buffers, by name."""
    for name, buffer in module.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])
