"""Parts of g whose calls and whose living graphs are counted."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Token:
    pass


class _Held(torch.autograd.Function):
    """The identity, whose node in a graph holds a token: it dies with the graph."""

    @staticmethod
    def forward(context: Any, v: Tensor, part: CountedPart) -> Tensor:
        context.token = _Token()
        part.tokens.append(weakref.ref(context.token))
        part.most = max(part.most, part.alive)
        return v.clone()

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return slope * 1.0, None


class CountedPart:
    """Features or outputs.

    Attributes:
        calls: How often they were computed.
        most: The most graphs of them that were alive at once.
    """

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        self.part = part
        self.calls = self.most = 0
        self.tokens: list[weakref.ref[_Token]] = []

    def __call__(self, v: Tensor) -> Tensor:
        self.calls += 1
        value = self.part(v)
        held = torch.is_grad_enabled() and v.requires_grad
        result: Tensor = _Held.apply(value, self) if held else value  # type: ignore[no-untyped-call]
        return result

    @property
    def alive(self) -> int:
        """How many graphs are alive."""
        self.tokens = [token for token in self.tokens if token() is not None]
        return len(self.tokens)
