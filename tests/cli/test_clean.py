"""``lightning-bilevel clean`` as somebody runs it on data of their own."""

from __future__ import annotations

import csv
import errno
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_data import WORDS, write_blobs, write_folder
from PIL import Image
from places import ROOT

from lightning_bilevel.__main__ import main
from lightning_bilevel.baselines.trusted import TrustedSamples
from lightning_bilevel.cli import clean_report
from lightning_bilevel.cli.clean import clean, parser
from lightning_bilevel.modules.detection import detection

TRUE = [i % 3 for i in range(150)]
# Every third sample of every class is taken for the next class.
GIVEN = [(label + 1) % 3 if i % 9 < 3 else label for i, label in enumerate(TRUE)]
TRUSTED = [i % 3 for i in range(30)]
METHODS = [
    "trusted samples alone",
    "all samples",
    "self-training, strict",
    "self-training, lenient",
    "learned weights",
]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-bilevel"])
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train networks for five steps only, where nobody asks how good they are."""
    short = partial(TrustedSamples, epochs=1, fewest_steps=5)
    monkeypatch.setattr("lightning_bilevel.cli.clean.TrustedSamples", short)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train networks for fifty steps, which is enough for stripes and blobs."""
    fifty = partial(TrustedSamples, fewest_steps=50)
    monkeypatch.setattr("lightning_bilevel.cli.clean.TrustedSamples", fifty)


@pytest.fixture
def images(tmp_path: Path) -> list[str]:
    write_folder(tmp_path / "train", TRUE, 1, GIVEN)
    write_folder(tmp_path / "trusted", TRUSTED, 2)
    write_folder(tmp_path / "test", TRUSTED * 3, 3)
    return ["clean", "--train", "train", "--trusted", "trusted"]


@pytest.fixture
def tables(tmp_path: Path) -> list[str]:
    write_blobs(tmp_path / "train.csv", TRUE, 1, GIVEN)
    write_blobs(tmp_path / "trusted.csv", TRUSTED, 2)
    write_blobs(tmp_path / "test.csv", TRUSTED * 3, 3)
    return ["clean", "--train", "train.csv", "--trusted", "trusted.csv", "--id", "name"]


def rows(path: str = "suspicious.csv") -> list[dict[str, str]]:
    with Path(path).open() as file:
        return list(csv.DictReader(file))


def number(row: dict[str, str]) -> int:
    """The number of the sample that the name ends in."""
    return int(row["id"].removesuffix(".png")[-3:].strip("s"))


def check(found: list[dict[str, str]]) -> None:
    """All samples once, in the order of suspicion, the wrong labels first, with right proposals."""
    assert sorted(number(row) for row in found) == list(range(len(TRUE)))
    suspicion = [float(row["suspicion"]) for row in found]
    assert suspicion == sorted(suspicion, reverse=True)
    assert 0 <= suspicion[-1] <= suspicion[0] <= 1
    assert all(0 <= float(row["weight"]) <= 1 for row in found)
    assert all(row["given_label"] == WORDS[GIVEN[number(row)]] for row in found)
    wrong = torch.tensor([TRUE[number(row)] != GIVEN[number(row)] for row in found])
    assert detection(torch.tensor(suspicion), wrong)["auroc"] > 0.95
    weights = torch.tensor([float(row["weight"]) for row in found])
    assert detection(-weights, wrong)["auroc"] > 0.9
    right = [row["proposed_label"] == WORDS[TRUE[number(row)]] for row in found]
    assert np.mean(right) > 0.9
    kept = torch.tensor([{"yes": True, "no": False}[row["kept"]] for row in found])
    assert float((kept == ~wrong).float().mean()) > 0.85


