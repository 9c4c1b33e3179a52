"""How a solver steps its variables: by the paper's rule or by torch optimisers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast, get_args

from torch import Tensor
from torch.optim import Optimizer

from lightning_bilevel.core.prox import projected_step
from lightning_bilevel.core.sets import ConvexSet
from lightning_bilevel.solvers.record import StepInfo
from lightning_bilevel.solvers.steps import StepRule, clipped, plain, touching
from lightning_bilevel.solvers.streaming import Variable
from lightning_bilevel.solvers.torch_rule import OptimizerCallable, TorchRule

__all__ = ["Stepping"]

Info = TypeVar("Info", bound=StepInfo)


class Stepping(Optimizer):
    """An optimizer over an upper and a lower level, each of which may have a torch optimiser.

    Args:
        groups: The two parameter groups.
        defaults: The hyper-parameters.
        optimizers: What makes the torch optimiser of ``"upper"``, ``"lower"`` and ``"inner"``.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        optimizers: Mapping[Variable, OptimizerCallable | None],
    ) -> None:
        self._rules = _torch_rules(type(self).__name__, optimizers)
        super().__init__(groups, defaults)
        for group in self.param_groups:
            rule = self._rules.get(group["level"])
            if rule is not None:
                group["lr"] = rule.lr
                group["initial_lr"] = rule.lr
        self._forget_room()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rules": self._rules}

    @property
    def memory(self) -> dict[str, Any]:
        """The state of the run: tensors, ints, floats and bools."""
        # torch keeps state per parameter. As in torch's LBFGS, the state of the whole run is kept
        # with the first one.
        state: dict[str, Any] = self.state[self.param_groups[0]["params"][0]]
        return state

    @property
    def scheduled_levels(self) -> tuple[str, ...]:
        """The levels with a torch optimiser: their ``lr`` is what a scheduler changes."""
        return tuple(group["level"] for group in self.param_groups if group["level"] in self._rules)

    def rule(self, variable: Variable, paper: StepRule = plain) -> StepRule:
        """Return how a variable steps in :meth:`advance`.

        Args:
            variable: The upper, lower or inner variable.
            paper: The paper's step, which is taken if the variable has no torch optimiser.
        """
        rule = self._rules.get(variable)
        bound = self._bound(variable)
        if rule is None and bound is None:
            return paper

        def move(v: Tensor, direction: Tensor, rate: float, feasible: ConvexSet) -> Tensor:
            direction = clipped(direction, bound)
            if rule is None:
                return paper(v, direction, rate, feasible)
            # Copies, because the iteration may still fail and be taken back.
            key = f"{variable}_optimizer"
            state = self.memory.get(key, {})
            v, self.memory[key] = rule.step(v, direction, self._rate(variable), state)
            return feasible.project(v)

        return move

    def restarted(self, y: Tensor) -> Tensor:
        """Let the inner variable start at y, and its optimiser anew."""
        self.memory.pop("inner_optimizer", None)
        return y

    def move_(
        self,
        variable: Variable,
        v: Tensor,
        direction: Tensor,
        rate: float,
        feasible: ConvexSet,
        touched: Tensor | None = None,
    ) -> Tensor:
        """Step a variable on a mini-batch; v and the optimiser's state are changed in place."""
        direction = clipped(direction, self._bound(variable))
        rule = self._rules.get(variable)
        if rule is not None:
            state = self.memory.setdefault(f"{variable}_optimizer", {})
            rule.step_(v, direction, self._rate(variable), state, touched)
            return feasible.project(v)
        if touched is not None:
            return touching(v, direction, rate, feasible, touched)
        return projected_step(v, direction, rate, feasible)

    def room(self, name: str, like: Sequence[Tensor]) -> Tensor:
        """Return memory for a vector as long as some tensors together; its content is undefined.

        The system hands out the memory of a long vector page by page, which takes longer than the
        arithmetic. So a step on a mini-batch uses that of the last one.
        """
        size = sum(tensor.numel() for tensor in like)
        kept = self._kept_memory.get(name)
        if kept is None or kept.numel() != size or kept.dtype != like[0].dtype:
            kept = self._kept_memory[name] = like[0].new_empty(size)
        return kept

    def _forget_room(self) -> None:
        # The memory of long vectors in steps on mini-batches, by name.
        self._kept_memory: dict[str, Tensor] = {}

    def _bound(self, variable: Variable) -> float | None:
        """Return the bound of a variable's directions; z has that of y."""
        level = "upper" if variable == "upper" else "lower"
        bound: float | None = self.param_groups[0].get(f"{level}_clip")
        return bound

    def _rate(self, variable: Variable) -> float:
        """Return the rate of a variable with a torch optimiser; that of z follows that of y."""
        if variable == "upper":
            return float(self.param_groups[0]["lr"])
        lr = float(self.param_groups[1]["lr"])
        own, lower = self._rules[variable].lr, self._rules["lower"].lr
        return lr if own == lower else lr * (own / lower)

    def _with_rates(self, info: Info, upper: float, lower: float) -> Info:
        """Show the rates of the levels in their groups, but where a scheduler sets them."""
        for group, rate in zip(self.param_groups, (upper, lower), strict=True):
            if group["level"] not in self._rules:
                group["lr"] = rate
        return info if "upper" not in self._rules else replace(info, lr=self._rate("upper"))

    def _load_optimizers(self, state_dict: dict[str, Any]) -> None:
        # torch would bring all numbers of an optimiser to the dtype of the parameters.
        given: dict[str, Any] = next(iter(state_dict["state"].values()), {})
        for variable in get_args(Variable):
            key = f"{variable}_optimizer"
            if key in given:
                self.memory[key] = self._state_of(cast(Variable, variable), given[key])

    def _state_of(self, variable: Variable, state: dict[str, Any]) -> dict[str, Any]:
        if variable not in self._rules:
            raise ValueError(
                f"`{type(self).__name__}.load_state_dict` was given the state of an optimiser of "
                f"the {variable} variable, and the solver has none: make it with the "
                f"`{variable}_optimizer` of the run that was saved."
            )
        return self._rules[variable].loaded(state, self.param_groups[0]["params"][0].device)


def _torch_rules(
    solver: str, optimizers: Mapping[Variable, OptimizerCallable | None]
) -> dict[str, TorchRule]:
    given = {name: make for name, make in optimizers.items() if make is not None}
    if "inner" in given and "lower" not in given:
        raise ValueError(
            f"`{solver}(inner_optimizer=...)` needs a `lower_optimizer`: the rate of the inner "
            "variable follows the lower level's."
        )
    if "lower" in given:
        given.setdefault("inner", given["lower"])
    return {
        name: TorchRule(make, f"{solver}({name}_optimizer=...)") for name, make in given.items()
    }
