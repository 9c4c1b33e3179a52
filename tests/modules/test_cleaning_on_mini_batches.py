"""Hyper-cleaning on mini-batches: the weighted mean, the touched weights, YAML."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from places import CONFIGS
from running import fit, trainer
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import TensorDataset

from lightning_bilevel import F2SA as ExactF2SA
from lightning_bilevel import IVSP, DatasetCleaning, Envelope, HyperCleaning, TableRMS
from lightning_bilevel.__main__ import main
from lightning_bilevel.cli.compare import compare
from lightning_bilevel.modules.networks import MLP
from lightning_bilevel.stochastic import F2SA, StreamingIVSP

METHOD: dict[str, Any] = {"method": F2SA(), "lower_optimizer": partial(AdamW, lr=1e-2)}
ON_MINI_BATCHES = ["digits_mini_batches", "fashion_mnist_mini_batches", "mnist_mini_batches"]


def module(**options: Any) -> HyperCleaning:
    torch.manual_seed(0)
    return HyperCleaning(n_train=23, classifier=MLP(4, 6, 4), classes=4, **{**METHOD, **options})


def data() -> DatasetCleaning:
    torch.manual_seed(0)
    return DatasetCleaning(
        TensorDataset(torch.rand(23, 1, 2, 2), torch.arange(23) % 4),
        TensorDataset(torch.rand(9, 1, 2, 2), torch.arange(9) % 4),
        corruption=0.4,
        batch_size=5,
    )


def batch() -> Any:
    return next(iter(data().train_dataloader()["lower"]))


def test_the_weighted_mean_is_divided_by_the_weights() -> None:
    ours = module(weighted_mean=True)
    with torch.no_grad():
        ours.logits.normal_()
    part = batch()
    losses = cross_entropy(ours(part[0]), part[1], reduction="none").tolist()
    weights = ours.weights.values()[part[2]].tolist()
    expected = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    found = ours.lower_loss(part, ours.lower_outputs(part)).detach()
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_weights_that_are_all_equal_have_no_common_way_down() -> None:
    """The reason for the weighted mean: mean(w l) pulls all weights down together."""
    for weighted, pull in ((True, False), (False, True)):
        ours = module(weighted_mean=weighted)
        part = batch()
        ours.lower_loss(part, ours.lower_outputs(part)).backward()
        gradient = ours.logits.grad
        assert gradient is not None
        # Along a common factor of all weights, that is along (1, ..., 1) from equal weights.
        assert (float(gradient.sum()) > 0.1) == pull
        if weighted:
            assert float(gradient.sum()) == pytest.approx(0.0, abs=1e-7)


def test_only_the_weights_of_the_batch_move(tmp_path: Any) -> None:
    ours = module(weighted_mean=True)
    seen: list[int] = []
    step = ours.lower_outputs

    def spy(part: Any) -> Any:
        seen.extend(part[2].tolist())
        return step(part)

    ours.lower_outputs = spy  # type: ignore[method-assign]
    trainer(tmp_path, max_steps=2).fit(ours, datamodule=data())
    untouched = sorted(set(range(23)) - set(seen))
    assert len(set(seen)) == 10
    assert torch.equal(ours.logits[untouched], torch.zeros(13))


def test_weights_stay_within_their_bound(tmp_path: Any) -> None:
    ours = module(upper_bound=2.0)
    trainer(tmp_path, max_epochs=4).fit(ours, datamodule=data())
    assert float(ours.logits.detach().abs().max()) == 2.0


def test_of_the_weighted_mean_no_qualification_is_known(tmp_path: Any) -> None:
    envelope = Envelope(rho=0.1, sigma=1.0, delta=1e-3)
    said = {}
    for weighted in (False, True):
        # The paper's network, whose qualification holds for the plain mean.
        ours = HyperCleaning(
            23, 4, 3, 4, weighted_mean=weighted, envelope=envelope, solver=ExactF2SA
        )
        full = data()
        full.batch_size = None
        trainer(tmp_path, max_steps=1).fit(ours, datamodule=full)
        said[weighted] = str(ours.certify())
    assert "not known for the weighted mean" in said[True]
    assert "holds: delta = 0.001 >" in said[False]


def test_a_scheduler_steps_at_each_iteration(tmp_path: Any) -> None:
    ours = module(
        upper_optimizer=partial(SGD, lr=2.0),
        lower_optimizer=partial(SGD, lr=1.0),
        upper_scheduler=partial(LambdaLR, lr_lambda=lambda k: 0.5**k),
        lower_scheduler=partial(LambdaLR, lr_lambda=lambda k: 1 / (1 + k)),
    )
    run = trainer(tmp_path, max_steps=3)
    run.fit(ours, datamodule=data())
    rates = [optimizer.param_groups[0]["lr"] for optimizer in run.optimizers]
    assert rates == pytest.approx([2 * 0.5**3, 1 / 4])


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({}, (IVSP,)),
        ({"method": F2SA()}, (TableRMS, AdamW)),
        ({"upper_optimizer": Adam}, (Adam, AdamW)),
        ({"lower_optimizer": Adam}, (TableRMS, Adam)),
    ],
)
def test_it_is_exact_unless_a_method_or_an_optimiser_is_given(
    options: dict[str, Any], kinds: tuple[Any, ...], tmp_path: Any
) -> None:
    ours = HyperCleaning(23, 4, 3, 4, **options)
    source = data()
    if not options:
        source.batch_size = None
    run = trainer(tmp_path, max_steps=1)
    run.fit(ours, datamodule=source)
    assert tuple(map(type, run.optimizers)) == kinds


@pytest.mark.parametrize("name", ON_MINI_BATCHES)
def test_configs_of_a_folder_pose_one_task(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-bilevel"])
    tasks = []
    for path in sorted((CONFIGS / name).glob("*.yaml")):
        with pytest.raises(SystemExit):
            main(["fit", "--config", str(path), "--print_config"])
        values = yaml.safe_load(capsys.readouterr().out)
        options = values["model"]["init_args"]
        assert options["n_train"] == values["data"]["init_args"]["n_train"]
        for level in ("upper", "lower"):
            steps = options[f"{level}_scheduler"]["init_args"]["T_max"]
            assert steps == values["trainer"]["max_steps"]
        assert options["upper_optimizer"]["init_args"] == {"lr": 3.0}
        assert options.pop("method")["class_path"].startswith("lightning_bilevel.stochastic.")
        options.pop("envelope")
        tasks.append((options, values["data"], values["seed_everything"]))
    assert len(tasks) == 2
    assert tasks[0] == tasks[1]


# With a rho of 10 the proximal point of a network takes more passes than monitors are allowed.
@pytest.mark.filterwarnings("ignore:.* has no certificate to look at:UserWarning")
@pytest.mark.parametrize(("name", "kind"), [("streaming_ivsp", StreamingIVSP), ("f2sa", F2SA)])
def test_optimisers_and_scheduler_by_yaml_are_those_that_step(
    name: str, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through LightningCLI: their classes, their rates after three steps, what they move."""
    monkeypatch.setattr(sys, "argv", ["lightning-bilevel"])
    fitted: list[HyperCleaning] = []
    monkeypatch.setattr(HyperCleaning, "on_train_end", lambda self: fitted.append(self))
    config = CONFIGS / "digits_mini_batches" / f"{name}.yaml"
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    fit(tmp_path, *quiet, "--trainer.max_steps=3", "--trainer.logger=false", config=config)
    assert fitted[0].mini_batches is not None
    step = fitted[0].mini_batches.step
    assert step is not None
    assert type(step.method) is kind
    optimizers = [*fitted[0].trainer.optimizers, *step.shadow_optimizers]
    assert [type(optimizer) for optimizer in optimizers] == [TableRMS, AdamW, AdamW]
    options = yaml.safe_load(config.read_text())["model"]["init_args"]
    lower_lr = float(options["lower_optimizer"]["init_args"]["lr"])
    expected = CosineAnnealingLR(SGD([torch.zeros(1)], lr=1.0), T_max=1600)
    for _ in range(3):
        expected.optimizer.step()
        expected.step()
    factor = expected.get_last_lr()[0]
    rates = [optimizer.param_groups[0]["lr"] for optimizer in fitted[0].trainer.optimizers]
    assert rates == pytest.approx([3.0 * factor, lower_lr * factor])
    # In the first step z is y, so the gap says nothing of the weights.
    assert int((fitted[0].logits != 0).sum()) == 2 * 64


@pytest.mark.integration
def test_methods_on_mini_batches_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-bilevel"])
    results = compare([CONFIGS / "digits_mini_batches"], 0.3, tmp_path / "out", evaluations=1)
    assert [result.name for result in results] == ["f2sa", "streaming_ivsp"]
    for result in results:
        assert result.rows[0]["iteration"] == 0
        assert result.rows[0]["auroc"] == 0.5
        assert result.error is None
        assert result.rows[-1]["iteration"] > 0
