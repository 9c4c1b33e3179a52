"""The networks of the ready modules: a feature extractor, linear heads, small classifiers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, cross_entropy, max_pool2d, pad


class _Block(nn.Module):
    """3x3 convolution, ReLU, 2x2 max pooling, batch normalisation over each task alone."""

    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, channels, 3, padding=1)
        # Batch normalisation has a scale and a bias, but no running statistics.
        self.scale = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, images: Tensor, tasks: int) -> Tensor:
        if images.device.type == "cpu":
            # In this layout pooling handles all channels of a pixel at once and takes a tenth of
            # the time. We clone, because with a single channel torch cannot tell the two layouts
            # apart and any other conversion would change nothing.
            images = images.clone(memory_format=torch.channels_last)
        # ReLU is monotone, so it commutes with the maximum: after pooling it has a quarter of the
        # work, with the same value and gradient. `contiguous` returns to the usual layout: in the
        # other one, torch's normalisation loses two or three digits.
        pooled = max_pool2d(self.conv(images), 2).relu().contiguous()
        normed = [
            batch_norm(part, None, None, self.scale, self.bias, training=True)
            for part in pooled.chunk(tasks)
        ]
        return normed[0] if tasks == 1 else torch.cat(normed)


class Conv4(nn.Module):
    """Four convolution blocks that map each image to a feature vector.

    Args:
        channels: Channels of each block.
        image_size: Height and width of an image; each block halves them.
        inputs: Channels of an image.
    """

    # They are function calls, which `declare` cannot see by itself.
    kinks = ("ReLU", "max-pooling")

    def __init__(self, channels: int = 64, image_size: int = 28, inputs: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [_Block(inputs if i == 0 else channels, channels) for i in range(4)]
        )
        self.features = channels * (image_size // 16) ** 2

    def forward(self, images: Tensor) -> Tensor:
        """Return features (E, N, d) of images (E, N, C, H, W); each task is normalised alone."""
        tasks, count = images.shape[:2]
        value = images.flatten(0, 1)
        for block in self.blocks:
            value = block(value, tasks)
        return value.reshape(tasks, count, -1)


class TaskHeads(nn.Module):
    """One linear classifier per task, all stored in two tensors that start at zero.

    Args:
        tasks: The number of tasks, T.
        ways: Classes of a task.
        features: The length of a feature vector, d.
    """

    def __init__(self, tasks: int, ways: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(tasks, ways, features))
        self.bias = nn.Parameter(torch.zeros(tasks, ways))

    def forward(self, features: Tensor, index: Tensor) -> Tensor:
        """Return the logits (E, N, ways) of features (E, N, d); task i uses head index[i]."""
        weight = self.weight.index_select(0, index)
        bias = self.bias.index_select(0, index)
        return torch.baddbmm(bias.unsqueeze(1), features, weight.transpose(1, 2))


class EpisodeSets:
    """The support or query sets of E episodes, and heads (E, ways, d + 1) on their features.

    Args:
        features: (E, N, d).
        labels: (E, N).
    """

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        # Heads are solved in float32 at least. The weight of a constant 1 is the bias.
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        self.features = pad(features, (0, 1), value=1.0)
        self.labels = labels

    def logits(self, heads: Tensor) -> Tensor:
        """Return the logits, (E, N, ways)."""
        return self.features @ heads.transpose(1, 2)

    def loss(self, heads: Tensor) -> Tensor:
        """Return the mean loss."""
        return mean_loss(self.logits(heads), self.labels)

    def gradient(self, heads: Tensor) -> Tensor:
        """Return the gradient of the mean loss in the heads."""
        logits = self.logits(heads)
        classes = torch.arange(logits.shape[-1], device=logits.device)
        truth = (self.labels.unsqueeze(-1) == classes).to(logits)
        slope = (logits.softmax(-1) - truth) / self.labels.numel()
        return slope.transpose(1, 2) @ self.features


def adapt(
    support: EpisodeSets,
    ways: int,
    *,
    steps: int = 10,
    lr: float = 0.1,
    bound: float = float("inf"),
) -> Tensor:
    """Fit a new linear head to each task, from zero, by projected gradient steps.

    Args:
        support: The support sets.
        ways: The number of classes.
        steps: The number of steps.
        lr: The step of a head on the mean loss of its own task.
        bound: The largest weight.

    Returns:
        The heads, (E, ways, d + 1).
    """
    tasks, _, size = support.features.shape
    heads = support.features.new_zeros(tasks, ways, size)
    for _ in range(steps):
        # The loss is a mean over the tasks, so the gradient of a head is divided by their number.
        heads = (heads - lr * tasks * support.gradient(heads)).clamp(-bound, bound)
    return heads


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (E, N, ways)."""
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def sigmoid_network(inputs: int, hidden: int, classes: int) -> nn.Sequential:
    """Return the classifier of the paper's hyper-cleaning, drawn as 0.01 times a standard normal.

    Args:
        inputs: The number of pixels of an image.
        hidden: The hidden units.
        classes: The number of classes.
    """
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, hidden), nn.Sigmoid(), nn.Linear(hidden, classes)
    )
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.01 * torch.randn_like(parameter))
    return network


class MLP(nn.Sequential):
    """A network of one hidden layer of rectified linear units, with torch's own start.

    Args:
        inputs: The number of pixels of an image.
        hidden: The hidden units.
        classes: The number of classes.
    """

    def __init__(self, inputs: int = 784, hidden: int = 128, classes: int = 10) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes)
        )
