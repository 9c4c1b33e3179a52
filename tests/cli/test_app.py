"""The command line, as a user calls it."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from clocks import Clock
from places import CONFIGS, SYNTHETIC
from running import events, fit, trainer
from streaming import Streamed, StreamedData
from torchvision import datasets

from lightning_bilevel import (
    IVSP,
    BilevelError,
    CertificateReport,
    stochastic,
)
from lightning_bilevel.__main__ import main
from lightning_bilevel.cli.app import WITHOUT_STEPS, BilevelCLI, BilevelTrainer
from lightning_bilevel.data.downloads import OmniglotEpisodes
from lightning_bilevel.data.glyphs import draw_glyphs

DATA = Path(os.environ.get("LIGHTNING_BILEVEL_DATA", "no data"))
CONFIG = SYNTHETIC / "ivsp.yaml"


@pytest.fixture(autouse=True)
def _command_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-bilevel"])


@pytest.mark.integration
def test_paper_settings_reach_the_papers_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")
    printed, _, proved = capsys.readouterr().out.partition("point: the theorem's point")
    assert "bounds there: feasibility" in proved
    rows = {
        line.split("  ")[0].strip(): line.split("  ")[-1].strip()
        for line in printed.splitlines()
        if "  " in line
    }
    assert float(rows["x_error"]) <= 1.0e-3
    assert float(rows["y_error"]) <= 1.0e-6
    assert all(
        float(rows[f"KKT {name}"]) < 1e-3
        for name in ("stationarity", "feasibility", "complementarity")
    )
    assert "update 3" in " ".join(printed.split())
    assert rows["outer iterations"] == "2000"
    log = next(tmp_path.rglob("events.out.tfevents*"))
    assert "bilevel/moreau_gap" in events(log.parent).Tags()["scalars"]
    assert (
        yaml.safe_load(next(tmp_path.rglob("config.yaml")).read_text())["model"]["init_args"]["n"]
        == 1000
    )


@pytest.mark.integration
@pytest.mark.parametrize(
    ("budget", "iterations"),
    [("100ms", 4), (0.1, 4)],
)
def test_a_budget_stops_fit_from_yaml(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    budget: Any,
    iterations: int,
) -> None:
    step = IVSP.method_type.step

    def timed(*args: Any) -> Any:
        clock.now += 0.03
        return step(*args)

    monkeypatch.setattr(IVSP.method_type, "step", timed)
    config = yaml.safe_load(CONFIG.read_text())
    config["trainer"]["callbacks"] = [
        {"class_path": "OptimizationBudget", "init_args": {"budget": budget}}
    ]
    config["trainer"]["max_epochs"] = -1
    config["model"]["init_args"]["n"] = 10
    (tmp_path / "budget.yaml").write_text(yaml.safe_dump(config))
    fit(
        tmp_path,
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        config=tmp_path / "budget.yaml",
    )
    # It ended by itself, without a limit on steps or epochs.
    printed = capsys.readouterr().out
    assert "optimisation time" in printed
    assert re.search(rf"^outer iterations +{iterations}$", printed, re.MULTILINE)


def test_a_budget_by_one_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the place of the config's epochs, and a saved config with it still certifies."""
    monkeypatch.setattr(sys, "argv", ["lightning-bilevel"])
    short = ["--trainer.max_epochs=1", "--trainer.log_every_n_steps=1", "--model.n=2"]
    fit(tmp_path, *QUIET, *short, "--data.epoch_length=5", "--budget=200ms")
    printed = capsys.readouterr().out
    rows = dict(re.findall(r"^(o[\w ]+?)  +([\d.]+)", printed, re.MULTILINE))
    assert float(rows["optimisation time"]) >= 0.2
    assert int(rows["outer iterations"]) > 5
    (config,) = tmp_path.rglob("config.yaml")
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    main(["certify", "--config", str(config), "--ckpt_path", str(checkpoint)])
    assert f"outer iterations   {rows['outer iterations']}" in capsys.readouterr().out


