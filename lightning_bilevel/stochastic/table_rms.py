"""TableRMS, a torch optimiser for a table with one row per sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["TableRMS"]

# How much of the running mean square a step keeps.
_DECAY = 0.99
# No entry moves by more than so many rates in a step.
_LONGEST = 3.0


class TableRMS(Optimizer):
    r"""Steps of similar size for a table of which a batch touches a few entries, such as weights.

    An entry has a gradient a few times in a run only, so its own statistics, as Adam keeps them,
    are of little use, and momentum would move entries that the batch does not speak of. It keeps
    ONE mean square v for all entries, and its root r only grows. With the gradients :math:`g_i` of
    the entries T that are not 0 in step t:

    .. math::
        v_t &= 0.99\, v_{t-1} + 0.01\, \tfrac{1}{|T|} \sum_{i \in T} g_i^2, \qquad
          r_t = \max\{r_{t-1},\; \sqrt{v_t / (1 - 0.99^t)}\} \\
        x_i &\leftarrow x_i - \text{lr} \cdot \operatorname{clip}(g_i / r_t,\; -3,\; 3),
          \qquad i \in T

    The other entries stay as they are, bit for bit: a sample outside of the batch has gradient 0.
    Give the level a set such as ``Box(-8, 8)``: a logit beyond is a weight of 0 or 1 all the same.

    Args:
        params: The parameters; each has its own mean square. Sparse gradients are taken too.
        lr: The rate: about how far an entry moves when it is touched.
    """

    def __init__(self, params: Iterable[Any], lr: float = 3.0) -> None:
        if not lr >= 0:
            raise ValueError(f"`TableRMS(lr={lr!r})` must be nonnegative.")
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the entries that have a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group["lr"])
        return loss

    def _move(self, parameter: Tensor, gradient: Tensor, lr: float) -> None:
        sparse = gradient.coalesce() if gradient.is_sparse else None
        entries = gradient if sparse is None else sparse.values()
        state = self.state[parameter]
        if not state:
            state |= {"step": 0, "square": entries.new_zeros(()), "rms": entries.new_zeros(())}
        state["step"] += 1
        # The mean over the touched entries, without asking the device how many there are.
        mean = entries.square().sum() / (entries != 0).sum().clamp(min=1)
        state["square"].lerp_(mean, 1 - _DECAY)
        root = (state["square"] / (1 - _DECAY ** state["step"])).sqrt_()
        torch.maximum(state["rms"], root, out=state["rms"])
        # No gradient so far: 0 divided by the smallest number is 0.
        size = state["rms"].clamp(min=torch.finfo(entries.dtype).tiny)
        move = (entries / size).clamp_(-_LONGEST, _LONGEST)
        if sparse is None:
            parameter.sub_(move, alpha=lr)
        else:
            parameter.index_put_(tuple(sparse.indices()), -lr * move, accumulate=True)
