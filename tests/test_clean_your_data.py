"""The example that cleans somebody's own data."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from places import ROOT

from examples import clean_your_data
from examples.clean_your_data import main

COLOURS = {"red": (200, 40, 40), "blue": (40, 40, 200)}


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    """The example makes Lightning quiet, for itself only."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    yield
    logger.setLevel(level)


def suspects() -> list[dict[str, str]]:
    with Path("suspects.csv").open() as file:
        return list(csv.DictReader(file))


def write_table(name: str, n: int, wrong: int = 0) -> Path:
    """Two clouds of points with words as labels; the first ones have the other word."""
    torch.manual_seed(n)
    lines = ["name,height,weight,kind"]
    for i in range(n):
        kind = i % 2
        height, weight = torch.randn(2).tolist()
        word = ("cat", "dog")[kind if i >= wrong else 1 - kind]
        lines.append(f"s{i},{1000 * (height + 6 * kind)},{weight},{word}")
    path = Path(name)
    path.write_text("\n".join(lines))
    return path


def write_images(name: str, n: int, wrong: int = 0) -> Path:
    """Noisy pictures of two colours and of many sizes; the first ones lie in the other folder."""
    torch.manual_seed(n)
    words = list(COLOURS)
    for i in range(n):
        folder = Path(name, words[i % 2 if i >= wrong else 1 - i % 2])
        folder.mkdir(parents=True, exist_ok=True)
        noise = torch.randint(-30, 30, (6 + i % 5, 7, 3))
        pixels = (torch.tensor(COLOURS[words[i % 2]]) + noise).clamp(0, 255).byte()
        Image.fromarray(pixels.numpy()).save(folder / f"{i:02d}.png")
    return Path(name)


def test_it_is_short() -> None:
    text = (ROOT / "examples" / "clean_your_data.py").read_text()
    assert "python examples/clean_your_data.py" in text
    assert len(text.splitlines()) <= 200


@pytest.mark.integration
def test_it_finds_most_of_the_wrong_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main([])
    rows = suspects()
    assert len(rows) == 1000
    assert rows == sorted(rows, key=lambda row: float(row["weight"]))
    wrong = [row["id"].split(" is ")[1] != row["label"] for row in rows]
    assert sum(wrong) == 400
    assert sum(wrong[:400]) > 350
    printed = capsys.readouterr().out
    for name in ("trusted samples alone", "all samples", "self-training", "gold loss correction"):
        assert name in printed
    assert "Learned weights are " in printed


@pytest.mark.integration
def test_a_csv_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_table("train.csv", 40, wrong=8)
    write_table("trusted.csv", 12)
    main(["train.csv", "trusted.csv", "--label", "kind", "--id", "name"])
    rows = suspects()
    assert {row["id"] for row in rows[:8]} == {f"s{i}" for i in range(8)}
    assert all(row["label"] != row["predicted"] for row in rows[:8])
    assert {row["label"] for row in rows} == {"cat", "dog"}


@pytest.mark.integration
def test_a_folder_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(clean_your_data, "SIZE", (8, 8))
    write_images("train", 30, wrong=6)
    write_images("trusted", 12)
    write_images("test", 20)
    main(["train", "trusted", "test"])
    rows = suspects()
    numbers = {int(Path(row["id"]).stem) for row in rows[:6]}
    assert numbers == set(range(6))
    assert rows[0]["id"].split("/")[0] == rows[0]["label"] != rows[0]["predicted"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "A set cannot be read: .*trusted.csv"),
        ({"trusted.csv": "a,b,kind\n1,2,x\n"}, r"trusted.csv has no column 'label', see --label. "),
        ({"trusted.csv": "a,b,label\n1,two,x\n"}, r"trusted.csv, line 2: a feature is not a numb"),
        ({"trusted.csv": "a,b,label\n1,nan,x\n"}, r"trusted.csv, line 2: a feature is not a numb"),
        ({"trusted.csv": "a,b,label\n1\n"}, r"trusted.csv, line 2: a feature is not a number"),
        ({"trusted.csv": "a,c,label\n1,2,x\n1,2,y\n"}, r"same features: \['a', 'b'\] and \['a', "),
        ({"trusted.csv": "a,b,label\n1,2,x\n1,2,z\n"}, r"same classes: \['x', 'y'\] and \['x', 'z"),
        ({"trusted.csv": "a,b,label\n1,2,x\n1,2,y\n"}, r"Without a test set a third of TRUSTED"),
        ({"trusted.csv": ""}, r"trusted.csv has no column 'label'"),
    ],
)
def test_tables_that_will_not_do(
    files: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.csv").write_text("a,b,label\n1,2,x\n3,4,y\n")
    for name, text in files.items():
        Path(name).write_text(text)
    with pytest.raises(SystemExit, match=message):
        main(["train.csv", "trusted.csv"])
    assert not Path("suspects.csv").exists()


@pytest.mark.parametrize("mode", ["F", "I"])
def test_images_that_would_lose_their_values(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train/cat").mkdir(parents=True)
    Image.fromarray(torch.rand(4, 4).numpy()).convert(mode).save("train/cat/1.tif")
    with pytest.raises(SystemExit, match=r"train/cat/1.tif has more than 8 bits per value: scale"):
        main(["train", "train"])


def test_folders_that_will_not_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty/cat").mkdir(parents=True)
    Path("broken/cat").mkdir(parents=True)
    Path("broken/cat/1.png").write_text("no picture")
    for name, message in (
        ("none", "A set cannot be read: .*none"),
        ("empty/cat", "Couldn't find any class folder in empty/cat"),
        ("empty", "Found no valid file for the classes cat"),
        ("broken", "cannot identify image file .*broken/cat/1.png"),
    ):
        with pytest.raises(SystemExit, match=message):
            main([name, name])


def test_one_set_is_not_enough(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train"])
    assert "name a training set, trusted samples, and perhaps a test set" in capsys.readouterr().err
