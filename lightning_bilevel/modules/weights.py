"""Weights for data as an upper level: per sample, source or class, or a curve of the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_bilevel.core.sets import Box, ConvexSet, Free

# How much of the running mean square a step keeps.
_KEPT = 0.99
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
        state["square"].lerp_(mean, 1 - _KEPT)
        root = (state["square"] / (1 - _KEPT ** state["step"])).sqrt_()
        torch.maximum(state["rms"], root, out=state["rms"])
        # No gradient so far: 0 divided by the smallest number is 0.
        size = state["rms"].clamp(min=torch.finfo(entries.dtype).tiny)
        move = (entries / size).clamp_(-_LONGEST, _LONGEST)
        if sparse is None:
            parameter.sub_(move, alpha=lr)
        else:
            parameter.index_put_(tuple(sparse.indices()), -lr * move, accumulate=True)


# The logit of a weight stays between -8 and 8, where a weight is 0 or 1 to three digits.
_BOUND = 8.0


class _Table(nn.Module):
    """One logit per item, which starts at 0.

    Args:
        n: The number of items.
        bound: The bound of the logits. At 8 a sigmoid is 0 or 1 to three digits.
    """

    entry: ClassVar[int]
    optimizer: OptimizerCallable

    def __init__(self, n: int, bound: float = _BOUND) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(n))
        self.feasible: ConvexSet = Box(-bound, bound)

    def values(self) -> Tensor:
        """Return all weights, without gradients."""
        weights: Tensor = self(torch.arange(len(self.logits), device=self.logits.device))
        return weights.detach()


class SampleWeights(_Table):
    r"""One weight per training sample, :math:`w_i = \sigma(x_i)` with :math:`x_i` in [-8, 8].

    All weights start at 1/2. On mini-batches a weight moves when its sample is in the batch and at
    no other time; by default :class:`~lightning_bilevel.modules.weights.TableRMS` decides how
    far, which depends neither on the number of samples nor on the size of a batch.

    The table cannot tell anything of samples that it has no row for. For data that are seen once
    take :class:`~lightning_bilevel.modules.weights.WeightNet`.

    Args:
        n: The number of samples.
        bound: The bound of x. At 8 a weight is 0 or 1 to three digits.

    Attributes:
        entry: The place in a training batch of what ``forward`` takes: (inputs, labels, number).
        feasible: The set of the logits.
        optimizer: Makes the torch optimiser that suits them.

    Example:
        >>> weights = SampleWeights(4)
        >>> weights(torch.tensor([2, 0])).detach()
        tensor([0.5000, 0.5000])
    """

    entry = 2
    optimizer = partial(TableRMS, lr=3.0)

    def forward(self, index: Tensor) -> Tensor:
        """Return the weights of the samples with these numbers."""
        # The backward pass of plain indexing takes longer than the whole forward pass.
        return self.logits.index_select(0, index.reshape(-1)).sigmoid()


class SourceWeights(_Table):
    r"""One weight per source of data, such as a corpus or an annotator; the weights compete.

    .. math:: w_j = n \operatorname{softmax}(x)_j, \qquad x \in [-8, 8]^n

    so that the mean of the n weights is 1, as it is at the start.

    Args:
        n: The number of sources.
        bound: The bound of x.

    Attributes:
        entry: The place in a training batch of what ``forward`` takes: the last,
            (inputs, labels, source) or (inputs, labels, number, source).
        feasible: The set of the logits.
        optimizer: Makes the torch optimiser that suits them: AdamW with a rate of 1e-2. A logit
            moves by about the rate in each step, so a run needs some hundreds of steps.

    Example:
        >>> SourceWeights(3)(torch.tensor([0, 2, 2])).detach()
        tensor([1., 1., 1.])
    """

    entry = -1
    # Weight decay would pull the weights together.
    optimizer = partial(AdamW, lr=1e-2, weight_decay=0.0)

    def forward(self, index: Tensor) -> Tensor:
        """Return for each sample the weight of the item with its number."""
        weights = len(self.logits) * self.logits.softmax(0)
        return weights.index_select(0, index.reshape(-1))

    def shares(self) -> Tensor:
        """Return the weights as shares, which are positive and sum to 1."""
        return self.logits.detach().softmax(0)


class ClassWeights(SourceWeights):
    r"""One weight per class, for classes out of balance; otherwise as :class:`SourceWeights`.

    Args:
        n: The number of classes.
        bound: The bound of x.

    Attributes:
        entry: The place in a training batch of what ``forward`` takes: that of the labels,
            (inputs, labels).
    """

    entry = 1


class WeightNet(nn.Module):
    r"""A weight for each sample by its loss alone, after Shu et al. (2019).

    .. math:: w(\ell) = \sigma\bigl(8 \tanh(h_x(\ell) / 8)\bigr), \qquad
        h_x(\ell) = a^\top \max\{b\,\ell + c,\, 0\} + d, \qquad x = (a, b, c, d)

    There is no table, so samples need no number and may be seen once only. All weights start at
    1/2. The loss is taken as a number: g has no gradient in y through the weight.

    A curve of the loss cannot tell a wrong label from a right one that is hard. It helps as far as
    wrong labels have larger losses.

    Args:
        hidden: The hidden units.

    Attributes:
        entry: None: ``forward`` takes the losses of a training batch, and no entry of it.
        feasible: The set of x, the whole space.
        optimizer: Makes the torch optimiser that suits x: AdamW with a rate of 1e-2.
    """

    entry: ClassVar[None] = None

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        last = nn.Linear(hidden, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), last)
        self.feasible: ConvexSet = Free()
        self.optimizer: OptimizerCallable = partial(AdamW, lr=1e-2, weight_decay=0.0)

    def forward(self, losses: Tensor) -> Tensor:
        """Return the weights of samples with these losses."""
        # The layers may run in half precision; the weights have the precision of the losses.
        found = self.layers(losses.detach().unsqueeze(1)).squeeze(1).to(losses.dtype)
        weights: Tensor = (_BOUND * torch.tanh(found / _BOUND)).sigmoid()
        return weights
