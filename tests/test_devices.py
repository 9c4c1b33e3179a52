"""No tensor is made on the wrong device: by reading every factory call, and by runs in which the
default device is not the one of the parameters.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import PROBLEMS, Problem
from package import MODULES
from tables import SOLVERS, Solver
from torch import Tensor

from lightning_bilevel import (
    Ball,
    BilevelProblem,
    Box,
    Envelope,
    Simplex,
    certify,
    solve,
)
from lightning_bilevel.core.curvature import lower_curvature, upper_curvature
from lightning_bilevel.core.vectors import Metric

FOLDERS = (
    "core",
    "solvers",
    "stochastic",
    "mini_batches",
    "optimizers",
    "whole_data",
    "checkpoint",
    "checks",
    "distributed",
    "functional",
    "declaration",
    "logging",
    "module",
    "run",
)
# What makes a tensor on torch's default device, unless it is told another.
FACTORIES = {
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_strided",
    "eye",
    "from_numpy",
    "full",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "sparse_coo_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
}
# Where a tensor is on the host whatever the device of the parameters is, and why.
ON_THE_HOST = {
    "core.curvature": "one generator draws the same direction on every device",
    "core.sets": "the bounds are kept there, and copied once for each device of a variable",
    "logging": "loggers and progress bars read them",
}


def factory_calls() -> list[tuple[str, ast.Call]]:
    """Each call of a factory or of a generator in these folders, with its module."""
    calls: list[tuple[str, ast.Call]] = []
    for module, path in MODULES.items():
        name = module.removeprefix("lightning_bilevel.")
        if name.split(".")[0] not in FOLDERS:
            continue
        calls += [
            (name, node)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and _factory(node.func) is not None
        ]
    return calls


def _factory(function: ast.expr) -> str | None:
    """The name of the factory, if the function is `torch.<factory>`."""
    if (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "torch"
        and function.attr in FACTORIES | {"Generator"}
    ):
        return function.attr
    return None


def device_of(call: ast.Call) -> str | None:
    """The device as it is written; a generator takes it as its only argument."""
    if _factory(call.func) == "Generator":
        return ast.unparse(call.args[0]) if call.args else None
    return next((ast.unparse(k.value) for k in call.keywords if k.arg == "device"), None)


class TestFactories:
    def test_each_call_names_its_device(self) -> None:
        calls = factory_calls()
        assert len(calls) > 5
        assert [f"{m}:{c.lineno}" for m, c in calls if device_of(c) is None] == []

    def test_a_fixed_device_is_the_host_and_has_a_reason(self) -> None:
        fixed = {
            (module, device)
            for module, call in factory_calls()
            if (device := device_of(call)) is not None and device.startswith("'")
        }
        assert {device for _, device in fixed} == {"'cpu'"}
        assert {module for module, _ in fixed} == set(ON_THE_HOST)

    def test_none_is_called_by_another_name(self) -> None:
        """As `from torch import zeros` would let it."""
        for module, path in MODULES.items():
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module == "torch":
                    assert not {alias.name for alias in node.names} & FACTORIES, module

    def test_a_call_without_a_device_is_seen(self) -> None:
        call = ast.parse("torch.zeros(3)").body[0].value  # type: ignore[attr-defined]
        assert (_factory(call.func), device_of(call)) == ("zeros", None)
        call = ast.parse("torch.zeros(3, device=v.device)").body[0].value  # type: ignore[attr-defined]
        assert device_of(call) == "v.device"


# --- Another default device: a tensor that is made without a device has no numbers there.


def elsewhere(run: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return run()


def test_such_a_tensor_is_seen() -> None:
    v = torch.ones(3)
    with pytest.raises(RuntimeError, match="meta"):
        elsewhere(lambda: float((v + torch.ones(3)).sum()))


TARGET = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def f(x: Tensor, y: Tensor) -> Tensor:
    return ((y - TARGET) ** 2).sum() + 0.1 * (x**2).sum()


def g(x: Tensor, y: Tensor) -> Tensor:
    return ((y - x.tanh()) ** 2).sum() + torch.cos(y).sum()


@pytest.mark.filterwarnings("ignore:LuMei ended outer iteration")
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=str)
@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.name in ("quadratic", "active_box")])
def test_an_exact_iteration(solver: Solver, problem: Problem) -> None:
    start, built = problem.at(), problem.build()
    run = partial(solve, built, *start, solver.make(problem), 3, envelope=problem.envelope)
    there, here = elsewhere(run), run()
    assert torch.equal(there.x, here.x)
    assert torch.equal(there.y, here.y)
    assert there.certificate == here.certificate


def test_a_certificate_on_each_set() -> None:
    point = torch.full((3,), 0.3, dtype=torch.float64), torch.full((3,), 1 / 3, dtype=torch.float64)
    for make in (lambda: Box([-1.0] * 3, 1.0), lambda: Ball(1.0, [0.1] * 3), Simplex):

        def run(make: Callable[[], Any] = make) -> Any:
            problem = BilevelProblem(f, g, Box(-1, 1), make())
            upper = upper_curvature(problem, *point, Metric(3))
            curvatures = lower_curvature(problem, *point), upper
            return certify(problem, *point, Envelope(0.1, 1.0, 1e-3)), curvatures

        assert elsewhere(run) == run()
