# %% [markdown]
# # Mix sources of text
#
# Learn how much of each source to train a language model on. The target is Python code. The sources
# are code, code with a part of each row's characters shuffled, English prose and random characters,
# all from the text that comes with Python. Above are the weights of the sources, judged on 128
# trusted rows of code; below is a small transformer. AdamW steps both levels on mini-batches, the
# loaders are ordinary ones.
#
# Run: `python examples/mixture.py`

# %%
from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from lightning_bilevel import Reweighting, SourceWeights
from lightning_bilevel.stochastic import F2SA, Method, StreamingIVSP

LENGTH = 64
SHUFFLED = {"code": 0.0, "1/8 shuffled": 1 / 8, "1/4 shuffled": 1 / 4, "1/2 shuffled": 1 / 2}
SHUFFLED |= {"3/4 shuffled": 3 / 4, "shuffled": 1.0}
SOURCES = {
    2: ("code", "shuffled"),
    4: ("code", "1/2 shuffled", "prose", "random"),
    8: (*SHUFFLED, "prose", "random"),
}


# %% [markdown]
# ## The text
#
# A row has 65 characters, numbers from 0 to 127. No row of code is in two sources.


# %%
class TextSources:
    """2,000 rows of each source, and 128 trusted and 512 test rows of code."""

    def __init__(self, names: Sequence[str], seed: int = 0, count: int = 2000) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        library = Path(os.__file__).parent
        code = self.cut(sorted(library.glob("*.py")))
        prose = self.cut([library / "pydoc_data" / "topics.py"])
        self.trusted, self.test, code = code.tensor_split([128, 640])
        parts = zip(SHUFFLED.items(), code.split(count), strict=False)
        rows = {name: self.shuffled(part, share) for (name, share), part in parts}
        rows["prose"] = prose[:count]
        rows["random"] = torch.randint(32, 127, (count, LENGTH + 1), generator=self.generator)
        self.rows = torch.cat([rows[name] for name in names])
        self.source = torch.arange(len(names)).repeat_interleave(count)

    def cut(self, paths: list[Path]) -> Tensor:
        """Return the text of files as rows in random order."""
        read = bytearray().join(path.read_bytes() for path in paths)
        text = torch.frombuffer(read, dtype=torch.uint8).clamp(max=127).long()
        rows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
        return rows[torch.randperm(len(rows), generator=self.generator)]

    def shuffled(self, rows: Tensor, share: float) -> Tensor:
        """Shuffle the characters of each row at a random share of its places."""
        order = torch.rand(rows.shape, generator=self.generator).argsort(1)
        places = order[:, : round(share * rows.shape[1])]
        return rows.scatter(1, places.sort(1).values, rows.gather(1, places))


# %% [markdown]
# ## The model
#
# Any module and any loss per row.


# %%
class Transformer(nn.Module):
    """Two layers of width 64 that predict the next character."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.characters = nn.Embedding(128, width)
        self.places = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(width, 128)

    def forward(self, rows: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        inputs = self.characters(rows) + self.places.weight
        logits: Tensor = self.out(self.layers(inputs, mask=mask, is_causal=True))
        return logits.transpose(1, 2)


def row_losses(logits: Tensor, following: Tensor) -> Tensor:
    return cross_entropy(logits, following, reduction="none").mean(1)


def loader(rows: Tensor, *more: Tensor, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(TensorDataset(rows[:, :-1], rows[:, 1:], *more), 16, shuffle=shuffle)


# %% [markdown]
# ## A run
#
# `Reweighting` has the model below and the weights above. A callback keeps the shares.


# %%
class Shares(Callback):
    """Keeps the share of each source at each step."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self.seen.append(module.weights.shares().tolist())


def learned(method: Method, text: TextSources, steps: int) -> list[list[float]]:
    """Return the shares of the sources at each step of a run."""
    sources = int(text.source.max()) + 1
    module = Reweighting(
        Transformer(),
        SourceWeights(sources),
        row_losses,
        method=method,
        upper_optimizer=partial(AdamW, lr=1e-2 if sources == 2 else 2e-2, weight_decay=0.0),
        lower_optimizer=partial(AdamW, lr=1e-3),
    )
    shares = Shares()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    quiet |= {"enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", max_steps=steps, callbacks=[shares], **quiet)
    loaders = {"upper": loader(text.trusted), "lower": loader(text.rows, text.source)}
    trainer.fit(module, loaders, loader(text.test, shuffle=False))
    return shares.seen


# %% [markdown]
# ## Two, four and eight sources


# %%
def main(short: bool = False, out: Path = Path("mixture.png")) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {}
    counts = (2,) if short else (2, 4, 8)
    figure, axes = plt.subplots(
        1, len(counts), figsize=(9, 3.2), layout="constrained", squeeze=False
    )
    for axis, count in zip(axes[0], counts, strict=True):
        text = TextSources(SOURCES[count], seed=0)
        for method, steps, style in ((StreamingIVSP(), 250, "--"), (F2SA(), 200, "-")):
            torch.manual_seed(0)
            name = f"{type(method).__name__}, {count} sources"
            found[name] = learned(method, text, 60 if short else steps * (2 if count == 8 else 1))
            curves = dict(zip(SOURCES[count], zip(*found[name], strict=True), strict=True))
            for i, (source, curve) in enumerate(curves.items()):
                axis.plot(curve, style, color=f"C{i}", label=source if style == "-" else None)
            print(f"{name}:", *(f"{source} {curve[-1]:.3f}" for source, curve in curves.items()))
        axis.axhline(0.05, color="black", linewidth=0.5)
        axis.set(xlabel="mini-batches", ylim=(0, 1), title=f"{count} sources")
        axis.legend(fontsize=7)
    figure.supylabel("share (dashed: StreamingIVSP, solid: F2SA)", fontsize=9)
    figure.savefig(out, dpi=160)
    return found


if __name__ == "__main__":
    main(short="--short" in sys.argv)
