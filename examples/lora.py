"""Adapters: learn the weights of data sources for a frozen backbone in bf16, by LoRA.

A small language model is trained on prose, cast to bfloat16 and frozen. Below, adapters of rank 4
in float32 fit it to a mixture of code and of shuffled code; above are the weights of both sources,
judged on 128 trusted rows. Only the adapters have gradients, copies and optimiser states.

Run: python examples/lora.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from lightning_bilevel import Reweighting, SourceWeights
from lightning_bilevel.stochastic import F2SA

LENGTH = WIDTH = 64
NAMES = ("code", "shuffled")


class LoRA(nn.Module):
    """A frozen linear map W plus B A with A and B of rank 4; B starts at 0."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.linear = linear
        self.A = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + (x.to(self.A) @ self.A.T @ self.B.T).to(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norms[1](x))))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.Linear(WIDTH, 128)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.blocks(self.characters(rows) + self.places.weight)
        return self.last(x).float().transpose(1, 2)


def row_losses(logits: Tensor, following: Tensor) -> Tensor:
    return cross_entropy(logits, following, reduction="none").mean(1)


def loader(rows: Tensor, *more: Tensor, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(TensorDataset(rows[:, :-1], rows[:, 1:], *more), 16, shuffle=shuffle)


def rows_of(name: str) -> Tensor:
    """Return rows of characters in random order, from Python's library."""
    read = bytearray().join(p.read_bytes() for p in sorted(Path(os.__file__).parent.glob(name)))
    text = torch.frombuffer(read, dtype=torch.uint8).clamp(max=127).long()
    rows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    return rows[torch.randperm(len(rows))]


class Mixture(Reweighting):
    def configure_optimizers(self) -> tuple[AdamW, AdamW]:
        adapters = [p for p in self.model.parameters() if p.requires_grad]
        return AdamW(self.weights.parameters(), 2e-2, weight_decay=0.0), AdamW(adapters, 3e-3)


def trained_on_prose(steps: int) -> Language:
    model = Language()
    optimizer = AdamW(model.parameters(), lr=2e-3)
    rows = rows_of("pydoc_data/topics.py")
    for batch in rows[torch.randint(len(rows), (steps, 16))]:
        optimizer.zero_grad()
        row_losses(model(batch[:, :-1]), batch[:, 1:]).mean().backward()
        optimizer.step()
    return model


def with_adapters(model: Language) -> Language:
    """Freeze a model in bf16 and put adapters around the linear maps of its blocks."""
    model.to(torch.bfloat16).requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, LoRA(getattr(block, name)))
    return model


def main(short: bool = False, out: Path = Path("lora.png")) -> dict[str, Any]:
    torch.manual_seed(0)
    trusted, test, clean, other = rows_of("*.py")[:4640].split([128, 512, 2000, 2000])
    shuffled = other.gather(1, torch.rand(other.shape).argsort(1))
    rows, source = torch.cat([clean, shuffled]), torch.arange(2).repeat_interleave(2000)
    model = with_adapters(trained_on_prose(30 if short else 300))
    weights = SourceWeights(len(NAMES))
    module = Mixture(model, weights, row_losses, method=F2SA())
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", max_steps=40 if short else 200, **quiet)
    loaders = {"upper": loader(trusted), "lower": loader(rows, source)}
    trainer.fit(module, loaders, loader(test, shuffle=False))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    shares = dict(zip(NAMES, weights.shares().tolist(), strict=True))
    print(f"{trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters are trained.")
    print("shares:", shares)
    plt.bar(NAMES, weights.values().tolist())
    plt.savefig(out, dpi=160)
    return {"shares": shares, "trained": trained, "model": model}


if __name__ == "__main__":
    main(short="--short" in sys.argv)
