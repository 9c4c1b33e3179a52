"""A module's losses as functions of flat vectors, and the problem on a batch.

The functions touch neither the module's parameters nor its running statistics.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed
from torch import Tensor, nn

from lightning_bilevel.certifier import Certifier
from lightning_bilevel.checks import (
    ON_MINI_BATCHES,
    check_batch,
    check_epoch,
    check_optimizer,
    check_same_data,
)
from lightning_bilevel.core.chunks import as_chunks
from lightning_bilevel.core.errors import BilevelError, NonFiniteError
from lightning_bilevel.core.leaves import leaves, tensors
from lightning_bilevel.core.lower import Function, Part, weighted
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.sets import ConvexSet
from lightning_bilevel.distributed import check_parts, check_same_point, shared_problem
from lightning_bilevel.logging import publish_step
from lightning_bilevel.solvers.base import BilevelOptimizer
from lightning_bilevel.solvers.record import StepInfo

__all__ = ["RESTORED", "BatchProblem", "ModuleFunctions", "Run", "problem_of"]

# The name of a point that `restore` has written into the module.
RESTORED = "an earlier point of the run, which was restored"

# The places of a tensor: the dictionary of a layer and the name in it, for each layer that has it.
Places = list[tuple[dict[str, Tensor | None], str]]


class ModuleFunctions:
    """Calls a module's methods with other parameters, and with copies of some of its buffers.

    ``torch.func.functional_call`` does the same, but looks up the places of the tensors at each
    call: on small networks that took longer than the arithmetic of the solver.

    Args:
        module: The module.
        upper: Its upper-level parameters.
        lower: Its lower-level parameters.
        protected: The buffers that calls may write to. Batch normalisation updates its running
            statistics at every call, also at trial points that are rejected later: in copies.
    """

    def __init__(
        self,
        module: nn.Module,
        upper: Iterable[nn.Parameter],
        lower: Iterable[nn.Parameter],
        protected: Iterable[Tensor] = (),
    ) -> None:
        self.module = module
        homes: dict[int, Places] = {}
        for layer in module.modules():
            for entries in (layer._parameters, layer._buffers):
                for name, tensor in entries.items():
                    if tensor is not None:
                        place = cast(dict[str, Tensor | None], entries), name
                        homes.setdefault(id(tensor), []).append(place)
        levels = [list(upper), list(lower)]
        self.homes = [[homes[id(p)] for p in level] for level in levels]
        self.shapes = [[p.shape for p in level] for level in levels]
        self.sizes = [[p.numel() for p in level] for level in levels]
        self.copies = [(homes[id(buffer)], buffer.clone()) for buffer in protected]

    @property
    def written(self) -> list[Tensor]:
        """The module's buffers whose copies now differ from them."""
        pairs = [(_own(places), copy) for places, copy in self.copies]
        return [buffer for buffer, copy in pairs if not torch.equal(buffer, copy)]

    def protect_written(self) -> None:
        """Protect only the buffers that the calls so far have written to.

        Their copies are changed: losses that depend on them differ from call to call, and are
        refused as random ones are.
        """
        written = {id(buffer) for buffer in self.written}
        self.copies = [pair for pair in self.copies if id(_own(pair[0])) in written]
        for _, copy in self.copies:
            if copy.is_floating_point():
                copy.mul_(0.5).add_(0.25)

    @property
    def buffers(self) -> list[Tensor]:
        """The module's own buffers that are protected."""
        return [_own(places) for places, _ in self.copies]

    def call(
        self, method: str, *args: Any, x: Tensor | None = None, y: Tensor | None = None
    ) -> Any:
        """Return module.method(*args) at flat x and y; None keeps the module's own parameters."""
        new = list(self.copies)
        for homes, shapes, sizes, vector in zip(
            self.homes, self.shapes, self.sizes, (x, y), strict=True
        ):
            if vector is not None:
                blocks = torch.split(vector, sizes) if len(sizes) > 1 else (vector,)
                for places, shape, block in zip(homes, shapes, blocks, strict=True):
                    new.append((places, block.view(shape)))
        try:
            own = [(entries, name, entries[name]) for places, _ in new for entries, name in places]
        except KeyError as error:
            raise BilevelError(
                f"a parameter or buffer {error} of the module is no longer where it was when the "
                "run started: pruning and other changes of parameters in the middle of a run make "
                "it another problem. Do it before `Trainer.fit`."
            ) from error
        try:
            for places, tensor in new:
                for entries, name in places:
                    entries[name] = tensor
            return self._run(method, args)
        finally:
            # A call may have put another tensor into the place of a buffer.
            self.copies = [(places, _own(places).detach()) for places, _ in self.copies]
            for entries, name, mine in own:
                entries[name] = mine

    def _run(self, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(self.module, method)(*args)

    def update_buffers(self, batch: dict[str, Any], *, shared: bool) -> None:
        """Evaluate the losses once at the module's own point, so that running statistics follow.

        Where processes evaluate a part each, all of them take the buffers of the first one.
        """
        module: Any = self.module
        split = module.lower_features or module.lower_outputs
        for part in as_chunks(batch["lower"]).batches:
            module.lower_loss(part, *([] if split is None else [split(part)]))
        for part in as_chunks(batch["upper"]).batches:
            module.upper_loss(part)
        for buffer in self.buffers if shared else ():
            torch.distributed.broadcast(buffer, 0)


def _functions_of(module: Any) -> ModuleFunctions:
    upper, lower = module._declared().levels
    return ModuleFunctions(module, upper.parameters, lower.parameters, module.buffers())


def _own(places: Places) -> Tensor:
    entries, name = places[0]
    return cast(Tensor, entries[name])


def problem_of(
    functions: ModuleFunctions, batch: dict[str, Any], upper_set: ConvexSet, lower_set: ConvexSet
) -> BilevelProblem:
    """Return f and g on a batch ``{"upper": ..., "lower": ...}``.

    They are the losses of a module, summed over the chunks with their shares as weights.
    """
    call, module = functions.call, functions.module
    has_features = module.lower_features is not None
    has_outputs = module.lower_outputs is not None

    def upper_loss(part: Any) -> Function:
        return lambda x, y: call("upper_loss", part, x=x, y=y)

    def lower_loss(part: Any) -> Function:
        if has_features:
            return lambda features, y: call("lower_loss", part, features, y=y)
        if has_outputs:
            return lambda x, outputs: call("lower_loss", part, outputs, x=x)
        return lambda x, y: call("lower_loss", part, x=x, y=y)

    def features(part: Any) -> Part:
        return lambda x: call("lower_features", part, x=x)

    def outputs(part: Any) -> Part:
        return lambda y: call("lower_outputs", part, y=y)

    def constraints(part: Any) -> Function:
        return lambda x, y: torch.stack(call("constraints", part, x=x, y=y))

    upper, lower = (as_chunks(batch[level]) for level in ("upper", "lower"))
    of_upper, of_lower = (
        list(zip(chunks.batches, chunks.shares, strict=True)) for chunks in (upper, lower)
    )
    problem = BilevelProblem(
        [weighted(upper_loss(part), share) for part, share in of_upper],
        [weighted(lower_loss(part), share) for part, share in of_lower],
        upper_set,
        lower_set,
        features=[features(part) for part in lower.batches] if has_features else None,
        outputs=[outputs(part) for part in lower.batches] if has_outputs else None,
    )
    if getattr(module, "constraints", None) is not None:
        problem.residual_terms = [weighted(constraints(part), share) for part, share in of_upper]
    return problem


class BatchProblem:
    """f and g on a batch.

    Attributes:
        batch: The batch, as all processes have it.
        part: The part that this process evaluates; the batch itself if each evaluates all of it.
        problem: f and g on the batch.
    """

    def __init__(self, batch: dict[str, Any], part: Any, problem: BilevelProblem) -> None:
        self.batch, self.part, self.problem = batch, part, problem
        self._levels = batch["upper"], batch["lower"]
        self._leaves = list(leaves(batch))
        # The version of a tensor counts in-place changes.
        self._versions = [(tensor, tensor._version) for tensor in tensors(batch)]

    def is_of(self, batch: Any) -> bool:
        """Whether a batch is this one, unchanged, or equal to it.

        A loader of one whole batch collates equal tensors anew in each epoch.
        """
        for tensor, version in self._versions:
            if tensor._version != version:
                return False
        upper, lower = self._levels
        if batch is self.batch and batch["upper"] is upper and batch["lower"] is lower:
            return True
        found = list(leaves(batch))
        return len(found) == len(self._leaves) and all(map(_equal, found, self._leaves))


def _equal(new: Any, old: Any) -> bool:
    if new is old or not (isinstance(new, Tensor) and isinstance(old, Tensor)):
        return new is old or (type(new) is type(old) and bool(new == old))
    kind = new.dtype, new.device, new.shape
    return kind == (old.dtype, old.device, old.shape) and torch.equal(new, old)


@dataclass
class Run:
    """The state of a module's run. Each run has a new one, so nothing is left of an earlier run.

    Attributes:
        solver: The solver.
        certifier: The last certificate, and what belongs to it.
        step: The record of the last step.
        functions: The losses as functions of flat vectors.
        current: The problem on the latest batch.
        whole: The problem on all data, in a run on a growing sample; None otherwise.
        watched: Whether a callback monitors a number of the steps.
        last: The weights that the run goes on from, if :meth:`BilevelMixin.restore` has written
            earlier ones into the module.
        multiplier: The multiplier of the restored point; None is the solver's.
        shown: Which point the module shows, in words, if it is not the last iterate.
        stamp: The norms of the parameters when the last epoch ended. Others afterwards tell that
            somebody else has written to them, as callbacks that average weights do.
    """

    solver: BilevelOptimizer
    certifier: Certifier = field(default_factory=Certifier)
    step: StepInfo | None = None
    functions: ModuleFunctions | None = None
    current: BatchProblem | None = None
    whole: BatchProblem | None = None
    watched: bool = False
    last: dict[str, Any] | None = None
    multiplier: float | None = None
    shown: str = ""
    stamp: Tensor | None = None

    def training_step(self, module: Any, batch: Any) -> None:
        """Do one outer iteration."""
        current = self.current
        if current is None or not current.is_of(batch):
            current = self._next(module, batch)
        # Lightning counts only steps through its own wrapper of the optimizer.
        info: StepInfo = module.optimizers().step(problem=current.problem)
        self.has_moved(info)
        if self.functions is not None and self.functions.copies:
            self.functions.update_buffers(current.part, shared=current.problem.reduce is not None)
        trainer = module.trainer
        every = trainer.log_every_n_steps  # 0 is never
        logged = every > 0 and (info.iteration % every == 0 or info.iteration == 1)
        if logged:
            check_same_point(trainer, module._declared().parameters, info.iteration)
        if logged or self.watched:
            publish_step(trainer, info, logged=logged)

    def epoch_end(self, module: Any) -> None:
        """Look at an epoch that has ended."""
        declared = module._declared()
        check_epoch(type(module).__name__, self.solver, declared)
        self.stamp = declared.norms()
        if self.step is not None:
            publish_step(module.trainer, self.step, logged=False)

    def _next(self, module: Any, batch: Any) -> BatchProblem:
        """Return the problem on another batch: the first one, or a sample that has grown."""
        name, trainer = type(module).__name__, module.trainer
        sample: Any = getattr(trainer.train_dataloader, "sample", None)
        before = self.current
        if before is None:
            check_optimizer(module, module.optimizers())
            monitors = [str(getattr(callback, "monitor", "")) for callback in trainer.callbacks]
            self.watched = any(monitor.startswith("bilevel/") for monitor in monitors)
            if sample is not None:
                # The checks of the first problem are of all data.
                self.whole = self.problem_on(module, sample.batch)
        check_same_data(name, self.solver, same=before is None or bool(sample and sample.begins))
        self.current = current = self.problem_on(module, batch)
        if self.whole is not None:
            current.problem.sampled_from(self.whole.problem, sample.share)
            if sample.begins:
                self.solver.problem_changed()
        return current

    def problem_on(self, module: Any, batch: Any) -> BatchProblem:
        """Return the problem on a batch, shared by all processes; the first one is checked."""
        for known in (self.current, self.whole):
            if known is not None and known.is_of(batch):
                return known
        check_batch(type(module).__name__, batch)
        first = self.functions is None
        if first:
            self.functions = _functions_of(module)
        make = partial(self.problem_of, module)
        problem, part = shared_problem(module, make, module._attached, batch)
        if first:
            point = module._declared().feasible_point()
            if part is not batch:
                check_parts(type(module).__name__, make(batch), problem, point)
            self._check(module, problem, *point)
        known = BatchProblem(batch, part, problem)
        self.current = self.current or known
        return known

    def _check(self, module: nn.Module, problem: BilevelProblem, x: Tensor, y: Tensor) -> None:
        """Refuse losses that change from call to call; note the gradients at the start."""
        functions, words = self.functions, f"Or run on mini-batches: {ON_MINI_BATCHES}."
        assert functions is not None
        if functions.copies:
            with problem.uncounted():
                problem.upper(x, y)
                problem.at(x, remember=False).value(y)
            problem.forget()
            functions.protect_written()
            written = set(map(id, functions.buffers))
            names = [name for name, b in module.named_buffers() if id(b) in written]
            if names:
                words = (
                    "Nor may a loss depend on buffers that calls write to, as those of a spectral "
                    f"norm: {', '.join(names)}. {words}"
                )
        try:
            start = problem.check(x, y)
        except NonFiniteError:
            raise
        except BilevelError as error:
            raise type(error)(f"{error} {words}") from error
        self.certifier.start = self.certifier.start or start

    def problem_of(self, module: Any, batch: dict[str, Any]) -> BilevelProblem:
        """Return f and g on a batch, in this process."""
        upper, lower = module._declared().levels
        functions = self.functions or _functions_of(module)
        return problem_of(functions, batch, upper.feasible, lower.feasible)

    def problem_to_certify(self, module: Any, batch: Any) -> BilevelProblem:
        """Return the problem on a batch; None is all data, or the last batch."""
        known = self.whole or self.current if batch is None else self.problem_on(module, batch)
        if known is None:
            raise RuntimeError(
                f"`{type(module).__name__}.certify()` needs a training batch: call it after "
                "`Trainer.fit` in the same process, or give it one, `certify(batch=...)`."
            )
        return known.problem

    def has_moved(self, step: StepInfo) -> None:
        """Keep the record of a step, which goes on from whatever was written into the module."""
        self.step = step
        self.last = self.multiplier = self.stamp = None
        self.shown = ""

    def point_name(self, norms: Tensor) -> str:
        """Name the point in the module; the name is empty before the first iteration.

        Args:
            norms: Those of the parameters now.
        """
        iterations = self.solver.progress.iterations
        if self.shown or iterations == 0:
            return self.shown
        if self.stamp is not None and not torch.equal(self.stamp, norms.to(self.stamp)):
            return f"weights that were written after iteration {iterations}, such as an average"
        return f"the last iterate, iteration {iterations}"

    def __getstate__(self) -> dict[str, Any]:
        # Functions of a batch cannot be pickled. They are made again for the next batch.
        dropped = dict.fromkeys(("functions", "current", "whole", "stamp"))
        return {**vars(self), **dropped, "certifier": replace(self.certifier, last=None)}
