"""Somebody's own data: what is read from folders and CSV files, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from own_data import WORDS, blobs, pictures, write_blobs, write_folder, write_image, write_table
from PIL import Image

from lightning_bilevel.data.own import read_own

LABELS = [0, 1, 2, 2, 1, 0, 0]


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    write_folder(tmp_path / "train", LABELS, seed=1)
    write_folder(tmp_path / "trusted", [0, 1, 2], seed=2)
    write_folder(tmp_path / "test", [2, 2, 0], seed=3)
    return tmp_path


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    write_blobs(tmp_path / "train.csv", LABELS, seed=1)
    write_blobs(tmp_path / "trusted.csv", [0, 1, 2], seed=2)
    write_blobs(tmp_path / "test.csv", [2, 2, 0], seed=3)
    return tmp_path


def test_images_in_folders(folders: Path) -> None:
    data = read_own(folders / "train", folders / "trusted", folders / "test")
    assert data.classes == list(WORDS)
    assert data.are_images
    expected = pictures(LABELS, seed=1)
    order = [0, 5, 6, 1, 4, 2, 3]  # by class, then by name
    assert data.ids == [f"{WORDS[LABELS[i]]}/{i:03d}.png" for i in order]
    assert torch.equal(data.train[0], expected[order].unsqueeze(1).float() / 255)
    assert data.train[1].tolist() == [LABELS[i] for i in order]
    assert data.test is not None
    assert data.test[1].tolist() == [0, 2, 2]
    assert data.unseen == []


def test_colour_anywhere_makes_all_images_colour(folders: Path) -> None:
    pixels = torch.randint(0, 256, (6, 6, 3))
    write_image(folders / "trusted" / "cat" / "z.png", pixels)
    data = read_own(folders / "train", folders / "trusted")
    assert torch.equal(data.trusted[0][1], pixels.permute(2, 0, 1).float() / 255)
    grey = data.train[0]
    assert grey.shape == (7, 3, 6, 6)
    assert torch.equal(grey[:, 0], grey[:, 2])


def test_sixteen_bits_are_scaled_not_cut_off(folders: Path) -> None:
    wide = np.linspace(0, 65535, 36).astype(np.uint16).reshape(6, 6)
    Image.fromarray(wide).save(folders / "trusted" / "owl" / "wide.png")
    data = read_own(folders / "train", folders / "trusted")
    found = data.trusted[0][-1, 0].double()
    assert float((found - torch.from_numpy(wide / 65535)).abs().max()) <= 1 / 255


def test_size_resizes_all(folders: Path) -> None:
    write_image(folders / "train" / "cat" / "large.png", torch.full((20, 10), 77))
    data = read_own(folders / "train", folders / "trusted", size=4)
    assert data.train[0].shape == (8, 1, 4, 4)
    large = data.train[0][data.ids.index("cat/large.png")]
    assert torch.allclose(large, torch.tensor(77 / 255))


def test_hidden_and_other_files_are_passed_over(folders: Path) -> None:
    (folders / "train" / "notes.txt").write_text("not an image")
    write_image(folders / "train" / ".thumbnails" / "1.png", torch.zeros(3, 3))
    assert len(read_own(folders / "train", folders / "trusted").ids) == len(LABELS)


def test_features_have_the_units_of_the_training_set(tables: Path) -> None:
    names = {"label": "label", "id_column": "name"}
    data = read_own(*(tables / f"{name}.csv" for name in ("train", "trusted", "test")), **names)
    assert data.classes == list(WORDS)
    assert data.ids == [f"s{i}" for i in range(7)]
    assert not data.are_images
    raw = blobs(LABELS, seed=1).double()
    other = blobs([0, 1, 2], seed=2).double()
    scale = raw.std(0, correction=0)
    assert torch.allclose(data.train[0].double(), (raw - raw.mean(0)) / scale, atol=1e-5)
    assert torch.allclose(data.trusted[0].double(), (other - raw.mean(0)) / scale, atol=1e-5)


def test_columns_may_have_another_order_and_ids_may_be_missing_but_in_training(
    tables: Path,
) -> None:
    rows = [["c", "label", "b", "a"]]
    rows += [[c, WORDS[i], b, a] for i, (a, b, c) in enumerate(blobs([0, 1, 2], 2).tolist())]
    write_table(tables / "turned.csv", rows)
    turned = read_own(tables / "train.csv", tables / "turned.csv", id_column="name")
    straight = read_own(tables / "train.csv", tables / "trusted.csv", id_column="name")
    assert torch.equal(turned.trusted[0], straight.trusted[0])


def test_a_constant_feature_stays_zero(tmp_path: Path) -> None:
    for name, shift in (("train", 0), ("trusted", 1)):
        rows = [["a", "b", "label"], [shift, 5, "x"], [shift + 2, 5, "y"], [shift + 9, 5, "y"]]
        write_table(tmp_path / f"{name}.csv", rows)
    data = read_own(tmp_path / "train.csv", tmp_path / "trusted.csv")
    assert data.train[0][:, 1].tolist() == [0, 0, 0]
    assert data.ids == ["1", "2", "3"]


def test_tables_of_spreadsheets_and_pandas(tmp_path: Path) -> None:
    """Semicolons, a mark of the encoding, an index without a name; numbers sorted as numbers."""
    text = "\ufeff;a;class\n7;1.5;10\n8;2.5;9\n9;3;10\n"
    (tmp_path / "train.csv").write_text(text, encoding="utf-8")
    (tmp_path / "trusted.csv").write_text("a;class\n4;9\n5;10\n")
    data = read_own(tmp_path / "train.csv", tmp_path / "trusted.csv", label="class")
    assert data.classes == ["9", "10"]
    assert data.ids == ["7", "8", "9"]
    assert data.train[0].shape == (3, 1)
    assert data.train[1].tolist() == [1, 0, 1]


def test_a_class_without_trusted_samples_is_known(folders: Path) -> None:
    write_folder(folders / "two", [0, 1, 1], seed=4)
    assert read_own(folders / "train", folders / "two").unseen == ["owl"]


def small(path: Path) -> None:
    write_image(path / "train" / "dog" / "small.png", torch.zeros(5, 6))


def trusted_small(path: Path) -> None:
    for label in WORDS:
        for file in (path / "trusted" / label).iterdir():
            write_image(file, torch.randint(0, 9, (4, 5)))


def empty(path: Path) -> None:
    for file in (path / "train").rglob("*.png"):
        file.unlink()


def loose(path: Path) -> None:
    write_image(path / "train" / "lost.png", torch.zeros(6, 6))


def broken(path: Path) -> None:
    (path / "train" / "cat" / "broken.png").write_bytes(b"\x89PNG\r\n but no more")


def same(path: Path) -> None:
    (path / "trusted" / "cat" / "copy.png").write_bytes(
        (path / "train" / "owl" / "002.png").read_bytes()
    )


def outside(path: Path) -> None:
    write_image(path / "trusted" / "cow" / "1.png", torch.zeros(6, 6))


def few(path: Path) -> None:
    for label in WORDS[1:]:
        for file in (path / "trusted" / label).iterdir():
            file.unlink()


def one_class(path: Path) -> None:
    for label in WORDS[1:]:
        for file in (path / "train" / label).iterdir():
            file.unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (small, "has an image of 6x6 pixels (cat/000.png) and one of 6x5 (dog/small.png): all"),
        (trusted_small, "has images of 5x4 pixels and `clean --train"),
        (empty, "has no images: they must lie in one folder per class, such as train/cat/1.png"),
        (loose, "has an image outside the folders of the classes (lost.png): the label"),
        (broken, "cat/broken.png cannot be read as an image"),
        (same, "has 1 of the images of `clean --train"),
        (same, "(owl/002.png): a trusted sample needs no cleaning, so leave it out of the"),
        (outside, "has the label 'cow' (sample cow/1.png), which no training sample has: the"),
        (few, "has 1 samples for 3 classes: there must be at least as many trusted samples"),
        (one_class, "has one class only, 'cat': there must be at least two"),
    ],
)
def test_folders_that_are_refused(
    folders: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(folders)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        read_own(folders / "train", folders / "trusted")
    assert str(raised.value).startswith("`clean --tr")


def test_too_much_for_memory(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_bilevel.data.folders._MOST_BYTES", 7 * 36 * 4 - 1)
    with pytest.raises(ValueError, match="7 images of 6x6 pixels, which take 0 GB of memory as"):
        read_own(folders / "train", folders / "trusted")


GOOD = ["a,b,label", "1,2,x", "2,3,y", "3,5,x"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is an empty file: its first line must name the columns"),
        (GOOD[:1], "has names of columns and no rows"),
        (
            ["a,b,kind", "1,2,x"],
            "has no column 'label': its columns are a, b, kind. `--label NAME`",
        ),
        (["a,a,label", "1,2,x"], "has two columns of the name 'a': every column needs"),
        (["label", "x"], "has no column besides label: there must be at least one feature"),
        ([*GOOD, "1,2"], "has 2 values in row 4 and 3 columns: the two must agree"),
        ([*GOOD, "1,,x"], "has no value in column 'b', row 4: fill it in, or leave out the row"),
        ([*GOOD, "1,NaN,x"], "has no value in column 'b', row 4"),
        ([*GOOD, "Oslo,2,x"], "has 'Oslo' in column 'a', row 4: features must be numbers, so"),
        ([*GOOD, "1,inf,x"], "has 'inf' in column 'b', row 4: features must be finite"),
        ([*GOOD, "1,2, "], "has no label in row 4: every row needs one"),
        (["id,a,label", "p,1,x", "q,2,y", "p,3,y"], "has the id 'p' in rows 1 and 3: an id must"),
        (["id,a,label", "p,1,x", ",2,y"], "has no id in column 'id', row 2: every sample needs"),
        (["a,b,c,label", "1,2,3,x", "4,5,6,y"], "lacks the column 'c', unlike `clean --train"),
        (["a,label", "1,x", "4,y"], "has the column 'b', unlike `clean --train"),
        (["a,b,label", "7,8,x", "9,9,y"], "has 1 of the rows of `clean --train"),
    ],
)
def test_tables_that_are_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    (tmp_path / "train.csv").write_text("\n".join(lines))
    (tmp_path / "trusted.csv").write_text("a,b,label\n7,8,x\n8,9,y\n")
    with pytest.raises(ValueError, match=re.escape(message)):
        read_own(tmp_path / "train.csv", tmp_path / "trusted.csv")


def test_tables_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_bytes(b"a,label\n\xff\xfe,\x00\n")
    with pytest.raises(ValueError, match=r"train.csv` cannot be read as CSV \(.*UTF-8"):
        read_own(tmp_path / "train.csv", tmp_path / "train.csv")


def test_the_test_set_is_apart_from_both(tables: Path) -> None:
    for other in ("train", "trusted"):
        with pytest.raises(ValueError, match=f"{other}.csv` .* an error on samples that were"):
            read_own(
                tables / "train.csv",
                tables / "trusted.csv",
                tables / f"{other}.csv",
                id_column="name",
            )


def test_paths_and_options_that_do_not_fit(folders: Path, tables: Path) -> None:
    assert folders == tables  # one temporary folder has both
    train, trusted, table = folders / "train", folders / "trusted", folders / "train.csv"
    odd = folders / "train.parquet"
    odd.touch()
    cases = [
        ((folders / "none", trusted), {}, "none`: there is no such file or folder. Name a folder"),
        ((odd, trusted), {}, "is neither a folder of images nor a CSV file: the name of a CSV"),
        ((train, table), {}, "train.csv` is a CSV file and `clean --train"),
        ((train, trusted), {"label": "x"}, "`clean --label x` is for a CSV file; the label of an"),
        ((train, trusted), {"id_column": "x"}, "`clean --id x` is for a CSV file"),
        ((train, trusted), {"size": 0}, "`clean --size 0` must be at least 1: it is a number of"),
        ((table, table), {"size": 8}, "`clean --size 8` is for images: leave it out"),
        ((table, table), {"id_column": "no"}, "has no column 'no': its columns are name, a, b, c"),
        ((table, table), {"id_column": "label"}, "`clean --id label` is the column of the labels"),
    ]
    for paths, options, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            read_own(*paths, **options)  # type: ignore[arg-type]
