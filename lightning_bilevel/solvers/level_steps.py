"""How the levels of a solver step: as the papers do, or by torch optimisers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from lightning_bilevel.core.prox import projected_step
from lightning_bilevel.core.sets import ConvexSet
from lightning_bilevel.solvers.level_vectors import LevelVectors
from lightning_bilevel.solvers.record import StepInfo
from lightning_bilevel.solvers.steps import StepRule, clipped, plain, touching
from lightning_bilevel.solvers.streaming import Variable
from lightning_bilevel.solvers.torch_rule import OptimizerCallable, TorchRule

__all__ = ["LevelSteps", "torch_rules"]

Info = TypeVar("Info", bound=StepInfo)


class LevelSteps(LevelVectors):
    """Two levels and an inner variable, each with its step rule.

    The rate of a level with a torch optimiser is the ``lr`` of its group. The optimiser's state is
    in the memory of the run.
    """

    # The torch optimisers, by variable.
    _rules: dict[str, TorchRule]

    @property
    def scheduled_levels(self) -> tuple[str, ...]:
        """The levels with a torch optimiser: their ``lr`` is what a scheduler changes."""
        return tuple(group["level"] for group in self.param_groups if group["level"] in self._rules)

    def rule(
        self, variable: Variable, paper: StepRule = plain, touched: Tensor | None = None
    ) -> StepRule:
        """Return how a variable steps in :meth:`advance`.

        Args:
            variable: The upper, lower or inner variable.
            paper: The paper's step, which is taken if the variable has no torch optimiser.
            touched: The coordinates that a mini-batch touches; None for all.
        """
        rule = self._rules.get(variable)
        bound = self._bound(variable)
        if rule is None and bound is None and touched is None:
            return paper

        def move(v: Tensor, direction: Tensor, rate: float, feasible: ConvexSet) -> Tensor:
            direction = clipped(direction, bound)
            if rule is None and touched is not None:
                return touching(v, direction, rate, feasible, touched)
            if rule is None:
                return paper(v, direction, rate, feasible)
            # Copies, because the iteration may still fail and be taken back.
            key = f"{variable}_optimizer"
            state = self.memory.get(key, {})
            v, self.memory[key] = rule.step(v, direction, self._rate(variable), state, touched)
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

    def _state_of(self, variable: Variable, state: dict[str, Any]) -> dict[str, Any]:
        if variable not in self._rules:
            raise ValueError(
                f"`{type(self).__name__}.load_state_dict` was given the state of an optimiser of "
                f"the {variable} variable, and the solver has none: make it with the "
                f"`{variable}_optimizer` of the run that was saved."
            )
        return self._rules[variable].loaded(state, self.param_groups[0]["params"][0].device)


def torch_rules(
    solver: str, optimizers: Mapping[Variable, OptimizerCallable | None]
) -> dict[str, TorchRule]:
    """Make the step rules of the variables that have a torch optimiser."""
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
