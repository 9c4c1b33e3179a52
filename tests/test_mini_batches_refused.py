"""Bad input of a run on mini-batches, each with its sentence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from by_hand import OPTIONS, Cleaner, batches, loader
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

import lightning_bilevel as lb
from lightning_bilevel import stochastic

pytestmark = pytest.mark.compatibility


class Lookahead(Optimizer):
    """A wrapper, as libraries have them."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner


class Given(Cleaner):
    def __init__(self, made: Callable[[Any, Any], Any]) -> None:
        super().__init__(net=lambda: nn.Linear(5, 3))
        self.made = made
        self.constant = nn.Parameter(torch.zeros(2), requires_grad=False)

    def configure_optimizers(self) -> Any:
        return self.made(self, [self.logits])


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1)


def usual(module: Any, x: Any) -> Any:
    return sgd(x), sgd(module.network.parameters())


def fit(made: Callable[[Any, Any], Any] = usual, data: Any = None, **options: Any) -> None:
    given = {"max_epochs": 1, "enable_checkpointing": False, **OPTIONS, **options}
    Trainer(**given).fit(Given(made), loader(batches(2, torch.float32)) if data is None else data)


def plateau(module: Any, x: Any, **more: Any) -> Any:
    optimizers = usual(module, x)
    return [*optimizers], [{"scheduler": ReduceLROnPlateau(optimizers[0]), **more}]


TWO_LINES = (
    r"Each belongs to one level:\s+return AdamW\(upper_parameters, lr=1e-2\), "
    r"AdamW\(lower_parameters, lr=1e-4\)"
)


def alone(upper: int, lower: int) -> str:
    return f"{upper} with parameters of the upper level alone, {lower} of the lower.*{TWO_LINES}"


METRIC = r"drops the `monitor` .*: take `lightning.pytorch.cli.ReduceLROnPlateau\("


@pytest.mark.filterwarnings("ignore:.*'monitor'.*keys will be ignored.*")
@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda m, x: sgd(m.network.parameters()), "returned SGD: " + alone(0, 1)),
        (lambda m, x: sgd(x), alone(1, 0)),
        (lambda m, x: sgd([*x, *m.network.parameters()]), alone(0, 0)),
        (lambda m, x: [*usual(m, x), sgd([m.constant])], "returned SGD, SGD, SGD: " + alone(1, 1)),
        (lambda m, x: (sgd(x), LBFGS(m.network.parameters())), r"LBFGS.step\(\) missing .*closure"),
        (lambda m, x: (LBFGS(x), sgd(m.network.parameters())), r"LBFGS.step\(\) missing .*closure"),
        (lambda m, x: (sgd(x), Lookahead(usual(m, x)[1])), "`Lookahead` wraps another optimiser"),
        (plateau, METRIC),
        (partial(plateau, monitor="val_loss"), METRIC),
    ],
)
def test_optimizers(made: Any, message: str) -> None:
    refusals = MisconfigurationException, ValueError, TypeError
    with pytest.raises(refusals, match=f"(?s){message}"):
        fit(made)


def scaled() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_clip_val": 0.5}, r"`declare\(gradient_clip_val=..., accumulate=...\)`"),
        ({"accumulate_grad_batches": 4}, r"`declare\(gradient_clip_val=..., accumulate=...\)`"),
        ({"scaled": True}, "use bf16-mixed"),
        ({"data": DataLoader([1, 2])}, 'must be {"upper": ..., "lower": ...}'),
        ({"data": loader([{"upper": ()}, {"upper": ()}])}, 'must be {"upper": ..., "lower": ...}'),
    ],
    ids=lambda v: str(v)[:20],
)
def test_trainers_and_loaders(options: dict[str, Any], message: str) -> None:
    if options.pop("scaled", False):
        options["plugins"] = scaled()
    with pytest.raises(MisconfigurationException, match=message):
        fit(**options)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"method": stochastic.F2SA(), "solver": lb.IVSP}, "give one of the two"),
        ({"method": lb.F2SA}, r"`lightning_bilevel.stochastic.F2SA\(\)`; a solver .* `solver=`"),
        ({"method": stochastic.F2SA}, "must be an instance of a method on mini-batches"),
        ({"accumulate": 0}, r"`declare\(accumulate=0\)` must be at least 1"),
        ({"gradient_clip_val": (1.0, -1.0)}, r"val=\(1.0, -1.0\)\)` must be a positive number"),
        ({"gradient_clip_val": (1.0, 2.0, 3.0)}, "one for each level"),
    ],
    ids=lambda v: str(v)[:20],
)
def test_declarations(declared: dict[str, Any], message: str) -> None:
    module = Given(usual)
    with pytest.raises((ValueError, TypeError), match=message):
        module.declare(upper=module.logits, lower=module.network, **declared)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: stochastic.F2SA(warmup=-1), r"`F2SA\(warmup=-1, x_every=1\)` must be at least 0"),
        (lambda: stochastic.MEHA(x_every=0), r"`MEHA\(warmup=0, x_every=0\)` must be at least"),
        (lambda: stochastic.StreamingIVSP(floor=0.0), r"`StreamingIVSP\(floor=0.0\)`"),
        (lambda: lb.TableRMS([torch.zeros(1)], lr=-1.0), r"`TableRMS\(lr=-1.0\)`"),
    ],
)
def test_constants(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_callbacks_without_those_of_the_mixin() -> None:
    class Own(Given):
        def configure_callbacks(self) -> list[Any]:
            return []

    run = Trainer(max_epochs=1, enable_checkpointing=False, **OPTIONS)
    with pytest.raises(MisconfigurationException, match=r"add to `super\(\).configure_callbacks"):
        run.fit(Own(usual), loader(batches(1, torch.float32)))


def test_a_parameter_in_no_optimizer_is_told_and_stays() -> None:
    module = Given(lambda m, x: (sgd(x), sgd([m.network.weight])))
    before = module.network.bias.detach().clone()  # type: ignore[union-attr, operator]
    run = Trainer(max_epochs=1, enable_checkpointing=False, **OPTIONS)
    with pytest.warns(UserWarning, match="1 parameters are in no optimiser of `Given"):
        run.fit(module, loader(batches(3, torch.float32)))
    assert run.global_step == 3
    assert torch.equal(module.network.bias, before)  # type: ignore[arg-type]


def test_no_batches_that_are_meant() -> None:
    fit(limit_train_batches=0)
    with pytest.warns(UserWarning, match="ranks is zero"):
        fit(data=loader([]))