@pytest.mark.integration
@pytest.mark.usefixtures("short")
def test_images_with_a_test_set(images: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main([*images, "--test", "test", "--steps", "150"])
    check(rows())
    output = capsys.readouterr()
    said = output.out
    assert [line.split("  ")[0] for line in said.splitlines()[2:7]] == METHODS
    assert "error on 90 test samples" in said
    assert "Recommended: " in said
    assert said.count("recommended") == 1
    assert "most suspicious first: suspicious.csv and suspicious.png." in said
    assert "150 training samples (grey images of 6x6 pixels) in 3 classes, 30 trusted" in output.err
    assert "MLP, 150 steps of 37." in output.err
    assert "100%" in output.err
    assert "GPU" not in said + output.err
    with Image.open("suspicious.png") as picture:
        assert min(picture.size) > 500


@pytest.mark.integration
@pytest.mark.usefixtures("short")
def test_a_table_with_cross_validation(
    tables: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main([*tables, "--steps", "150"])
    check(rows())
    output = capsys.readouterr()
    assert "error on trusted samples held out" in output.out
    assert "again for each of four parts of the trusted samples" in output.err
    assert not Path("suspicious.png").exists()
    # The first rows are printed as well.
    worst = rows()[0]
    assert worst["id"] in output.out.split("given_label")[1]


@pytest.mark.usefixtures("quick")
def test_the_same_command_writes_the_same_bytes(tables: list[str]) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    call = [*tables, "--test", "test.csv", "--steps", "20", "--out"]
    for name in ("one.csv", "two.csv"):
        main([*call, name])
    assert torch.equal(torch.random.get_rng_state(), before)
    assert Path("one.csv").read_bytes() == Path("two.csv").read_bytes()
    main([*call, "three.csv", "--seed", "1"])
    assert Path("one.csv").read_bytes() != Path("three.csv").read_bytes()


@pytest.mark.usefixtures("quick")
def test_a_class_without_trusted_samples_is_said(
    images: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for file in Path("trusted/owl").iterdir():
        file.unlink()
    main([*images, "--steps", "20", "--test", "test"])
    assert "No trusted sample is of class owl: nothing vouches for its" in capsys.readouterr().err


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence, after which nothing was written."""
    before = sorted(Path().rglob("*"))
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 1
    assert sorted(Path().rglob("*")) == before
    lines = capsys.readouterr().err.strip().splitlines()
    said = [line for line in lines if line.startswith("lightning-bilevel: ")]
    assert len(said) == 1
    assert lines[-1] == said[0]
    return said[0].removeprefix("lightning-bilevel: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "none/x.csv"], "`clean --out none/x.csv`: there is no folder none; make it"),
        (["--out", "x.txt"], "`clean --out x.txt` must end in .csv: it is a table"),
        (["--out", "folder.csv"], "`clean --out folder.csv` is a folder: name a file in it"),
        (["--out", "trusted.csv"], "`clean --out trusted.csv` would overwrite your data: name"),
        (["--steps", "0"], "`clean --steps 0` must be at least 1"),
        (["--label", "kind"], "`clean --train train.csv` has no column 'kind': its columns are"),
        (["--id", "none"], "`clean --train train.csv` has no column 'none'"),
        (["--model", "no.Where"], "`clean --model no.Where` cannot be imported (ModuleNotFound"),
        (["--test", "train.csv"], "`clean --test train.csv` has 150 of the rows of `clean --tr"),
    ],
)
def test_a_wrong_option_ends_with_a_sentence_and_without_a_file(
    tables: list[str], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("folder.csv").mkdir()
    assert refused([*tables, *options], capsys).startswith(message)


def test_a_label_outside_the_classes(tables: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with Path("trusted.csv").open("a") as file:
        file.write("s99,1,2,3,cow\n")
    said = refused(tables, capsys)
    assert "`clean --trusted trusted.csv` has the label 'cow' (sample s99), which no" in said


def test_a_folder_that_may_not_be_written(
    tables: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "cannot be written: choose another folder" in refused(tables, capsys)


@pytest.mark.usefixtures("quick")
def test_a_full_disk_leaves_no_half_of_a_file(
    images: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    said = refused([*images, "--test", "test", "--steps", "5"], capsys)
    assert "No space left on device" in said


@pytest.mark.usefixtures("quick")
def test_a_picture_that_cannot_be_drawn_leaves_no_table(
    images: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(clean_report, "draw_samples", failing)
    with pytest.raises(ZeroDivisionError):
        clean(Path("train"), Path("trusted"), Path("test"), steps=5)
    assert not Path("suspicious.csv").exists()


@pytest.mark.usefixtures("quick")
def test_a_network_from_a_file_in_this_folder(
    tables: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("my_networks.py").write_text(
        "from torch import nn\n"
        "class Plain(nn.Linear):\n"
        "    def __init__(self, inputs, classes):\n"
        "        super().__init__(inputs, classes)\n"
    )
    path = list(sys.path)
    main([*tables, "--test", "test.csv", "--steps", "5", "--model", "my_networks.Plain"])
    assert sys.path == path
    assert "my_networks.Plain, 5 steps of 37" in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "my_networks")


def test_the_names_of_the_options_are_those_of_the_function() -> None:
    given = parser().parse_args(["--train", "a", "--trusted", "b"])
    assert set(vars(given)) == set(clean.__annotations__) - {"return"}


def test_help_explains_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["clean", "--help"])
    assert stop.value.code == 0
    assert "one folder of images per class" in " ".join(capsys.readouterr().out.split())


@pytest.mark.integration
def test_the_page_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    """Its snippet makes data in this folder, and its commands run on them, as long as usual."""
    text = (ROOT / "docs" / "clean.md").read_text()
    snippet = text.split("```python\n")[1].split("```")[0]
    exec(compile(snippet, "docs/clean.md", "exec"), {"__name__": "page"})
    commands = text.split("```console\n")[1].split("```")[0].splitlines()
    assert commands
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "lightning-bilevel"
        main(arguments)
        assert "MLP, 1,600 steps of 250." in capsys.readouterr().err
    with Path("suspicious.csv").open() as file:
        worst = list(csv.DictReader(file))[:100]
    # The snippet keeps the true digit in the name of the file.
    wrong = [row["id"].split("-is-")[1][0] != row["given_label"] for row in worst]
    assert sum(wrong) > 95
