"""The parameters of two levels as flat vectors, in the units of their groups."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.vectors import norm

__all__ = ["LevelVectors", "check_levels"]


class LevelVectors(Optimizer):
    """A torch optimizer whose parameters are two levels, read and written as the vectors x and y.

    A group may have a ``unit``: x = unit * u, and the method works in u.
    """

    def _forget(self) -> None:
        """Forget all that is not in the state of the run."""
        # (problem, x, y) after the last step.
        self._point: tuple[BilevelProblem, Tensor, Tensor] | None = None
        # The parameters, each with the part of x or y that was written into it.
        self._written: list[tuple[Tensor, Tensor]] = []
        # A problem, units, and the problem in these units.
        self._scaled: tuple[BilevelProblem, list[float], BilevelProblem] | None = None

    @property
    def memory(self) -> dict[str, Any]:
        """The state of the run: tensors, ints, floats and bools."""
        # torch keeps state per parameter. As in torch's LBFGS, the state of the whole run is kept
        # with the first one.
        state: dict[str, Any] = self.state[self.param_groups[0]["params"][0]]
        return state

    @property
    def _units(self) -> list[float]:
        return [group["unit"] for group in self.param_groups]

    def _in_units(self, problem: BilevelProblem) -> BilevelProblem:
        """Return the problem in u and v, x = unit * u and y = unit * v, with its count of calls."""
        if self._units == [1.0, 1.0]:
            return problem
        if self._scaled is None or self._scaled[0] is not problem or self._scaled[1] != self._units:
            self._scaled = problem, self._units, problem.in_units(*self._units)
        self._scaled[2].calls = problem.calls
        return self._scaled[2]

    def _current(self, problem: BilevelProblem) -> tuple[Tensor, Tensor]:
        """Return x and y.

        They are the same tensor objects as those of the last iteration if neither the problem nor
        the parameters have changed.
        """
        unchanged = self._point is not None and self._point[0] is problem and self._is_written()
        # All processes decide alike: one that evaluates the point again while another reuses its
        # evaluation would wait for it for ever.
        parameter = self.param_groups[0]["params"][0]
        unchanged = problem.mean_over_ranks(float(unchanged), parameter) == 1.0
        if unchanged and self._point:
            return self._point[1:]
        return self._read(problem)

    def _blocks(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parameters, each with its part of x or y."""
        for group, vector, unit in zip(self.param_groups, (x, y), self._units, strict=True):
            vector = vector if unit == 1.0 else vector * unit
            blocks = torch.split(vector, [p.numel() for p in group["params"]])
            for parameter, block in zip(group["params"], blocks, strict=True):
                yield parameter, block.view_as(parameter)

    def _is_written(self) -> bool:
        return all(torch.equal(parameter, block) for parameter, block in self._written)

    def _read(self, problem: BilevelProblem) -> tuple[Tensor, Tensor]:
        """Read x and y from the parameters; project them if they are outside their sets."""
        point = []
        levels = zip(
            self.param_groups, (problem.upper_set, problem.lower_set), self._units, strict=True
        )
        for group, convex_set, unit in levels:
            vector = torch.cat([p.detach().reshape(-1) for p in group["params"]])
            saved = self.memory.get(f"{group['level']}_in_units")
            if saved is not None and torch.equal(saved * unit, vector):
                point.append(saved)
                continue
            vector = vector / unit
            projected = convex_set.project(vector)
            moved = norm(projected - vector)
            # Projecting a projected point again may move it by a rounding error. A resumed run
            # continues exactly where it was, so such a point is left alone.
            if moved <= 1e2 * torch.finfo(vector.dtype).eps * norm(vector):
                point.append(vector)
                continue
            warnings.warn(
                f"The {group['level']}-level start lies outside {convex_set!r}: it was projected, "
                f"which moved it by {moved * unit:.3g}.",
                stacklevel=3,
            )
            point.append(projected)
        return point[0], point[1]

    def _write(self, problem: BilevelProblem, x: Tensor, y: Tensor) -> None:
        self._written = list(self._blocks(x, y))
        for parameter, block in self._written:
            parameter.copy_(block)
        for group, vector, unit in zip(self.param_groups, (x, y), self._units, strict=True):
            if not _is_power_of_two(unit):
                # Dividing the parameters by the unit would round once more: a resumed run needs the
                # vector itself.
                self.memory[f"{group['level']}_in_units"] = vector
        self._point = (problem, x, y)


def check_levels(name: str, params: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups of the upper and the lower level, or refuse what no solver can take."""
    groups = list(params)
    levels = [group.get("level") if isinstance(group, dict) else None for group in groups]
    if levels not in (["upper", "lower"], ["lower", "upper"]):
        raise ValueError(
            f"`{name}(params)` was given levels {levels}: it needs two groups, "
            '[{"params": [...], "level": "upper"}, {"params": [...], "level": "lower"}].'
        )
    # Lightning's LearningRateMonitor calls a rate by the name of its group.
    by_level = {
        level: {"name": level, **group, "params": _as_list(group["params"])}
        for level, group in zip(levels, groups, strict=True)
    }
    ordered = [by_level["upper"], by_level["lower"]]
    if {id(p) for p in ordered[0]["params"]} & {id(p) for p in ordered[1]["params"]}:
        raise ValueError(f"`{name}(params)`: a parameter is in both levels; each belongs to one.")
    kinds = {(p.dtype, p.device) for group in ordered for p in group["params"]}
    if len(kinds) != 1 or not {torch.float32, torch.float64} & {dtype for dtype, _ in kinds}:
        told = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(
            f"`{name}(params)` has parameters of {told}: only float32 and float64 are supported, "
            "in one dtype and on one device. Half precision does not resolve the Moreau gap, a "
            "small difference of large numbers."
        )
    return ordered


def _is_power_of_two(unit: float) -> bool:
    return math.frexp(unit)[0] == 0.5


def _as_list(params: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [params] if isinstance(params, Tensor) else list(params)