def test_a_budget_that_is_no_time_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-bilevel"])
    with pytest.raises(SystemExit):
        fit(tmp_path, *QUIET, "--budget=soon")
    assert "budget 'soon' is not a duration" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "mps", "chosen"),
    [
        ("auto", True, "cpu"),
        ("auto", False, "auto"),
        ("mps", True, "mps"),  # which `fit` then refuses with a sentence
    ],
)
def test_an_automatic_choice_is_no_device_without_float64(
    monkeypatch: pytest.MonkeyPatch, given: str, mps: bool, chosen: str
) -> None:
    """Apple's GPU has none."""

    class Chosen(Exception):
        pass

    class CLI(BilevelCLI):
        def _instantiate_trainer(self, config: Any, callbacks: Any) -> Any:
            raise Chosen(config["accelerator"])

    monkeypatch.setattr("lightning_bilevel.cli.app.MPSAccelerator.is_available", lambda: mps)
    args = ["--config", str(CONFIG), f"--trainer.accelerator={given}"]
    monkeypatch.setattr(sys, "argv", ["lightning-bilevel", *args])
    with pytest.raises(Chosen, match=f"^{chosen}$"):
        CLI(run=False)


MONITORS = ["CertificateMonitor", "PenaltyMonitor", "SolverMonitor"]
QUIET = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")


@pytest.mark.parametrize(
    ("solver", "named"),
    [
        *(
            (name, False)
            for name in ("ivsp", "meha", "pngbio", "slm", "f2sa", "vpbgd", "bome", "f2ba")
        ),
        ("ivsp", True),
        ("meha", True),
    ],
)
def test_monitors_by_their_bare_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], solver: str, named: bool
) -> None:
    """Named in YAML without arguments, or not named at all: each monitor watches once."""
    config = yaml.safe_load((CONFIG.parent / f"{solver}.yaml").read_text())
    config["trainer"] |= {
        "max_epochs": 2,
        "log_every_n_steps": 5,
        **({"callbacks": MONITORS} if named else {}),
    }
    config["model"]["init_args"]["n"], config["data"]["init_args"]["epoch_length"] = 10, 5
    (tmp_path / "watched.yaml").write_text(yaml.safe_dump(config))
    fit(tmp_path, *QUIET, config=tmp_path / "watched.yaml")
    assert "lower level stationary to" in capsys.readouterr().out
    folder = next(tmp_path.rglob("events.out.tfevents*")).parent
    found = events(folder)
    tags = {
        f"bilevel/{word}"
        for word in (
            "violation",
            "prox_distance",
            "kkt_residual",
            "kkt_best",
            "calls_gap",
            "passes",
        )
    }
    assert tags <= set(found.Tags()["scalars"])
    assert ("bilevel/penalty_constant_for" in found.Tags()["scalars"]) == (solver == "ivsp")
    assert [event.step for event in found.Scalars("bilevel/calls_gap")] == [1, 5, 10]
    assert "certificate/text_summary" in found.Tags()["tensors"]
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["model"]["init_args"]["n"] == 10
    assert (folder / "certificate.json").exists()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, Any], Path]:
    """A call that certifies a run, what the run said itself, and its folder."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lightning-bilevel"])
        short = ("--trainer.max_epochs=2", "--data.init_args.epoch_length=50")
        fit(folder, *QUIET, *short, "--model.init_args.n=10")
    (checkpoint,) = folder.rglob("*.ckpt")
    (config,) = folder.rglob("config.yaml")
    saved = json.loads((config.parent / "certificate.json").read_text())
    return ["certify", "--config", str(config), "--ckpt_path", str(checkpoint)], saved, folder


class TestCertify:
    def test_equals_the_certificate_of_the_run(
        self, run: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        call, saved, folder = run
        before = sorted(folder.rglob("*"))
        main(call)
        printed = capsys.readouterr().out
        for name in ("stationarity", "feasibility", "complementarity"):
            assert f"{saved['certificate'][name]:.3e}" in printed
        # the counts of the run are in the checkpoint, so the penalty is in the reading
        assert saved["reading"] in " ".join(printed.split())
        assert sorted(folder.rglob("*")) == before  # it only looks

    def test_of_the_theorem_s_point(self, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
        call, saved, _ = run
        main([*call, "--proved=true"])
        printed = " ".join(capsys.readouterr().out.split())  # a long row goes on below itself
        certificate = saved["proved"]
        assert certificate["stationarity"] != saved["certificate"]["stationarity"]
        assert f"{certificate['stationarity']:.3e}" in printed
        assert certificate["point"] in printed

    def test_the_tolerance_is_the_users(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        import lightning_bilevel.run as certifier

        seen, certify = [], certifier.certify
        monkeypatch.setattr(
            certifier, "certify", lambda *a, **k: seen.append(k["tolerance"]) or certify(*a, **k)
        )
        main([*run[0], "--tolerance", "1e-2"])
        assert seen == [1e-2]

    @pytest.mark.parametrize(
        ("change", "code", "words"),
        [
            (
                ["--ckpt_path", "nowhere.ckpt"],
                1,
                "'nowhere.ckpt'` is not a whole checkpoint",
            ),
            (["--ckpt_path", "null"], 1, "`certify` needs `--ckpt_path FILE`"),
            (["--tolerance", "0"], 2, 'Parser key "tolerance"'),
        ],
    )
    def test_bad_calls(
        self,
        run: Any,
        capsys: pytest.CaptureFixture[str],
        change: list[str],
        code: int,
        words: str,
    ) -> None:
        with pytest.raises(SystemExit) as stop:
            main([*run[0], *change])
        assert stop.value.code == code
        error = capsys.readouterr().err
        assert words in error
        assert "Traceback" not in error


def built(tmp_path: Path, *args: str) -> list[str]:
    """The names of the callbacks that a command line makes, in their order."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
        call = ["--config", str(CONFIG), f"--trainer.default_root_dir={tmp_path}", *args]
        trainer: Any = BilevelCLI(call, run=False).trainer
    # Where rich is installed, Lightning takes its own summary and bar in rich's colours.
    names = [type(callback).__name__ for callback in trainer.callbacks]
    return [name.removeprefix("Rich").removeprefix("TQDM") for name in names]


