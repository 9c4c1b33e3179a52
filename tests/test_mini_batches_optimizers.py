"""What ``configure_optimizers`` may return, and how often its schedulers step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from by_hand import OPTIONS, Cleaner, batches, loader, trainable
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import ReduceLROnPlateau
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer, SparseAdam
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from lightning_bilevel import BilevelModule, TableRMS
from lightning_bilevel.stochastic import F2SA, MEHA, Method, StreamingIVSP

pytestmark = pytest.mark.compatibility
FIT: dict[str, Any] = {"max_epochs": 1, "enable_checkpointing": False, **OPTIONS}


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


class Given(Cleaner):
    """Returns what a function of both optimisers makes of them."""

    def __init__(self, returned: Callable[[Any, Any], Any], method: Method | None = None) -> None:
        super().__init__(method, net=small)
        self.returned = returned

    def configure_optimizers(self) -> Any:
        upper = SGD([self.logits], lr=1.0)
        return self.returned(upper, SGD(self.network.parameters(), lr=0.1, momentum=0.9))


def decayed(optimizer: Optimizer) -> dict[str, Any]:
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 100)}}


def end(module: Cleaner, count: int = 6, **options: Any) -> list[Tensor]:
    Trainer(**{**FIT, **options}).fit(module, loader(batches(count, torch.float32)))
    return [p.detach() for p in module.parameters()]


FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "list": lambda x, y: [x, y],
    "swapped": lambda x, y: (y, x),
    "dicts": lambda x, y: ({"optimizer": x}, {"optimizer": y}),
    "schedulers": lambda x, y: ([x, y], [StepLR(x, 100), StepLR(y, 100)]),
    "one scheduler": lambda x, y: ([x, y], [{"scheduler": StepLR(y, 100), "interval": "step"}]),
    "dicts with schedulers": lambda x, y: (decayed(x), decayed(y)),
}


@pytest.fixture(scope="module")
def as_tuple() -> list[Tensor]:
    torch.manual_seed(0)
    return end(Given(lambda x, y: (x, y)))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_makes_the_same_run(form: str, as_tuple: list[Tensor]) -> None:
    torch.manual_seed(0)
    for mine, other in zip(end(Given(FORMS[form])), as_tuple, strict=True):
        assert torch.equal(mine, other)


def _matrices(net: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    parameters = trainable(net)
    return [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]


KINDS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "Muon": lambda net: [torch.optim.Muon(_matrices(net)[0], lr=1e-2), AdamW(_matrices(net)[1])],
    "Adafactor": lambda net: [torch.optim.Adafactor(net.parameters())],
    "AdamW": lambda net: [AdamW(net.parameters(), fused=True)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_of_any_kind(kind: str) -> None:
    """A run with a = 0 and z = y at first is plain training: of y by a loop, twice."""
    if not hasattr(torch.optim, kind):
        pytest.skip(f"this torch has no {kind}")
    make = KINDS[kind]

    class Kinds(Cleaner):
        def configure_optimizers(self) -> Any:
            return [SGD([self.logits], lr=0.0), *make(self.network)]

    module = Kinds(F2SA(), net=small, gradient_clip_val=(None, 0.1))
    net, data = small(), batches(5, torch.float32)
    net.load_state_dict(module.network.state_dict())
    Trainer(**FIT).fit(module, loader(data))
    optimizers = make(net)
    for batch in data:
        inputs, labels, _ = batch["lower"]
        net.zero_grad()
        (0.5 * cross_entropy(net(inputs), labels)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
    assert module.mini_batches is not None
    assert module.mini_batches.step is not None
    for mine, other in zip(module.mini_batches.step.shadow.z, net.parameters(), strict=True):
        torch.testing.assert_close(mine.data, other.data, rtol=0, atol=1e-6)
    assert module.trainer.global_step == 5


class Embedded(BilevelModule):
    """One weight per sample as a sparse embedding."""

    def __init__(self, method: Method, sparse: bool, make: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(60, 1, sparse=sparse)
        nn.init.zeros_(self.table.weight)
        self.network = small()
        self.make = make
        self.declare(upper=self.table, lower=self.network, method=method, accumulate=2)

    def upper_loss(self, batch: Any) -> Tensor:
        return cross_entropy(self.network(batch[0]), batch[1])

    def lower_loss(self, batch: Any) -> Tensor:
        losses = cross_entropy(self.network(batch[0]), batch[1], reduction="none")
        return (self.table(batch[2]).squeeze(-1).sigmoid() * losses).mean()

    def configure_optimizers(self) -> Any:
        return self.make(self.table.parameters()), SGD(self.network.parameters(), lr=0.1)


@pytest.mark.parametrize("make", [lambda p: TableRMS(p, lr=0.1), lambda p: SGD(p, lr=100.0)])
@pytest.mark.parametrize("method", [F2SA(0.7), MEHA(), StreamingIVSP()], ids=str)
def test_a_sparse_embedding_is_a_dense_one(method: Method, make: Any) -> None:
    tables = []
    for sparse in (False, True):
        torch.manual_seed(0)
        module = Embedded(method, sparse, make)
        Trainer(**FIT).fit(module, loader(batches(8, torch.float32)))
        tables.append(module.table.weight.detach())
    assert float(tables[0].abs().max()) > 1e-3
    torch.testing.assert_close(tables[0], tables[1], rtol=0, atol=1e-5)


def test_sparse_adam_leaves_untouched_rows() -> None:
    module = Embedded(F2SA(), True, lambda p: SparseAdam(list(p), lr=0.1))
    data = batches(4, torch.float32)
    Trainer(**FIT).fit(module, loader(data))
    touched = torch.cat([batch["lower"][2] for batch in data]).unique()
    moved = module.table.weight.detach().squeeze(-1) != 0
    assert torch.isin(moved.nonzero(), touched).all()
    assert int(moved.sum()) > 10


def test_table_rms_by_hand() -> None:
    table = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    optimizer = TableRMS([table], lr=0.5)
    table.grad = torch.tensor([0.0, 3.0, -4.0])
    optimizer.step()
    # v = 0.01 * 25/2, over 1 - 0.99: r = sqrt(12.5)
    r = 12.5**0.5
    expected = torch.tensor([1.0, 2.0 - 0.5 * 3 / r, 3.0 + 0.5 * 4 / r])
    torch.testing.assert_close(table.data, expected)
    assert table[0] == 1.0
    before = table.detach().clone()
    table.grad = torch.tensor([100.0, 0.0, 0.0])
    optimizer.step()
    r = ((0.99 * 0.125 + 0.01 * 10000) / (1 - 0.99**2)) ** 0.5
    torch.testing.assert_close(table[0].detach(), before[0] - 0.5 * 100 / r)
    assert torch.equal(table[1:].detach(), before[1:])  # bit for bit
    small_one = table.detach().clone()
    table.grad = torch.tensor([0.0, 1e-3, 0.0])
    optimizer.step()  # r only grows, also where v falls
    torch.testing.assert_close(table[1].detach(), small_one[1] - 0.5 * 1e-3 / r)


class Rates(Callback):
    """The rate and the momentum after each batch."""

    def __init__(self, which: int) -> None:
        self.which = which
        self.seen: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        group = trainer.optimizers[self.which].param_groups[0]
        self.seen.append((group["lr"], group["momentum"]))

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self.on_train_batch_end(trainer)


class Logged(LightningModule):
    """A metric that worsens, in validation and in training."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(self.global_step), batch_size=1)

    def log_step(self) -> None:
        self.log("step_loss", float(self.trainer.fit_loop.total_batch_idx // 5), batch_size=1)


class Plain(Logged):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.network, self.config = small(), config

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log_step()
        return cross_entropy(self.network(batch["upper"][0]), batch["upper"][1])

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.network.parameters(), lr=0.1, momentum=0.9)
        config = self.config(optimizer)
        # As Lightning's command line does.
        monitor = getattr(config["scheduler"], "monitor", None)
        return {"optimizer": optimizer, "lr_scheduler": {**config, "monitor": monitor}}


class Scheduled(Logged, Cleaner):
    def __init__(self, config: Any, accumulate: int = 1) -> None:
        Cleaner.__init__(self, net=small, accumulate=accumulate)
        self.config = config

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.log_step()
        super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.network.parameters(), lr=0.1, momentum=0.9)
        below = {"optimizer": optimizer, "lr_scheduler": self.config(optimizer)}
        return {"optimizer": SGD([self.logits], lr=1.0)}, below


