"""The base class of all methods: a torch optimizer over two levels.

Each step is one outer iteration and returns a record of it.
"""

from __future__ import annotations

import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_bilevel.core.errors import BilevelError, NonFiniteError
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sample import Sample
from lightning_bilevel.core.vectors import norm
from lightning_bilevel.solvers.record import Progress, StepInfo, StreamInfo
from lightning_bilevel.solvers.stepping import Stepping
from lightning_bilevel.solvers.steps import STEP_CONSTANTS
from lightning_bilevel.solvers.streaming import Directions, Variable, stream
from lightning_bilevel.solvers.torch_rule import OptimizerCallable

__all__ = ["BilevelOptimizer", "SolverCallable"]

# The entries of a parameter group that are not hyper-parameters of the method.
_NOT_CONSTANT = ("params", "level", "unit", "initial_lr")


class BilevelOptimizer(Stepping, ABC):
    """The base class of the bilevel methods.

    Hyper-parameters are in ``param_groups``, the state of the run is in ``state``, and the iterate
    is in the parameters. A method implements :meth:`advance`: one outer iteration on flat vectors,
    which returns the new vectors and a record.

    Args:
        params: Two parameter groups, ``[{"params": [...], "level": "upper"}, {"params": [...],
            "level": "lower"}]``. A group may have a ``unit``: the method then works in u with x =
            unit * u, which makes the steps of that level unit**2 times as long.
        defaults: The hyper-parameters: numbers, strings, None and tuples of them only, so that
            checkpoints load with ``weights_only``.
        optimizers: What makes the torch optimiser of ``"upper"``, ``"lower"`` and ``"inner"``; None
            or a missing one is the paper's step, and for ``"inner"`` a twin of the lower one.
    """

    # Whether the method strengthens a penalty. Its record is then a `PenaltyInfo`.
    penalised: ClassVar[bool] = False
    # Whether it may run on mini-batches: it compares no values of different batches. It then
    # implements `directions`.
    stochastic: ClassVar[bool] = False
    # What a message recommends for mini-batches in place of a method that is not stochastic.
    for_mini_batches: ClassVar[str] = "StreamingIVSP"
    # The name of the inner variable in the memory.
    inner_name: ClassVar[str] = "z"
    # Whether `directions` needs the distance of y and z.
    measures_distance: ClassVar[bool] = False
    # So many mini-batches in a row may be not finite before the run ends.
    patience: ClassVar[int] = 10

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # The checkpoint of a module may name its solver among the hyper-parameters. Loading it
        # with `weights_only`, torch's default, needs the class to be registered.
        torch.serialization.add_safe_globals([cls])

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        optimizers: Mapping[Variable, OptimizerCallable | None] | None = None,
    ) -> None:
        groups = _check_levels(type(self).__name__, params)
        super().__init__(groups, {"unit": 1.0, **defaults}, optimizers or {})
        self._forget()
        self.memory.update(iteration=0, inner_iterations=0, passes=0, optimization_time=0.0)

    @property
    def constants(self) -> dict[str, Any]:
        """The hyper-parameters as they are now (after a load: the saved ones)."""
        return {
            name: value for name, value in self.param_groups[0].items() if name not in _NOT_CONSTANT
        }

    @property
    def progress(self) -> Progress:
        """How far the run has come."""
        memory = self.memory
        return Progress(
            memory["iteration"],
            memory["inner_iterations"],
            memory["passes"],
            memory["optimization_time"],
            memory.get("penalty_updates"),
        )

    @property
    def hyper_parameters(self) -> dict[str, Any]:
        """The constants that have a value, for callbacks and reports that show a run."""
        return {
            name: value
            for name, value in self.constants.items()
            if value is not None and name != "lr"
        }

    @property
    def envelope(self) -> Envelope | None:
        """The Moreau envelope of the method's own relaxation, if any, in the user's y."""
        return None

    @property
    def chosen(self) -> list[tuple[str, str]]:
        """The constants that the method has chosen itself, each with its value and its origin."""
        return []

    @property
    def multiplier(self) -> float | None:
        """The method's multiplier of the gap constraint, if it has one."""
        return None

    def directions(self, sample: Sample, x: Tensor, y: Tensor, z: Tensor) -> Directions:
        """Say where the variables go in a step on a mini-batch.

        Args:
            sample: f and g on the mini-batch, at x, y and z.
            x: The upper-level variables.
            y: The lower-level variables.
            z: The inner variable, which starts at y.
        """
        raise NotImplementedError(f"`{type(self).__name__}` has no step on a mini-batch.")

    @abstractmethod
    def advance(
        self, problem: BilevelProblem, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor, StepInfo]:
        """Do one outer iteration.

        Args:
            problem: The problem, in the units of the parameter groups.
            x: The upper-level variables. If nothing has changed since the last iteration, this is
                the same tensor object that it returned.
            y: The lower-level variables, likewise.

        Returns:
            The new x and y, and the record. :meth:`step` fills in its remaining fields.
        """

    def prepare(self, problem: BilevelProblem, x: Tensor, y: Tensor) -> float:
        """Look at the problem before an iteration; return a factor for the unit of x."""
        return 1.0

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, problem: BilevelProblem | None = None
    ) -> StepInfo:
        """Do one outer iteration on the problem and write the new point into the parameters.

        Args:
            closure: Called once; Lightning counts a step by it. If ``problem`` is missing, the
                closure returns it, as in ``solver.step(lambda: problem)``: an optimizer that Fabric
                has wrapped takes a closure and nothing else.
            problem: f and g. As long as it is the same object, the evaluation of the current point
                is reused.
        """
        if closure is not None:
            with torch.enable_grad():
                returned = closure()
            problem = returned if problem is None else problem
        if not isinstance(problem, BilevelProblem):
            got = "no problem" if problem is None else f"a {type(problem).__name__}"
            raise TypeError(
                f"`{type(self).__name__}.step()` was given {got}: it needs f and g, as "
                "`step(problem=problem)` or `step(lambda: problem)` with a BilevelProblem."
            )
        if problem.mini_batch:
            return self._step_on_batch(problem)
        began = time.perf_counter()
        calls = problem.calls
        memory = self.memory
        before = dict(memory)
        scaled = self._in_units(problem)
        try:
            x, y = self._current(scaled)
            factor = self.prepare(scaled, x, y)
            if factor != 1.0:
                self.param_groups[0]["unit"] *= factor
                scaled.forget()  # the problem in the old units is not used again
                spent = scaled.calls
                scaled = self._in_units(problem)
                scaled.calls = spent
                x = x / factor
            new_x, new_y, info = self.advance(scaled, x, y)
            step = info.step
            if math.isnan(step):
                step = math.hypot(norm(new_x - x), norm(new_y - y))
            # Checked before the parameters are written: they stay at the last good point.
            if not math.isfinite(step):
                sizes = f"{norm(x):.3g}, {norm(y):.3g}"
                raise NonFiniteError(
                    f"the step from a point with norms {sizes} has the length {step}: make steps "
                    "shorter."
                )
        except BaseException as error:
            memory.clear()
            memory.update(before)
            if not isinstance(error, BilevelError):
                raise
            where = f"{type(self).__name__} stopped in outer iteration {memory['iteration'] + 1}"
            raise type(error)(f"{where}: {error}") from error
        finally:
            problem.calls = scaled.calls
        self._write(scaled, new_x, new_y)
        if info.lr is not None:
            info = self._with_rates(info, info.lr, info.lr)
        memory["iteration"] += 1
        memory["inner_iterations"] += info.inner_iterations
        memory["passes"] += (problem.calls - calls).passes
        # Processes agree on the time too, so a time limit stops them in the same iteration.
        memory["optimization_time"] += problem.mean_over_ranks(time.perf_counter() - began, new_x)
        return replace(
            info,
            iteration=memory["iteration"],
            step=step,
            calls=problem.calls - calls,
            passes=memory["passes"],
            optimization_time=memory["optimization_time"],
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse parameters beyond the two levels, for example of a finetuning callback."""
        if len(self.param_groups) == 2:
            raise ValueError(
                f"`{type(self).__name__}.add_param_group` cannot take parameters into a run whose "
                "vectors x and y have a fixed length. Unfreeze them before `Trainer.fit`; to train "
                "more, call it once more."
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a run; a state saved before groups had units is accepted too."""
        newer = ("unit", *STEP_CONSTANTS)
        groups = [
            {**{name: mine[name] for name in newer if name in mine}, **saved}
            for mine, saved in zip(self.param_groups, state_dict["param_groups"], strict=True)
        ]
        super().load_state_dict({**state_dict, "param_groups": groups})
        # The tensors are the given ones, and steps on mini-batches change them in place.
        for name, value in self.memory.items():
            if isinstance(value, Tensor):
                self.memory[name] = value.clone()
        self._load_optimizers(state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def _forget(self) -> None:
        self._forget_room()
        # The seconds of the last step on a mini-batch, if the processes have not shared them yet.
        self._seconds = 0.0
        # (problem, x, y) after the last step.
        self._point: tuple[BilevelProblem, Tensor, Tensor] | None = None
        # The parameters, each with the part of x or y that was written into it.
        self._written: list[tuple[Tensor, Tensor]] = []
        # A problem, units, and the problem in these units.
        self._scaled: tuple[BilevelProblem, list[float], BilevelProblem] | None = None

    def _step_on_batch(self, problem: BilevelProblem) -> StreamInfo:
        self._check_streaming()
        began = time.perf_counter()
        calls = problem.calls
        memory = self.memory
        before = dict(memory)
        try:
            x, y = self._copies(problem)
            new_x, new_y, info, rates, shared = stream(self, problem, x, y, self._seconds)
        except BaseException as error:
            memory.clear()
            memory.update(before)
            if not isinstance(error, BilevelError):
                raise
            where = f"{type(self).__name__} stopped in step {memory['iteration'] + 1}"
            raise type(error)(f"{where}: {error}") from error
        if rates is not None:
            self._write_batch(new_x, new_y)
            info = self._with_rates(info, *rates)
        memory["iteration"] += 1
        memory["inner_iterations"] += info.inner_iterations
        memory["passes"] += (problem.calls - calls).passes
        seconds = time.perf_counter() - began
        if problem.reduce is None:
            memory["optimization_time"] += seconds
        else:
            # Processes agree on the time. That of a step is shared along with the next batch.
            memory["optimization_time"] += shared
            self._seconds = seconds
        return replace(
            info,
            iteration=memory["iteration"],
            calls=problem.calls - calls,
            passes=memory["passes"],
            optimization_time=memory["optimization_time"],
        )

    def _check_streaming(self) -> None:
        name = type(self).__name__
        if not self.stochastic:
            raise BilevelError(
                f"`{name}.step()` was given a mini-batch: {name} compares or divides values that "
                "must be of the same data. Give it all data in each step, or use "
                f"`{self.for_mini_batches}`, which may see another batch in each step."
            )
        if self._units != [1.0, 1.0]:
            raise ValueError(
                f"`{name}.step()` was given a mini-batch, and its levels have the units "
                f"{self._units}: on mini-batches a level's `lr` takes the place of its unit. Leave "
                "the units at 1."
            )

    def _copies(self, problem: BilevelProblem) -> tuple[Tensor, Tensor]:
        """Return copies of x and y; the start of a run is projected onto the sets."""
        if self.inner_name not in self.memory:
            return self._read(problem)
        x, y = (
            torch.cat(
                [p.detach().reshape(-1) for p in group["params"]],
                out=self.room(group["level"], group["params"]),
            )
            for group in self.param_groups
        )
        return x, y

    def _write_batch(self, x: Tensor, y: Tensor) -> None:
        parameters, blocks = zip(*self._blocks(x, y), strict=True)
        torch._foreach_copy_(parameters, blocks)
        self._point = None
        self._written = []

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


SolverCallable = Callable[[Iterable[dict[str, Any]]], BilevelOptimizer]


def _check_levels(name: str, params: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    groups = list(params)
    rule = 'two groups, [{"params": [...], "level": "upper"}, {"params": [...], "level": "lower"}]'
    if not all(isinstance(group, dict) for group in groups):
        raise TypeError(f"`{name}(params)` must be {rule}.")
    by_level = {
        group.get("level"): {**group, "params": _as_list(group["params"])} for group in groups
    }
    if len(groups) != 2 or set(by_level) != {"upper", "lower"}:
        raise ValueError(
            f"`{name}(params)` was given levels {[g.get('level') for g in groups]}: it needs "
            f"{rule}."
        )
    ordered = [by_level["upper"], by_level["lower"]]
    for group in ordered:
        if not group["params"] or not sum(p.numel() for p in group["params"]):
            raise ValueError(f"`{name}(params)`: the {group['level']} level has no parameters.")
        if not 0.0 < group.get("unit", 1.0) < math.inf:
            raise ValueError(
                f"`{name}(params)`: the unit {group['unit']} of the {group['level']} level must be "
                "positive and finite."
            )
    if {id(p) for p in ordered[0]["params"]} & {id(p) for p in ordered[1]["params"]}:
        raise ValueError(f"`{name}(params)`: a parameter is in both levels; each belongs to one.")
    kinds = sorted({f"{p.dtype} on {p.device}" for group in ordered for p in group["params"]})
    if len(kinds) > 1:
        raise ValueError(
            f"`{name}(params)` has parameters of kind {', '.join(kinds)}: both levels need one "
            "dtype and device."
        )
    dtype = ordered[0]["params"][0].dtype
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"`{name}(params)` has parameters of {dtype}: only float32 and float64 are supported, "
            "because the Moreau gap is a small difference of large numbers, which half precision "
            "does not resolve."
        )
    return ordered


def _is_power_of_two(unit: float) -> bool:
    return math.frexp(unit)[0] == 0.5


def _as_list(params: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [params] if isinstance(params, Tensor) else list(params)