class TestCallbacks:
    WATCHING: ClassVar[list[str]] = ["PenaltyMonitor", "SolverMonitor", "CertificateMonitor"]
    OTHERS: ClassVar[list[str]] = [
        "_SaveConfig",
        "ProgressBar",
        "ModelSummary",
        "LastCheckpoint",
    ]

    def test_their_order(self, tmp_path: Path) -> None:
        assert built(tmp_path) == [
            *self.WATCHING,
            "CertificateReport",
            *self.OTHERS,
        ]

    @pytest.mark.parametrize("name", ["PenaltyMonitor", "CertificateMonitor", "CertificateReport"])
    def test_one_that_the_config_names_is_not_added(self, tmp_path: Path, name: str) -> None:
        added = [other for other in [*self.WATCHING, "CertificateReport"] if other != name]
        assert built(tmp_path, f"--trainer.callbacks={name}") == [name, *added, *self.OTHERS]

    def test_a_progress_bar_of_the_users_stays(self, tmp_path: Path) -> None:
        found = built(tmp_path, "--trainer.callbacks=TQDMProgressBar")
        assert found[0] == "ProgressBar"
        assert "ProgressBar" not in found[1:]


def test_probe_takes_the_config_of_a_fit(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run[2]
    (config,) = folder.rglob("config.yaml")
    before = sorted(folder.rglob("*"))
    capsys.readouterr()
    main(["probe", "--config", str(config)])
    printed = capsys.readouterr().out
    assert "what it would choose" in printed
    assert "; given: " in printed
    assert sorted(folder.rglob("*")) == before


class TestOnMiniBatches:
    """A run on mini-batches with the loaders of a user's own data module."""

    def test_certify_is_what_the_run_ended_with(self, tmp_path: Path) -> None:
        """The same data, the same rho, and as few passes."""
        method = stochastic.StreamingIVSP()
        module = Streamed(method=method)
        report = CertificateReport()
        run = trainer(tmp_path, max_epochs=2, callbacks=[report])
        run.fit(module, datamodule=StreamedData())
        run.save_checkpoint(tmp_path / "run.ckpt")
        loaded = (Streamed(method=method), StreamedData())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`")
            found = BilevelTrainer(**WITHOUT_STEPS).certify(
                *loaded, ckpt_path=str(tmp_path / "run.ckpt")
            )
        assert report.certificate is not None
        assert found.evaluated_on == report.certificate.evaluated_on
        assert "all data (20 upper and 30 lower samples), in eval mode; rho =" in found.evaluated_on
        assert found.passes == report.certificate.passes < 60
        assert found.kkt == pytest.approx(report.certificate.kkt, rel=1e-4)

    def test_probe_looks_at_all_data(self, capsys: pytest.CaptureFixture[str]) -> None:
        module = Streamed(norm=False, dropout=0.0)
        BilevelTrainer(**WITHOUT_STEPS).probe(module, StreamedData())
        assert "\nrho " in capsys.readouterr().out

    def test_probe_refuses_losses_that_change(self) -> None:
        with pytest.raises(BilevelError, match="need a deterministic objective"):
            BilevelTrainer(**WITHOUT_STEPS).probe(Streamed(), StreamedData())


class TestAModuleWithTheMixin:
    """README's `class Cleaner(BilevelMixin, LightningModule)`, by its dotted path."""

    CALL = (
        "--model=modules.Cleaner",
        "--model.n_train=30",
        "--data=modules.CleanerData",
        "--trainer.accelerator=cpu",
    )

    def test_fit_and_certify(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        quiet = (
            "--trainer.enable_progress_bar=false",
            "--trainer.enable_model_summary=false",
            "--trainer.max_epochs=1",
        )
        main(["fit", *self.CALL, *quiet, f"--trainer.default_root_dir={tmp_path}"])
        assert "IVSP on Cleaner" in capsys.readouterr().out
        (config,) = tmp_path.rglob("config.yaml")
        main(
            [
                "certify",
                "--config",
                str(config),
                "--ckpt_path",
                str(tmp_path / "checkpoints" / "last.ckpt"),
            ]
        )
        assert "IVSP on Cleaner, last.ckpt" in capsys.readouterr().out

    def test_probe(self, capsys: pytest.CaptureFixture[str]) -> None:
        main(["probe", *self.CALL])
        assert "IVSP on Cleaner, delta 0.001" in capsys.readouterr().out


class TestWhatIsNoCheckpoint:
    """A file that `certify` or `fit` cannot go on from: one line, and no traceback."""

    FILES: ClassVar[dict[str, Any]] = {
        "bare": lambda path: torch.save(torch.nn.Linear(2, 3).state_dict(), path),
        "tensor": lambda path: torch.save(torch.ones(3), path),
        "text": lambda path: path.write_text("hello"),
        "empty": lambda path: path.write_bytes(b""),
        "bytes": lambda path: path.write_bytes(bytes(range(256))),
    }

    @pytest.mark.parametrize("command", ["certify", "fit"])
    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("bare", "is not a whole checkpoint of tensors and plain values: "),
            ("tensor", "is not a whole checkpoint of tensors and plain values: "),
            ("text", "is not a whole checkpoint of tensors and plain values: "),
            ("empty", "is not a whole checkpoint of tensors and plain values: "),
            ("bytes", "is not a whole checkpoint of tensors and plain values: "),
        ],
    )
    def test_it_is_refused(
        self, tmp_path: Path, capsys: Any, command: str, name: str, words: str
    ) -> None:
        path = tmp_path / "run.ckpt"
        self.FILES[name](path)
        with pytest.raises(SystemExit) as stop:
            main(
                [
                    command,
                    "--config",
                    str(CONFIG),
                    f"--trainer.default_root_dir={tmp_path}",
                    "--ckpt_path",
                    str(path),
                ]
            )
        assert stop.value.code == 1
        error = capsys.readouterr().err
        assert f"lightning-bilevel: `ckpt_path='{path}'` {words}" in error
        assert "Traceback" not in error

    def test_hyper_parameters_of_another_module_are_named(
        self, tmp_path: Path, capsys: Any
    ) -> None:
        saved = {"hyper_parameters": {"colour": "red"}, "pytorch-lightning_version": "2.6.0"}
        torch.save(saved, tmp_path / "run.ckpt")
        with pytest.raises(SystemExit) as stop:
            main(["fit", "--config", str(CONFIG), "--ckpt_path", str(tmp_path / "run.ckpt")])
        assert stop.value.code == 2
        assert "colour" in capsys.readouterr().err


def test_validate_and_test_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("validate", "test"):
        main([command, "--config", str(CONFIG), f"--trainer.default_root_dir={tmp_path}"])
        assert "x_error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("--model.solver.init_args.rhoo=1", "rhoo"),
        ("--model.solver=IVPS", "IVPS"),
        ("--model.solver.init_args.rho=high", "high"),
        ("--model.solver.init_args.smoothing=round", "round"),
        ("--model=SinProblem", "SinProblem"),
        ("--trainer.maxsteps=3", "maxsteps"),
        ("--data.init_args.epoch_lenght=3", "epoch_lenght"),
    ],
)
def test_a_wrong_key_or_type_is_named_at_parsing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, words: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        fit(tmp_path, change)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("--model.solver.init_args.rho=2.0", "`rho=2.0` must be smaller than 1/sigma = 1"),
        ("--model.solver.init_args.mu0=-1", "`IVSP(mu0=-1.0)` must be positive"),
        (
            "--data.init_args.epoch_length=0",
            "`FullBatchDataModule(epoch_length=0)` must be at least 1",
        ),
        ("--trainer.precision=bf16-mixed", "is not supported with IVSP on"),
        (
            "--monitor.envelope={rho: 2.0, sigma: 1.0, delta: 0.1}",
            "`rho=2.0` must be smaller than 1/sigma = 1",
        ),
    ],
)
def test_a_wrong_value_ends_with_its_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, words: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        fit(tmp_path, change)
    assert stop.value.code in (1, 2)
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


def test_every_hyper_parameter_has_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    import inspect

    with pytest.raises(SystemExit):
        main(["fit", "--model=SineProblem", "--model.solver.help=IVSP"])
    text = " ".join(capsys.readouterr().out.split())
    for name in list(inspect.signature(IVSP.__init__).parameters)[2:]:
        option = (
            text.split(f"--model.solver.init_args.{name} ")[-1]
            if f"init_args.{name} " in text
            else text.split(f".{name} ")[-1]
        )
        words = option.split("(type:")[0]
        assert len(words.split()) > 3, name


@pytest.mark.integration
def test_the_command_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    """The script that pip has written, in this process, which has imported everything."""
    command = Path(sys.executable).parent / "lightning-bilevel"
    if not command.exists():
        pytest.skip("the package is not installed in this environment")
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(command), run_name="__main__")
    assert not stop.value.code
    assert "lightning-bilevel fit --config digits/ivsp_default" in capsys.readouterr().out


READY = sorted(CONFIGS.rglob("*.yaml"))


SPLITS = ("train", "validation", "test")
FOLDERS = {
    "MNISTCleaning": "MNIST",
    "FashionMNISTCleaning": "FashionMNIST",
    "OmniglotEpisodes": "omniglot-py",
}
DEFAULT_SIZES = {"MNISTCleaning": 5000, "FashionMNISTCleaning": 5000, "DigitsCleaning": 600}


@pytest.fixture(scope="module")
def sources() -> dict[str, Any]:
    """What reads, decodes or draws the data of the ready configs: each does it once."""
    read = OmniglotEpisodes.load

    @cache
    def omniglot(root: str, size: int) -> torch.Tensor:
        return read(OmniglotEpisodes(root, size))

    return {
        "lightning_bilevel.data.downloads.OmniglotEpisodes.load": lambda self: omniglot(
            str(self.root), self.image_size
        ),
        "lightning_bilevel.data.glyphs.draw_glyphs": cache(draw_glyphs),
        "torchvision.datasets.MNIST": cache(datasets.MNIST),
        "torchvision.datasets.FashionMNIST": cache(datasets.FashionMNIST),
    }


@pytest.fixture
def _each_source_once(sources: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, source in sources.items():
        monkeypatch.setattr(name, source)


def reduced(config: Path, tmp_path: Path) -> Path:
    """A copy of a ready config for a step on little data.

    One file is parsed once; each option on the command line would have all of it parsed again.
    """
    content = yaml.safe_load(config.read_text())
    model, data = content["model"]["init_args"], content["data"].setdefault("init_args", {})
    source = content["data"]["class_path"]
    mini_batches = config.parent.name.endswith("_mini_batches")
    content["trainer"] |= {
        "fast_dev_run": True,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "default_root_dir": str(tmp_path),
    }
    if source in FOLDERS:
        data["root"] = str(DATA)
    if source.endswith("Cleaning"):
        # The certificate goes through all data.
        given = data.get("n_train", DEFAULT_SIZES[source])
        data |= {"n_train": 300, "n_validation": 100, "n_test": 100}
        weights = model if "n_train" in model else model["weights"]["init_args"]
        for name in {"n_train", "n"} & set(weights):
            assert weights[name] == given  # or the run would be refused
            weights[name] = 300
    if source.endswith("Episodes"):
        model |= {"tasks": 2, "channels": 4}
        data |= {f"n_{split}": 2 for split in SPLITS}
        if mini_batches:
            data["tasks_per_batch"] = 2
    if source == "GlyphEpisodes":  # its 300 characters take two seconds to draw
        data |= {f"{split}_classes": 20 for split in SPLITS}
    path = tmp_path / config.name
    path.write_text(yaml.safe_dump(content))
    return path


class Parsed(BilevelCLI):
    def instantiate_classes(self) -> None:
        """The config alone."""


@pytest.mark.parametrize("config", READY, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_config_resolves(config: Path) -> None:
    """Its classes and arguments exist; its name begins with that of its solver or method."""
    resolved = Parsed(["--config", str(config)], run=False).config
    options = resolved.model.init_args
    named = (options.get("solver") or options["method"]).class_path
    assert config.stem.replace("_", "").startswith(named.rsplit(".", 1)[-1].lower())


# One of each task and mode.
RUN = (
    "synthetic/ivsp",
    "digits/ivsp_default",
    "mnist/ivsp",
    "mnist/ivsp_growing",
    "fashion_mnist/f2sa",
    "glyphs/ivsp",
    "omniglot/ivsp",
    "omniglot_cpu/pbgd_free",
    "digits_mini_batches/streaming_ivsp",
    "mnist_mini_batches/streaming_ivsp",
    "fashion_mnist_mini_batches/f2sa",
    "glyphs_mini_batches/streaming_ivsp",
    "omniglot_mini_batches/meha",
    "trusted/mnist_pair_100/streaming_ivsp",
    "trusted/fashion_mnist_pair_1000/f2sa",
)


@pytest.mark.integration
# A few steps do not come to all data.
@pytest.mark.usefixtures("_each_source_once")
@pytest.mark.parametrize("name", RUN)
def test_a_config_of_each_task_runs(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its data at hand, it makes a step (few-shot: a certificate)."""
    config = CONFIGS / f"{name}.yaml"
    content = yaml.safe_load(config.read_text())
    source = content["data"]["class_path"]
    if source in FOLDERS and not (DATA / FOLDERS[source]).exists():
        pytest.skip(
            f"{source} has no data in {DATA}: put them there, or name their folder in "
            "LIGHTNING_BILEVEL_DATA"
        )
    main(["fit", "--config", str(reduced(config, tmp_path))])
    if source.endswith("Episodes") and "tasks_per_batch" not in content["data"]["init_args"]:
        printed = capsys.readouterr().out
        assert "KKT stationarity" in printed
        assert (
            "constraint qualification  holds: for each delta > 0, because g is convex in y"
            in printed
        )