def one_cycle(optimizer: Optimizer) -> dict[str, Any]:
    return {"scheduler": OneCycleLR(optimizer, 0.5, total_steps=22), "interval": "step"}


def every(interval: str, frequency: int) -> Callable[[Optimizer], dict[str, Any]]:
    how = {"interval": interval, "frequency": frequency}
    return lambda o: {"scheduler": StepLR(o, 1, 0.5), **how}


def plateau(monitor: str, interval: str = "epoch", **more: Any) -> Any:
    def of(optimizer: Optimizer) -> dict[str, Any]:
        scheduler = ReduceLROnPlateau(optimizer, monitor, patience=0, factor=0.5)
        return {"scheduler": scheduler, "interval": interval, **more}

    return of


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (one_cycle, {}),
        (every("step", 1), {"accumulate": 2}),
        (every("step", 3), {}),
        (every("epoch", 1), {"limit_train_batches": 4}),
        (every("epoch", 2), {}),
        (every("epoch", 1), {"max_steps": 16}),
        (plateau("val_loss"), {}),
        (plateau("val_loss", frequency=2), {"max_epochs": 5}),
        (plateau("val_loss", "step", frequency=3), {"val_check_interval": 3}),
        (plateau("step_loss", "step"), {}),
    ],
)
def test_schedulers_step_as_in_automatic_optimization(config: Any, options: dict[str, Any]) -> None:
    data = batches(7, torch.float32)
    options = {**FIT, "max_epochs": 3, **options}
    accumulate = options.pop("accumulate", 1)
    plain, mine = Rates(0), Rates(1)
    Trainer(callbacks=[plain], accumulate_grad_batches=accumulate, **options).fit(
        Plain(config), loader(data), loader(data[:1])
    )
    module = Scheduled(config, accumulate)
    trainer = Trainer(callbacks=[mine], **options)
    trainer.fit(module, loader(data), loader(data[:1]))
    assert mine.seen == plain.seen
    assert len(set(mine.seen)) > 1
    assert module.mini_batches is not None
    assert module.mini_batches.step is not None
    step = module.mini_batches.step
    assert trainer.global_step == step.k


