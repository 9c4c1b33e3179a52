"""Few-shot learning: learn features on which linear heads generalise from a few examples."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor
from torch.optim import Adam

from lightning_bilevel.core.chunks import Chunks, as_chunks
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.qualification import ConstantAffineSegments
from lightning_bilevel.core.sets import Box
from lightning_bilevel.data.episodes import EpisodeData, Episodes
from lightning_bilevel.module import BilevelModule
from lightning_bilevel.modules.networks import Conv4, EpisodeSets, TaskHeads, adapt, mean_loss
from lightning_bilevel.solvers.base import SolverCallable
from lightning_bilevel.solvers.ivsp.solver import IVSP
from lightning_bilevel.stochastic.penalties import F2SA, Penalty, Weights
from lightning_bilevel.stochastic.step import Numbers, Step

# The largest weight of the encoder and of a head.
_UPPER, _LOWER = 5.0, 20.0


class FewShot(BilevelModule):
    r"""A shared feature extractor above, a linear head per training task below.

    .. math::
        \min_{x, y} \frac{1}{T} \sum_{i=1}^T \mathcal L_{Q_i}(x, y_i) \quad\text{s.t.}\quad
        y \in \arg\min_{y'} \frac{1}{T} \sum_{i=1}^T \mathcal L_{S_i}(x, y'_i)

    with the mean cross-entropy :math:`\mathcal L` on the query set :math:`Q_i` or the support set
    :math:`S_i` of task i, x in [-5, 5] and y in [-20, 20]. The lower level is convex in y
    and constant along its affine segments, so the constraint qualification holds for each delta.
    The ReLU and the max-pooling of the encoder are not differentiable, so the convergence theorem
    does not cover it in the letter.

    With a method (or what its optimiser takes) each step has fresh episodes
    (:class:`~lightning_bilevel.data.episodes.EpisodeData` with ``tasks_per_batch``). The heads then
    belong to the batch. With the features of the batch computed once, the weights a, b and the
    :math:`\rho` of the method, and :math:`P` the projection onto their box, n steps from zero:

    .. math::
        z &\leftarrow P(z - s \nabla_y g(x, z)), \quad n \text{ times from 0} \\
        y &\leftarrow P\Bigl(y - s \frac{a \nabla_y f(x, y) + b\, [\nabla_y g(x, y)
          + (z - y)/\rho]}{a + b}\Bigr), \quad n \text{ times from } z

    A method with a proximal term moves z along with y, by
    :math:`z \leftarrow P(z - s [\nabla_y g(x, z) + (z - y)/\rho])`; the others leave out
    :math:`(z - y)/\rho`. Then x makes one step of its optimiser, down
    :math:`a f(x, y) + b\, [g(x, y) - g(x, z)]` by one backward pass through the features. b of
    StreamingIVSP is that of the gaps of earlier steps.

    Validation fits new heads to unseen classes by 10 gradient steps of 0.1, and logs their loss and
    error on the queries: ``val_loss``, ``val_error``, ``test_loss`` and ``test_error``.

    Args:
        tasks: The number of training episodes, T; on mini-batches that of a batch.
        ways: Classes of an episode.
        channels: Channels of each convolution.
        image_size: Height and width of an image.
        chunk_images: The number of images that are evaluated at once: enough to keep the cores
            busy, few enough that the tensors saved for the backward pass fit into the caches. The
            chunk size does not change the loss or its gradient.
        lower_unit: The unit of y for the solver. Losses are means over tasks, so the gradient in y
            shrinks as 1/T: solver settings for 128 tasks need a unit of about sqrt(T/128).
        envelope: The Moreau envelope (rho, sigma, delta) of the certificate, for solvers that have
            none of their own.
        method: The method on fresh episodes, one of F2SA, VPBGD, F2BA, MEHA and StreamingIVSP of
            :mod:`lightning_bilevel.stochastic`; None is F2SA, if one of the next three is given.
        upper_optimizer: Makes the torch optimiser of the encoder on fresh episodes; None is Adam
            with a rate of 1e-3.
        upper_scheduler: Makes its scheduler, which steps at every step.
        gradient_clip_val: The largest gradient norm of the encoder there.
        inner_steps: n, the gradient steps of z, and then of y from there.
        inner_lr: The step of a head on the loss of its own task, whatever the number of tasks.
        solver: The solver of an exact run on the same episodes in each step; None is IVSP.
    """

    def __init__(
        self,
        tasks: int = 128,
        ways: int = 10,
        channels: int = 64,
        image_size: int = 28,
        chunk_images: int = 50,
        lower_unit: float = 1.0,
        envelope: Envelope | None = None,
        method: Penalty | None = None,
        upper_optimizer: OptimizerCallable | None = None,
        upper_scheduler: LRSchedulerCallable | None = None,
        gradient_clip_val: float | None = None,
        inner_steps: int = 20,
        inner_lr: float = 0.5,
        solver: SolverCallable | None = None,
    ) -> None:
        super().__init__()
        self.tasks = tasks
        self.ways = ways
        self.chunk_images = chunk_images
        self.encoder = Conv4(channels, image_size)
        self.heads = TaskHeads(tasks, ways, self.encoder.features)
        self.inner_iterations = 2 * inner_steps
        self._inner = partial(solved, ways=ways, steps=inner_steps, lr=inner_lr, bound=_LOWER)
        self._optimizer = upper_optimizer or partial(Adam, lr=1e-3), upper_scheduler
        self._fresh = bool(method or upper_optimizer or upper_scheduler or gradient_clip_val)
        if self._fresh:
            method = method or F2SA()
            # Those of a batch take their place. DDP waits for a gradient of all others.
            self._ddp_params_and_buffers_to_ignore = ["heads.weight", "heads.bias"]
        elif solver is None:
            solver = IVSP
        self.declare(
            upper=self.encoder,
            lower=self.heads,
            upper_set=Box(-_UPPER, _UPPER),
            lower_set=Box(-_LOWER, _LOWER),
            lower_unit=lower_unit,
            solver=solver,
            envelope=envelope,
            method=method,
            gradient_clip_val=gradient_clip_val,
            qualification=ConstantAffineSegments("linear softmax heads"),
        )

    def configure_optimizers(self) -> Any:
        """Return the solver, or on fresh episodes the optimiser of the encoder alone."""
        if not self._fresh:
            return super().configure_optimizers()
        make, schedule = self._optimizer
        optimizer = make(self.encoder.parameters())
        if schedule is None:
            return optimizer
        return [optimizer], [{"scheduler": schedule(optimizer), "interval": "step"}]

    def forward(self, images: Tensor) -> Tensor:
        """Return the features (E, N, d) of images (E, N, C, H, W), a few tasks at a time."""
        return torch.cat(
            [self.encoder(part) for part in torch.split(images, self._tasks_at_once(images))]
        )

    def upper_loss(self, batch: Any) -> Tensor:
        """The mean loss on the query sets."""
        images, labels, index = batch
        return mean_loss(self.heads(self(images), index), labels)

    def lower_features(self, batch: Any) -> Tensor:
        """The features of the support sets: g depends on x only through them."""
        features: Tensor = self(batch[0])
        return features

    def lower_loss(self, batch: Any, features: Tensor) -> Tensor:
        """The mean loss on the support sets, all heads in one product."""
        _, labels, index = batch
        return mean_loss(self.heads(features, index), labels)

    def batch_gradients(self, step: Step, lower: Any, upper: Any) -> Numbers:
        """Solve the heads on fresh episodes and add the gradient of the encoder."""
        method = step.method
        if not isinstance(method, Penalty):
            raise TypeError(
                f"`FewShot(method={type(method).__name__}())` solves the heads on each batch, "
                "which needs F2SA, VPBGD, F2BA, MEHA or StreamingIVSP."
            )
        if step.first:
            step.weights = method.lagged(step)
        weights: Weights = step.weights
        # The heads of both levels in the same order.
        support, query = (
            EpisodeSets(self(images[order]), labels[order])
            for images, labels, index in (lower, upper)
            for order in [index.argsort()]
        )
        y, z = self._inner(support, query, weights, weights.rho)
        f, g_y, g_z = query.loss(y), support.loss(y), support.loss(z)
        step.backward(weights.upper * f + weights.gap * (g_y - g_z))
        if step.first:
            method.observe(step, g_y, g_z, lambda: (y - z).square().sum())
        return Numbers(f.detach(), g_y.detach(), g_z.detach(), weights.gap / weights.upper)

    def bilevel_problem(self, batch: dict[str, Any]) -> BilevelProblem:
        """Return f and g as functions of flat x and y; f is evaluated in chunks."""
        if not isinstance(batch, dict) or "upper" not in batch:
            return super().bilevel_problem(batch)
        parts, weights = [], []
        chunks = as_chunks(batch["upper"])
        for whole, share in zip(chunks.batches, chunks.shares, strict=True):
            size = self._tasks_at_once(whole[0])
            for part in zip(*(torch.split(tensor, size) for tensor in whole), strict=True):
                parts.append(part)
                weights.append(share * len(part[0]) / len(whole[0]))
        return super().bilevel_problem({**batch, "upper": Chunks(parts, weights)})

    def _tasks_at_once(self, images: Tensor) -> int:
        return max(1, self.chunk_images // int(images.shape[1]))

    def setup(self, stage: str) -> None:
        """Before training, refuse data that do not fit the module."""
        data = getattr(self.trainer, "datamodule", None)
        if isinstance(data, EpisodeData):
            found = data.tasks_per_batch or data.n_train, data.ways
            if found != (self.tasks, self.ways):
                raise ValueError(
                    f"`FewShot(tasks={self.tasks}, ways={self.ways})` was given {found[0]} "
                    f"training episodes (of a batch, or all) of {found[1]} classes: both must fit."
                )

    def predict(self, episodes: Episodes) -> Tensor:
        """Fit new heads to the support sets and return the logits (E, N, ways) of the queries."""
        support, support_labels, query, query_labels = episodes
        heads = adapt(EpisodeSets(self(support), support_labels), self.ways)
        return EpisodeSets(self(query), query_labels).logits(heads)

    def validation_step(self, batch: Episodes, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._log_queries("test" if dataloader_idx else "val", batch, add_dataloader_idx=False)

    def test_step(self, batch: Episodes, batch_idx: int) -> None:
        self._log_queries("test", batch)

    def predict_step(self, batch: Episodes, batch_idx: int) -> Tensor:
        return self.predict(batch)

    def _log_queries(self, name: str, episodes: Episodes, **options: Any) -> None:
        logits, labels = self.predict(episodes), episodes.query_labels
        error = (logits.argmax(-1) != labels).float().mean()
        # Processes have the same batch or parts of it: the mean over them is right for both.
        options |= {"prog_bar": True, "sync_dist": True, "batch_size": len(logits)}
        found = {f"{name}_loss": mean_loss(logits, labels), f"{name}_error": error}
        self.log_dict(found, **options)


@torch.no_grad()
def solved(
    support: EpisodeSets,
    query: EpisodeSets,
    weights: Weights,
    rho: float | None,
    *,
    ways: int,
    steps: int,
    lr: float,
    bound: float,
) -> tuple[Tensor, Tensor]:
    """Return the heads y and z of a batch.

    Args:
        support: The support sets, of g.
        query: The query sets, of f.
        weights: Those of f and of the gap.
        rho: The proximal parameter; None without a proximal term.
        ways: The number of classes.
        steps: The gradient steps of z, and then of y from there.
        lr: The step of a head on the loss of its own task.
        bound: The largest weight.
    """
    y = z = adapt(support, ways, steps=steps, lr=lr, bound=bound)
    lr *= len(z)
    total = weights.upper + weights.gap
    a, b = weights.upper / total, weights.gap / total
    for _ in range(steps):
        f_y, g_y = query.gradient(y), support.gradient(y)
        if rho is not None:
            pull = (z - y) / rho
            g_y = g_y + pull
            z = (z - lr * (support.gradient(z) + pull)).clamp_(-bound, bound)
        y = (y - lr * (a * f_y + b * g_y)).clamp_(-bound, bound)
    return y, z
