"""Buffers that training writes to, such as running statistics: they follow the accepted points."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed
from torch import Tensor, nn

from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.exact import ModuleFunctions
from lightning_bilevel.levels import Declaration

__all__ = ["WrittenBuffers", "write_buffers"]

# Buffers that change the losses are updated until the losses change by at most this fraction, and
# at most this often.
_SETTLED = 1e-6
_MAX_UPDATES = 30


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
        """Return a module's losses as functions, and keep these to find the written buffers."""
        self._functions = ModuleFunctions(
            module, declared.upper.parameters, declared.lower.parameters, self.live
        )
        return self._functions

    def copies(self, module: nn.Module) -> dict[str, Tensor]:
        """Return copies of the written buffers, by name."""
        written = {id(buffer) for buffer in self.live}
        return {
            name: buffer.detach().clone()
            for name, buffer in module.named_buffers()
            if id(buffer) in written
        }

    def examine(self, module: nn.Module, problem: BilevelProblem, x: Tensor, y: Tensor) -> None:
        """Find the written buffers, and test whether other numbers in them change the losses."""
        if self._functions is not None:
            self._functions.compare_buffers()
        saved = self.copies(module)
        if not saved:
            return

        def values() -> tuple[float, float]:
            return problem.upper(x, y).value, problem.at(x, remember=False).value(y)

        generator = torch.Generator("cpu").manual_seed(0)  # the same in all processes
        with problem.uncounted():
            before = values()
            for buffer in self.live:
                if buffer.is_floating_point():
                    numbers = torch.randn(buffer.shape, generator=generator, device="cpu")
                    buffer.add_(numbers.to(buffer))
            problem.forget()  # remembered values would hide a change
            self.matter = values() != before
        problem.forget()
        write_buffers(module, saved)

    def follow(self, losses: Callable[[], float], shared: bool) -> None:
        """Evaluate the losses once more at the accepted point, with the module's own buffers.

        Trial points write to copies of the buffers. So running statistics get one update per
        accepted point. Buffers that change the losses must be functions of the point: they are
        updated until the losses settle.

        Args:
            losses: Evaluates the losses at the module's own parameters and buffers, and returns
                their sum.
            shared: Whether several processes evaluate a part each. Then all of them take the
                buffers of the first one.
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
    """Copy numbers into a module's buffers, by name."""
    for name, buffer in module.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])