def test_rates_and_momenta_of_z_are_those_of_y() -> None:
    of_z: list[tuple[float, float]] = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            copied = pl_module.mini_batches.step.shadow_optimizers[0].param_groups[0]
            of_z.append((copied["lr"], copied["momentum"]))

    rates = Rates(1)
    Trainer(callbacks=[rates, Look()], **FIT).fit(
        Scheduled(one_cycle), loader(batches(8, torch.float32)), loader(batches(1, torch.float32))
    )
    # A step of z has what the step of y had, which the scheduler has changed since.
    assert of_z[1:] == rates.seen[:7]
    assert len(set(of_z)) == 8


class Declared(Logged, BilevelModule):
    """Without a ``configure_optimizers`` of its own, as ready modules are."""

    upper_loss, lower_loss = Cleaner.upper_loss, Cleaner.lower_loss

    def __init__(self, **declared: Any) -> None:
        super().__init__()
        self.logits, self.network = nn.Parameter(torch.zeros(60)), small()
        self.declare(upper=self.logits, lower=self.network, **declared)


def test_declared_optimizers_and_schedulers() -> None:
    module = Declared(
        lower_optimizer=lambda p: SGD(p, lr=0.1, momentum=0.9),
        upper_scheduler=lambda o: StepLR(o, 1, 0.5),
        lower_scheduler=lambda o: ReduceLROnPlateau(o, "val_loss", patience=0, factor=0.5),
    )
    rates, data = Rates(1), batches(2, torch.float32)
    run = Trainer(callbacks=[rates], **{**FIT, "max_epochs": 4})
    run.fit(module, loader(data), loader(data[:1]))
    assert [rate for rate, _ in rates.seen] == [0.1] * 4 + [0.05] * 2 + [0.025] * 2 + [0.0125]
    (above,) = run.optimizers[0].param_groups
    assert isinstance(run.optimizers[0], AdamW)
    assert above["lr"] == 1e-2 * 0.5**8
    assert module.mini_batches is not None
    assert module.mini_batches.step is not None
    assert module.mini_batches.step.method == F2SA()


def test_a_metric_that_is_missing() -> None:
    with pytest.raises(MisconfigurationException, match=r"monitors 'val_los', .*; there are .*"):
        Trainer(**FIT).fit(
            Scheduled(plateau("val_los")), loader(batches(2, torch.float32)), loader(batches(1))
        )
