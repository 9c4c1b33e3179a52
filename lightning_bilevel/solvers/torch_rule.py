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

# The longest piece that is stepped at once on a CPU.
_PIECE = 1 << 16
# Experiments are on the host, whatever the default device of the user is.
_HOST = "cpu"
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
        self._pieces: list[nn.Parameter] = []
        probe = self._make([nn.Parameter(torch.zeros(2, device=_HOST))])
        self.name = type(probe).__name__
        # The rate that the optimiser was made with.
        self.lr = _rate_of(probe, call)
        settings = probe.param_groups[0]
        self._counts_on_device = bool(settings.get("fused") or settings.get("capturable"))
        # Whether it makes its state along with itself, as Adagrad does.
        self._eager = bool(probe.state)
        # The names in its state, which the experiments find out.
        self._names: set[str] = set()
        # Whether it takes a sparse gradient and then moves nothing else, and whether a dense one.
        self.sparse = self._leaves_untouched_alone()
        self.dense = self._runs(self._dense_trial)
        self.elementwise = self._is_elementwise()
        if not self.elementwise and not getattr(type(probe), "whole_vector", False):
            raise ValueError(
                f"`{call}`: {self.name} does not act on each coordinate alone, so it would do "
                f"something else to the level's flat vector than to its parameters. Use "
                "one that acts on each coordinate alone, such as SGD or AdamW."
            )

    def __getstate__(self) -> dict[str, Any]:
        # The state is with the solver, so a copy makes its optimiser anew.
        return {**self.__dict__, "_optimizer": None, "_pieces": []}

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
        gradient = self._gradient(direction, touched)
        pieces = self._cut(v, gradient)
        optimizer = self._with_pieces(pieces)
        states = _states_of_pieces(state, pieces)
        for parameter, (values, slope), known in zip(self._pieces, pieces, states, strict=True):
            parameter.data = values
            parameter.grad = slope
            if self._eager and not known:
                known.update(self._first_state(values))
            optimizer.state[parameter] = known
        optimizer.param_groups[0]["lr"] = lr
        try:
            _run(optimizer, sparse=gradient.is_sparse)
        finally:
            # The vector and its gradient belong to the caller.
            optimizer.state.clear()
            for parameter in self._pieces:
                parameter.grad = None
                parameter.data = v.new_empty(0)
        if len(pieces) > 1:
            _join(state, states)

    def _first_state(self, values: Tensor) -> dict[str, Any]:
        parameter = nn.Parameter(values.detach())
        return dict(self._make([parameter]).state[parameter])

    def step(
        self,
        v: Tensor,
        direction: Tensor,
        lr: float,
        state: dict[str, Any],
        touched: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the new v and the new state; the old ones are unchanged."""
        new = v.clone()
        new_state = copy.deepcopy(state)
        self.step_(new, direction, lr, new_state, touched)
        return new, new_state

    def loaded(self, state: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """Return a saved state as a copy on the device of the parameters."""
        if state and set(state) != self._names:
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

    def _cut(self, v: Tensor, gradient: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cut a long vector on a CPU, if each coordinate steps alone anyway.

        The memory of a long intermediate result comes from the system page by page, which takes
        longer than the arithmetic, while a piece stays in the cache.
        """
        if v.device.type != "cpu" or not self.elementwise or gradient.is_sparse:
            return [(v, gradient)]
        return list(zip(torch.split(v, _PIECE), torch.split(gradient, _PIECE), strict=True))

    def _with_pieces(self, pieces: list[tuple[Tensor, Tensor]]) -> Optimizer:
        if self._optimizer is None or len(self._pieces) != len(pieces):
            self._pieces = [nn.Parameter(values.detach()) for values, _ in pieces]
            self._optimizer = self._make(self._pieces)
        return self._optimizer

    def _gradient(self, direction: Tensor, touched: Tensor | None) -> Tensor:
        if self.sparse and touched is not None:
            return _sparse(touched, direction[touched], direction.shape)
        if not self.dense:
            everywhere = torch.arange(direction.numel(), device=direction.device)
            return _sparse(everywhere, direction, direction.shape)
        if touched is not None:
            return torch.zeros_like(direction).index_copy_(0, touched, direction[touched])
        return direction

    # --- Experiments

    def _stepped(self, gradients: list[Tensor], size: int) -> list[Tensor]:
        """Return a vector of ones after each of some steps."""
        parameter = nn.Parameter(torch.ones(size, dtype=torch.float64, device=_HOST))
        optimizer = self._make([parameter])
        path = []
        for gradient in gradients:
            parameter.grad = gradient.clone()
            _run(optimizer, sparse=gradient.is_sparse)
            path.append(parameter.detach().clone())
        self._names = set(optimizer.state[parameter])
        return path

    def _runs(self, trial: Callable[[], object]) -> bool:
        try:
            trial()
        except (RuntimeError, NotImplementedError):
            return False
        return True

    def _dense_trial(self) -> None:
        self._stepped([torch.ones(2, dtype=torch.float64, device=_HOST)], 2)

    def _leaves_untouched_alone(self) -> bool:
        """Tell whether it takes sparse gradients, and a coordinate outside of them stays."""
        value = torch.ones(1, dtype=torch.float64, device=_HOST)
        indices = torch.split(torch.arange(2, device=_HOST), 1)
        gradients = [_sparse(index, value, torch.Size([2])) for index in indices]
        try:
            first, second = self._stepped(gradients, 2)
        except (RuntimeError, NotImplementedError):
            return False
        return bool(first[1] == 1.0) and bool(first[0] == second[0])

    def _is_elementwise(self) -> bool:
        """Tell whether [a, b] steps as a and b do apart."""
        numbers = [
            [1.0, -2.0, 4.5, 3e-3, 40.0, -0.1, 7.0, -60.0],
            [-0.3, 1.0, -2.0, 1e-2, -9.0, 0.2, -5.0, 30.0],
        ]
        gradients = [torch.tensor(row, dtype=torch.float64, device=_HOST) for row in numbers]
        everywhere = torch.arange(8, device=_HOST)

        def path(part: slice) -> Tensor:
            size = len(range(*part.indices(8)))
            given = [gradient[part] for gradient in gradients]
            if not self.dense:
                given = [_sparse(everywhere[:size], gradient, gradient.shape) for gradient in given]
            return torch.stack(self._stepped(given, size))

        together = path(slice(0, 8))
        apart = torch.cat([path(slice(0, 4)), path(slice(4, 8))], dim=1)
        return torch.allclose(together, apart, rtol=_ROUNDING, atol=_ROUNDING)


def _rate_of(optimizer: Optimizer, call: str) -> float:
    groups = optimizer.param_groups
    lr: Any = groups[0].get("lr")
    if len(groups) != 1 or not is_number(lr) or lr <= 0:
        got = f"a tensor {lr}" if isinstance(lr, Tensor) else repr(lr)
        raise ValueError(
            f"`{call}`: {type(optimizer).__name__} has lr = {got}: it needs one positive number, "
            "which stands in the solver's parameter group, where schedulers change it."
        )
    return float(lr)


def _states_of_pieces(
    state: dict[str, Any], pieces: list[tuple[Tensor, Tensor]]
) -> list[dict[str, Any]]:
    """Return the state of each piece: views of long tensors, and copies of single numbers."""
    if len(pieces) == 1:
        return [state]
    sizes = [len(values) for values, _ in pieces]
    states: list[dict[str, Any]] = [{} for _ in pieces]
    for name, item in state.items():
        for i, part in enumerate(item.split(sizes) if _is_long(item) else [item] * len(pieces)):
            states[i][name] = part.clone() if isinstance(part, Tensor) and not part.ndim else part
    return states


def _join(state: dict[str, Any], states: list[dict[str, Any]]) -> None:
    """Put the states of the pieces together; what was changed in place is there already."""
    for name, item in states[0].items():
        known = state.get(name)
        if not _is_long(item):
            state[name] = item
        elif known is None or known.data_ptr() != item.data_ptr():
            state[name] = torch.cat([part[name] for part in states])


def _is_long(item: Any) -> bool:
    return isinstance(item, Tensor) and item.ndim > 0


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
        indices.unsqueeze(0),
        values,
        shape,
        device=values.device,
        is_coalesced=True,
        check_invariants=False,
    )
