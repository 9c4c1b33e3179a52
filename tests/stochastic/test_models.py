"""Models and settings that people have: a step equals one with separate networks, or it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from by_hand import OPTIONS, ByHand, Cleaner, Seeded, batches, loader, trainable
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from lightning_bilevel.stochastic import F2SA, MEHA


class Checkpointed(nn.Module):
    """Recomputes its layers in the backward pass, where the module must still be at z."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = checkpoint(lambda v: self.first(v).tanh(), inputs, use_reentrant=False)
        out: Tensor = self.last(hidden)
        return out


class Tied(nn.Module):
    """One matrix twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(5, 8), nn.Linear(8, 5, bias=False)
        self.outside.weight = nn.Parameter(self.inside.weight.data.t().contiguous())
        self.again = nn.Linear(5, 8)
        self.again.weight = self.inside.weight
        self.last = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.outside(self.inside(inputs).tanh())
        out: Tensor = self.last(self.again(hidden).tanh())
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.last(self.lstm(inputs.unsqueeze(-1))[0][:, -1])
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.last(self.layer(self.up(inputs.unsqueeze(-1))).mean(1))
        return out


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        self.layers = torch.compile(layers, backend="aot_eager")

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layers(inputs)
        return out


def low_rank() -> nn.Module:
    """Adapters by peft on a frozen backbone."""
    peft = pytest.importorskip("peft")
    backbone = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    made: nn.Module = peft.get_peft_model(backbone, config)
    return made


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("net", [Checkpointed, Tied, Recurrent, Attention, Compiled, low_rank])
def test_equals_two_networks(net: Callable[[], nn.Module]) -> None:
    method = MEHA(gamma=2.0)
    torch.manual_seed(0)
    module = Cleaner(method, sgd, net=net).double()
    hand = ByHand(module, method, sgd)
    trainer = Trainer(max_epochs=1, callbacks=[Seeded()], precision="64-true", **FIT)
    data = batches(10)
    trainer.fit(module, loader(data))
    torch.manual_seed(99)
    # The loop by hand goes back through compiled code twice.
    buffers = {name: False for name in ["donated_buffer"] if hasattr(functorch_config, name)}
    with functorch_config.patch(**buffers):
        for batch in data:
            hand.step([batch])
    torch.testing.assert_close(module.logits.data, hand.x.data, rtol=0, atol=1e-12)
    for mine, other in zip(trainable(module.network), trainable(hand.y), strict=True):
        torch.testing.assert_close(mine.data, other.data, rtol=0, atol=1e-12)
    assert len(module.mini_batches.step.shadow.z) == len(trainable(module.network))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision_is_close_to_single(precision: Any) -> None:
    points = []
    for each in ("32-true", precision):
        torch.manual_seed(0)
        module = Cleaner(F2SA(), sgd, net=Checkpointed)
        data = batches(30, torch.float32)
        if each == "bf16-true":
            data = [
                {k: (v[0].bfloat16(), *v[1:]) for k, v in batch.items()}  # type: ignore[misc]
                for batch in data
            ]
        Trainer(max_epochs=1, precision=each, **FIT).fit(module, loader(data))
        points.append(module.logits.detach().float())
    # Adam moves each logit by its rate of 0.05.
    assert float(points[0].abs().max()) > 0.2
    assert float((points[0] - points[1]).abs().mean()) < 0.05


FIT: dict[str, Any] = {"enable_checkpointing": False, **OPTIONS}
