"""Few-shot learning: learn features on which linear heads generalise from a few examples."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_bilevel.core.chunks import Chunks, as_chunks
from lightning_bilevel.core.episode import Adaptation
from lightning_bilevel.core.moreau import Envelope
from lightning_bilevel.core.problem import BilevelProblem
from lightning_bilevel.core.qualification import ConstantAffineSegments
from lightning_bilevel.core.sets import Box
from lightning_bilevel.data.episodes import Episodes
from lightning_bilevel.modules.figures import draw_samples
from lightning_bilevel.modules.networks import Conv4, TaskHeads, adapt, nearest_centroid
from lightning_bilevel.plugin.loggers import log_figure
from lightning_bilevel.plugin.mixin import BilevelModule
from lightning_bilevel.solvers.base import SolverCallable
from lightning_bilevel.solvers.ivsp.solver import IVSP

__all__ = ["FewShot"]

# 20 steps of 0.5.
TWENTY_STEPS = Adaptation()


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

    On mini-batches of fresh episodes
    (:class:`~lightning_bilevel.data.episodes.EpisodeData` with ``tasks_per_batch``) the heads
    belong to the batch: they start at zero in each step and are solved on the batch's features.

    Validation fits new heads to unseen classes by 10 gradient steps of 0.1, and logs their loss and
    error on the queries: ``val_loss``, ``val_error``, ``test_loss`` and ``test_error``. The error
    of nearest centroids, ``val_centroid_error`` and ``test_centroid_error``, tells how good the
    features are whatever the scale of the heads.

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
        adaptation: How the heads are solved on a mini-batch of episodes. Its ``lr`` is the step of
            a head on the loss of its own task, whatever the number of tasks.
        solver: The solver and its arguments.
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
        adaptation: Adaptation = TWENTY_STEPS,
        solver: SolverCallable = IVSP,
    ) -> None:
        super().__init__()
        self.tasks = tasks
        self.ways = ways
        self.chunk_images = chunk_images
        self.encoder = Conv4(channels, image_size)
        self.heads = TaskHeads(tasks, ways, self.encoder.features)
        self.declare(
            upper=self.encoder,
            lower=self.heads,
            upper_set=Box(-5.0, 5.0),
            lower_set=Box(-20.0, 20.0),
            lower_unit=lower_unit,
            solver=solver,
            envelope=envelope,
            # Losses are means over the tasks, so a head's own gradient is divided by T.
            adaptation=Adaptation(adaptation.steps, adaptation.lr * tasks),
            qualification=ConstantAffineSegments("linear softmax heads"),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the features (E, N, d) of images (E, N, C, H, W), a few tasks at a time."""
        return torch.cat(
            [self.encoder(part) for part in torch.split(images, self._tasks_at_once(images))]
        )

    def upper_features(self, batch: Any) -> Tensor:
        """The features of the query sets: f depends on x only through them."""
        features: Tensor = self(batch[0])
        return features

    def upper_loss(self, batch: Any, features: Tensor) -> Tensor:
        """The mean loss on the query sets."""
        _, labels, index = batch
        return _loss(self.heads(features, index), labels)

    def upper_gradient(self, batch: Any, features: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of f in the heads, for the inner steps on a mini-batch."""
        _, labels, index = batch
        return self.heads.gradient(features, labels, index)

    def lower_features(self, batch: Any) -> Tensor:
        """The features of the support sets: g depends on x only through them."""
        features: Tensor = self(batch[0])
        return features

    def lower_loss(self, batch: Any, features: Tensor) -> Tensor:
        """The mean loss on the support sets, all heads in one product."""
        _, labels, index = batch
        return _loss(self.heads(features, index), labels)

    def lower_gradient(self, batch: Any, features: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of g in the heads, likewise."""
        return self.upper_gradient(batch, features)

    def bilevel_problem(self, batch: dict[str, Any]) -> BilevelProblem:
        """Return f and g as functions of flat x and y; f is evaluated in chunks."""
        if isinstance(batch, dict) and "upper" in batch:
            batch = {**batch, "upper": self._in_chunks(batch["upper"])}
        return super().bilevel_problem(batch)

    def _in_chunks(self, batch: Any) -> Chunks:
        chunks = as_chunks(batch)
        parts = []
        weights = []
        for whole, share in zip(chunks.batches, chunks.shares, strict=True):
            images, labels, index = whole
            if index is None:
                # Each part needs to know its heads.
                index = torch.arange(len(images), device=images.device)
            tensors = (images, labels, index)
            size = self._tasks_at_once(images)
            for part in zip(*(torch.split(tensor, size) for tensor in tensors), strict=True):
                parts.append(part)
                weights.append(share * len(part[0]) / len(images))
        return Chunks(parts, weights)

    def _tasks_at_once(self, images: Tensor) -> int:
        return max(1, self.chunk_images // int(images.shape[1]))

    def setup(self, stage: str) -> None:
        """Before training, refuse data that do not fit the module."""
        data: Any = getattr(self.trainer, "datamodule", None)
        per_batch = getattr(data, "tasks_per_batch", None)
        tasks = getattr(data, "n_train", self.tasks) if per_batch is None else per_batch
        found = tasks, getattr(data, "ways", self.ways)
        if found != (self.tasks, self.ways):
            raise MisconfigurationException(
                f"`FewShot(tasks={self.tasks}, ways={self.ways})` was given {found[0]} training "
                f"episodes (of a batch, or all) of {found[1]} classes: they must agree."
            )

    def predict(self, episodes: Episodes) -> Tensor:
        """Fit new heads to the support sets and return the logits (E, N, ways) of the queries."""
        return self._adapted(self(episodes.support), self(episodes.query), episodes)

    def _adapted(self, support: Tensor, query: Tensor, episodes: Episodes) -> Tensor:
        weight, bias = adapt(support, episodes.support_labels, self.ways)
        return torch.baddbmm(bias.unsqueeze(1), query, weight.transpose(1, 2))

    def validation_step(self, batch: Episodes, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._log_queries("test" if dataloader_idx else "val", batch, add_dataloader_idx=False)

    def test_step(self, batch: Episodes, batch_idx: int) -> None:
        self._log_queries("test", batch)

    def predict_step(self, batch: Episodes, batch_idx: int) -> Tensor:
        return self.predict(batch)

    def _log_queries(self, name: str, episodes: Episodes, **options: Any) -> None:
        support = self(episodes.support)
        query = self(episodes.query)
        logits = self._adapted(support, query, episodes)
        nearest = nearest_centroid(support, episodes.support_labels, query, self.ways)
        errors = {
            f"{name}_error": logits.argmax(-1) != episodes.query_labels,
            f"{name}_centroid_error": nearest != episodes.query_labels,
        }
        # Processes have the same batch or parts of it: the mean over them is right for both.
        options |= {"sync_dist": True, "batch_size": len(logits)}
        self.log(f"{name}_loss", _loss(logits, episodes.query_labels), prog_bar=True, **options)
        for tag, wrong in errors.items():
            self.log(tag, wrong.float().mean(), prog_bar=tag == f"{name}_error", **options)

    def on_train_end(self) -> None:
        """Show some validation episodes in the loggers."""
        episodes = getattr(getattr(self.trainer, "datamodule", None), "validation", None)
        if isinstance(episodes, Episodes):
            for number in range(min(3, len(episodes.support))):
                one = Episodes(*(tensor[number : number + 1] for tensor in episodes))
                draw = partial(self.episode_figure, one)
                log_figure(
                    self.trainer, f"validation episode {number}", draw, self.trainer.global_step
                )

    def episode_figure(self, episode: Episodes) -> Any:
        """Draw the queries of one episode, each with its class and the predicted one."""
        with torch.no_grad():
            logits = self.predict(Episodes(*(tensor.to(self.device) for tensor in episode)))
        labels, guesses = episode.query_labels[0].tolist(), logits[0].argmax(-1).tolist()
        return draw_samples(episode.query[0], labels, guesses, "queries: class → predicted class")


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())
