"""The step of a level by a torch optimiser, on the level's flat vector."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bilevel.solvers.schedule import is_number

__all__ = ["OptimizerCallable", "TorchRule"]

# Makes a torch optimiser, such as `functools.partial(torch.optim.AdamW, lr=1e-3)`.
OptimizerCallable = Callable[[Iterable[Any]], Optimizer]

# What an experiment may lose to rounding.
_ROUNDING = 1e-9


class TorchRule:
    """Steps a flat vector by a torch optimiser, which gets the direction as the gradient.

    The optimiser is to act on each coordinate alone, so that it does the same to the flat vector as
    to the parameters apart: SGD, Adam, AdamW, RMSprop and their like. An experiment on eight
    coordinates finds out. An optimiser for one vector says so by the class attribute
    ``whole_vector = True``.

    Args:
        make: Makes the optimiser from a list of one parameter.
        call: The argument that it came from, for messages: "F2SA(lower_optimizer=...)".
    """

    def __init__(self, make: OptimizerCallable, call: str) -> None:
        self._make = make
        self._call = call
        self._optimizer: Optimizer | None = None
        self._parameter: nn.Parameter | None = None
        probe = self._made([nn.Parameter(torch.zeros(2))])
        self.name = type(probe).__name__
        # The rate that the optimiser was made with.
        self.lr = _rate_of(probe, call)
        settings = probe.param_groups[0]
        self._counts_on_device = bool(settings.get("fused") or settings.get("capturable"))
        # The names in its state, which the experiments find out.
        self._names: set[str] = set()
        # Whether it takes a sparse gradient and then moves nothing else, and whether a dense one.
        self.sparse = self._leaves_untouched_alone()
        self.dense = self._runs(self._dense_trial)
        if not self.dense and not self.sparse:
            raise ValueError(
                f"`{call}`: {self.name} cannot step a flat vector by its gradient. {_WAY_OUT}"
            )
        if not getattr(type(probe), "whole_vector", False) and not self._is_elementwise():
            raise ValueError(
                f"`{call}`: {self.name} does not act on each coordinate alone, so it would do "
                f"something else to the level's flat vector than to its parameters. {_WAY_OUT}"
            )

    def __getstate__(self) -> dict[str, Any]:
        # The state is with the solver, so a copy makes its optimiser anew.
        return {**self.__dict__, "_optimizer": None, "_parameter": None}

    def step_(
        self,
        v: Tensor,
        direction: Tensor,
        lr: float,
        state: dict[str, Any],
        touched: Tensor | None = None,
    ) -> None:
        """Move v in place.

        Args:
            v: The vector.
            direction: What the optimiser gets as the gradient.
            lr: Its rate.
            state: What it knows of earlier steps; changed in place, and empty before the first.
            touched: The coordinates whose gradient counts; None for all. An optimiser that takes
                sparse gradients moves these alone. Any other gets zeros elsewhere, where it may
                move all the same, by its momentum or its weight decay.
        """
        if self._optimizer is None or self._parameter is None:
            self._parameter = nn.Parameter(v.detach())
            self._optimizer = self._made([self._parameter])
        parameter, optimizer = self._parameter, self._optimizer
        parameter.data = v
        parameter.grad = self._gradient(direction, touched)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.state[parameter] = state
        try:
            _run(optimizer, sparse=parameter.grad.is_sparse)
        finally:
            # The vector and its gradient belong to the caller.
            optimizer.state.clear()
            parameter.grad = None
            parameter.data = v.new_empty(0)

    def step(
        self, v: Tensor, direction: Tensor, lr: float, state: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the new v and the new state; the old ones are unchanged."""
        new = v.clone()
        new_state = copy.deepcopy(state)
        self.step_(new, direction, lr, new_state)
        return new, new_state

    def loaded(self, state: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """Return a saved state as a copy on the device of the parameters."""
        if set(state) != self._names:
            raise ValueError(
                f"`{self._call}`: the saved state has {sorted(state)}, and {self.name} keeps "
                f"{sorted(self._names)}: it was saved with another optimiser."
            )
        # torch keeps the count of steps on the host, but for the fused and capturable forms.
        return {
            name: item
            if not isinstance(item, Tensor)
            else item.to("cpu" if name == "step" and not self._counts_on_device else device).clone()
            for name, item in state.items()
        }

    def _gradient(self, direction: Tensor, touched: Tensor | None) -> Tensor:
        if self.sparse and touched is not None:
            return _sparse(touched, direction[touched], direction.shape)
        if not self.dense:
            everywhere = torch.arange(direction.numel(), device=direction.device)
            return _sparse(everywhere, direction, direction.shape)
        if touched is not None:
            return torch.zeros_like(direction).index_copy_(0, touched, direction[touched])
        return direction

    def _made(self, parameters: list[nn.Parameter]) -> Optimizer:
        if not callable(self._make):
            raise TypeError(
                f"`{self._call}` was given a {type(self._make).__name__}: it must be what makes a "
                "torch optimiser from parameters, such as `functools.partial(torch.optim.AdamW, "
                "lr=1e-3)`."
            )
        try:
            made = self._make(parameters)
        except ValueError as error:
            raise ValueError(
                f"`{self._call}` makes no optimiser of a flat vector: {error} {_WAY_OUT}"
            ) from error
        if not isinstance(made, Optimizer):
            raise TypeError(
                f"`{self._call}` made a {type(made).__name__}, which is no `torch.optim.Optimizer`."
            )
        if isinstance(made, torch.optim.LBFGS):
            raise ValueError(
                f"`{self._call}`: LBFGS evaluates the loss itself, several times a step, and a "
                f"level is moved along a direction. {_WAY_OUT}"
            )
        return made

    # --- Experiments

    def _stepped(self, gradients: list[Tensor], size: int) -> list[Tensor]:
        """Return a vector of ones after each of some steps."""
        parameter = nn.Parameter(torch.ones(size, dtype=torch.float64))
        optimizer = self._made([parameter])
        before = _settings(optimizer)
        path = []
        for gradient in gradients:
            parameter.grad = gradient.clone()
            _run(optimizer, sparse=gradient.is_sparse)
            path.append(parameter.detach().clone())
        self._names = set(optimizer.state[parameter])
        if _settings(optimizer) != before:
            raise ValueError(
                f"`{self._call}`: {type(optimizer).__name__} changes its own parameter group in a "
                "step, which a checkpoint of the solver does not hold. Use one that keeps its "
                "state with the parameter, such as SGD or AdamW."
            )
        return path

    def _runs(self, trial: Callable[[], object]) -> bool:
        try:
            trial()
        except (RuntimeError, NotImplementedError):
            return False
        return True

    def _dense_trial(self) -> None:
        self._stepped([torch.ones(2, dtype=torch.float64)], 2)

    def _leaves_untouched_alone(self) -> bool:
        """Tell whether it takes sparse gradients, and a coordinate outside of them stays."""
        value = torch.ones(1, dtype=torch.float64)
        gradients = [_sparse(torch.tensor([i]), value, torch.Size([2])) for i in (0, 1)]
        try:
            first, second = self._stepped(gradients, 2)
        except (RuntimeError, NotImplementedError):
            return False
        return bool(first[1] == 1.0) and bool(first[0] == second[0])

    def _is_elementwise(self) -> bool:
        """Tell whether [a, b] steps as a and b do apart."""
        gradients = [
            torch.tensor([1.0, -2.0, 0.5, 3e-3, 40.0, -0.1, 7.0, -60.0], dtype=torch.float64),
            torch.tensor([-0.3, 1.0, 2.0, 1e-2, -9.0, 0.2, -5.0, 30.0], dtype=torch.float64),
        ]
        everywhere = torch.arange(8)

        def path(part: slice) -> Tensor:
            size = len(range(*part.indices(8)))
            given = [gradient[part] for gradient in gradients]
            if not self.dense:
                given = [_sparse(everywhere[:size], gradient, gradient.shape) for gradient in given]
            return self._stepped(given, size)[-1]

        together = path(slice(0, 8))
        apart = torch.cat([path(slice(0, 4)), path(slice(4, 8))])
        return torch.allclose(together, apart, rtol=_ROUNDING, atol=_ROUNDING)


_WAY_OUT = "Use one that acts on each coordinate alone, such as SGD or AdamW."


def _rate_of(optimizer: Optimizer, call: str) -> float:
    groups = optimizer.param_groups
    lr: Any = groups[0].get("lr")
    if len(groups) != 1 or not is_number(lr) or lr < 0:
        got = f"a tensor {lr}" if isinstance(lr, Tensor) else repr(lr)
        raise ValueError(
            f"`{call}`: {type(optimizer).__name__} has lr = {got}: it needs one number, which "
            "stands in the solver's parameter group, where schedulers change it."
        )
    return float(lr)


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}


def _run(optimizer: Optimizer, *, sparse: bool) -> None:
    if not sparse:
        optimizer.step()
        return
    # Some optimisers make sparse tensors without saying whether torch should check them.
    unchecked: Any = torch.sparse.check_sparse_tensor_invariants
    with unchecked(enable=False):
        optimizer.step()


def _sparse(indices: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(
        indices.unsqueeze(0), values, shape, is_coalesced=True, check_invariants=False
    )
