"""How often an iteration of IVSP waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import PROBLEMS, groups
from tables import SOLVERS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_bilevel.solvers.record import PenaltyInfo


@contextmanager
def transfers() -> Iterator[list[tuple[str, Tensor]]]:
    """Note everything that would wait for a device and read a number of it."""
    seen: list[tuple[str, Tensor]] = []
    waiting = {
        "aten::equal",
        "aten::is_nonzero",
        "aten::item",
        "aten::nonzero",
        "aten::masked_select",
        "aten::unique",
        "aten::_unique2",
    }
    names = ("item", "tolist", "__float__", "__bool__", "__int__", "__index__", "numpy")
    inside: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = func._schema.name
            if name == "aten::_local_scalar_dense" and not inside:
                seen.append(("scalar", args[0]))
            elif name in waiting:
                seen.append((name, args[0]))
            elif name == "aten::index" and any(
                index is not None and index.dtype == torch.bool for index in args[1]
            ):
                seen.append(("mask", args[0]))
            return func(*args, **(kwargs or {}))

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Tensor, *args: Any) -> Any:
            if not inside:
                seen.append((name, self))
            inside.append(name)
            try:
                return method(self, *args)
            finally:
                inside.pop()

        return call

    with pytest.MonkeyPatch.context() as patch, Watch():
        for name in names:
            patch.setattr(Tensor, name, noted(name, getattr(Tensor, name)))
        yield seen


def test_transfers_are_seen() -> None:
    """By each of the ways, and an exact iteration has several."""
    v = torch.ones(2)
    with transfers() as seen:
        float(v[0])
        v.tolist()
        bool(v[0])
        torch.equal(v, v + 1)
        v[v > 0]
    assert [name for name, _ in seen] == [
        "__float__",
        "tolist",
        "__bool__",
        "aten::equal",
        "mask",
    ]


@pytest.mark.parametrize("name", ["quadratic", "slack", "flat", "active_box"])
def test_an_exact_iteration_of_ivsp_has_a_stated_number_of_them(name: str) -> None:
    """At most 3 for each inner iteration, 4 for each trial of the line search, and 10 more; each
    gradient of g alone is one.
    """
    problem = next(problem for problem in PROBLEMS if problem.name == name)
    optimizer = SOLVERS["paper"].make(problem)(groups(*problem.at()))
    built = problem.build()
    optimizer.step(problem=built)
    for _ in range(5):
        with transfers() as seen:
            info = optimizer.step(problem=built)
        assert isinstance(info, PenaltyInfo)
        assert info.inner_iterations < len(seen)
        assert len(seen) <= 3 * info.inner_iterations + 4 * info.trials + 10
