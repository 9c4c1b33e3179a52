"""Episodes: fixed, reproducible by index, of classes that do not overlap."""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image

from lightning_bilevel import (
    EpisodeData,
    Episodes,
    OmniglotEpisodes,
    TaskEpisodes,
)
from lightning_bilevel.data.episodes import draw_episode
from lightning_bilevel.data.glyphs import draw_glyphs


class Numbered(EpisodeData):
    """An image says of which class and example it is."""

    def load(self) -> torch.Tensor:
        classes = torch.arange(40).view(-1, 1, 1, 1, 1)
        examples = torch.arange(6).view(1, -1, 1, 1, 1)
        return (100 * classes + examples).expand(40, 6, 1, 2, 2).float()


def numbered(**options: Any) -> Numbered:
    sizes = {"ways": 4, "shots": 2, "queries": 3, "n_train": 9, "n_validation": 5, "n_test": 6}
    data = Numbered(**{**sizes, "train_classes": 20, "validation_classes": 10, **options})
    data.setup()
    return data


def classes(episodes: Episodes) -> set[int]:
    return set(
        (torch.cat([episodes.support, episodes.query], 1)[..., 0, 0, 0] // 100)
        .int()
        .flatten()
        .tolist()
    )


def splits(data: EpisodeData) -> dict[str, Episodes]:
    train = Episodes(*data.lower[:2], *data.upper[:2])
    return {"train": train, "validation": data.validation, "test": data.test}


def test_fresh_episodes_are_of_training_classes_and_do_not_repeat() -> None:
    data = numbered()
    first, second = data.fresh(range(3)), data.fresh(range(3, 6))
    assert first.support.shape == (3, 8, 1, 2, 2)
    training = classes(data.fresh(range(90)))
    assert training.isdisjoint(classes(data.validation) | classes(data.test))
    assert len(training) == 20
    for other in (second, splits(data)["train"], data.fresh(["b/0", "b/1", "b/2"])):
        assert not torch.equal(first.query, other.query[:3])
    again = numbered()
    assert torch.equal(again.fresh([0]).query, first.query[:1])
    assert torch.equal(again.fresh([1, 2]).query, first.query[1:])


def test_episodes_have_their_shape_and_never_an_image_twice() -> None:
    for name, episodes in splits(numbered()).items():
        count = {"train": 9, "validation": 5, "test": 6}[name]
        assert episodes.support.shape == (count, 8, 1, 2, 2)
        assert episodes.query.shape == (count, 12, 1, 2, 2)
        for support, support_labels, query, query_labels in zip(*episodes, strict=True):
            codes = torch.cat([support, query])[:, 0, 0, 0].int()
            labels = torch.cat([support_labels, query_labels])
            assert len(set(codes.tolist())) == 20
            # one class, one label
            assert len(set(zip((codes // 100).tolist(), labels.tolist(), strict=True))) == 4
            assert torch.equal(torch.bincount(support_labels), torch.full((4,), 2))
            assert torch.equal(torch.bincount(query_labels), torch.full((4,), 3))


def test_splits_share_no_class() -> None:
    found = [
        classes(episodes)
        for episodes in splits(numbered(n_train=200, n_validation=200, n_test=200)).values()
    ]
    assert [len(part) for part in found] == [20, 10, 10]
    assert len(set.union(*found)) == 40


def test_an_episode_depends_on_seed_split_and_index_alone() -> None:
    many, few = numbered(n_train=9), numbered(n_train=3, n_validation=1)
    assert torch.equal(many.lower[0][:3], few.lower[0])
    assert torch.equal(many.upper[0][:3], few.upper[0])
    assert torch.equal(many.test.query, few.test.query)
    other = numbered(seed=7)
    assert not torch.equal(other.lower[0], many.lower[0])
    assert classes(splits(other)["train"]) <= set(range(40))


def test_the_draw_is_the_same_on_every_machine() -> None:
    images = Numbered().load()
    support, *_ = draw_episode(images, 3, 1, 1, "42/train/0")
    assert support[:, 0, 0, 0].tolist() == [2300.0, 1404.0, 3405.0]


def test_levels_carry_the_number_of_each_episode() -> None:
    data = numbered()
    assert torch.equal(data.upper[2], torch.arange(9))
    assert torch.equal(data.lower[2], torch.arange(9))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ways": 0}, "`Numbered(ways=0)` must be at least 1."),
        ({"shots": 0}, "`Numbered(shots=0)` must be at least 1."),
        ({"n_test": 0}, "`Numbered(n_test=0)` must be at least 1."),
        (
            {"ways": 12},
            "`Numbered(train_classes=20, validation_classes=10, test_classes=None)` does not fit: "
            "there are 40, and each needs at least 12.",
        ),
        (
            {"train_classes": 30},
            "`Numbered(train_classes=30, validation_classes=10, test_classes=None)` does not fit: "
            "there are 40, and each needs at least 4.",
        ),
        (
            {"queries": 5},
            "`Numbered`: shots + queries are more than the 6 of a class.",
        ),
    ],
)
def test_sizes_that_the_data_do_not_have_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        numbered(**given)


def test_the_base_has_no_images() -> None:
    with pytest.raises(NotImplementedError, match=r"`EpisodeData` must define `load\(\)`"):
        EpisodeData().setup()


class TestTasks:
    def test_labels_may_be_any_integers_in_any_order(self) -> None:
        data, labels = torch.arange(6).view(6, 1, 1, 1).float(), torch.tensor([7, 3, 7, 3, 3, 7])
        support, support_labels, query, query_labels = Episodes.from_tasks(
            [(data, labels)], count=1, shots=1
        )
        assert support[0, :, 0, 0, 0].tolist() == [1.0, 0.0]
        assert support_labels.tolist() == [[0, 1]]
        assert query[0, :, 0, 0, 0].tolist() == [3.0, 4.0, 2.0, 5.0]
        assert query_labels.tolist() == [[0, 0, 1, 1]]

    def test_the_data_module_takes_them_as_they_are(self) -> None:
        parts = splits(numbered())
        data = TaskEpisodes(**parts)
        data.setup()
        assert (data.ways, data.shots, data.queries, data.n_train, data.image_shape) == (
            4,
            2,
            3,
            9,
            (1, 2, 2),
        )
        assert data.validation is parts["validation"]
        assert torch.equal(data.upper[0], parts["train"].query)

    @pytest.mark.parametrize(
        ("labels", "shots", "message"),
        [
            ([0, 0, 0, 1], 1, r"classes of \[3, 1\] examples"),
            ([0, 0, 1, 1], 2, "the same number, more than 2"),
        ],
    )
    def test_tasks_that_are_none_are_refused(
        self, labels: list[int], shots: int, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            Episodes.from_tasks([(torch.zeros(4, 1), torch.tensor(labels))], 1, shots)


class TestGlyphs:
    def test_a_class_looks_like_itself(self) -> None:
        images = draw_glyphs(30, 8)
        assert images.shape == (30, 8, 1, 28, 28)
        assert float(images.min()) >= 0
        assert float(images.max()) <= 1
        assert 0.03 < float(images.mean()) < 0.3
        # The nearest other drawing is of the same class far more often than by chance, and not
        # always.
        flat = torch.nn.functional.avg_pool2d(images.flatten(0, 1), 4).flatten(1)
        distance = torch.cdist(flat, flat).fill_diagonal_(torch.inf)
        labels = torch.arange(30).repeat_interleave(8)
        right = float((labels[distance.argmin(1)] == labels).float().mean())
        assert 0.5 < right < 1.0

    def test_a_character_depends_on_seed_and_number_alone(self) -> None:
        assert torch.equal(draw_glyphs(2, 3), draw_glyphs(5, 3)[:2])
        assert not torch.equal(draw_glyphs(2, 3), draw_glyphs(2, 3, seed=1))


class Tiny(OmniglotEpisodes):
    DRAWINGS = 3


CLASSES = {"images_background": 4, "images_evaluation": 3}


TINY = {"ways": 2, "shots": 1, "queries": 2, "n_train": 2, "n_validation": 2, "n_test": 2}
TINY |= {"train_classes": 3, "validation_classes": 2}


def drawing(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (105, 105), shade).save(buffer, "PNG")
    return buffer.getvalue()


def members(part: str, count: int) -> dict[str, bytes]:
    return {
        f"{part}/Alphabet/character{c:02}/{c:04}_{d}.png": drawing(10 * c + d)
        for c in range(count)
        for d in range(3)
    }


def archive(root: Path, part: str, content: dict[str, bytes]) -> Path:
    path = root / "omniglot-py" / f"{part}.zip"
    path.parent.mkdir(exist_ok=True, parents=True)
    with zipfile.ZipFile(path, "w") as file:
        for name, data in content.items():
            file.writestr(name, data)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for part, count in CLASSES.items():
        archive(tmp_path, part, members(part, count))
    return tmp_path


class TestOmniglot:
    def test_drawings_come_in_order_as_ink_on_paper(self, root: Path) -> None:
        data = Tiny(root=str(root), image_size=20, **TINY)
        data.prepare_data()
        images = data.load()
        assert images.shape == (7, 3, 1, 20, 20)
        shades = [10 * c + d for count in (4, 3) for c in range(count) for d in range(3)]
        assert torch.allclose(images[..., 0, 0, 0].flatten(), 1 - torch.tensor(shades) / 255)

    def test_archives_that_are_missing_or_not_whole_are_refused(self, root: Path) -> None:
        path = root / "omniglot-py" / "images_background.zip"
        whole = path.read_bytes()
        at = whole.index(b"IDAT")
        archive(root, path.stem, dict(list(members(path.stem, 3).items())[:-1]))
        incomplete = path.read_bytes()
        archive(root, path.stem, dict.fromkeys(members(path.stem, 4), b"no image"))
        for content, why in (
            (incomplete, "invalid for input of size"),
            (whole[:500], "File is not a zip file"),
            (path.read_bytes(), "cannot identify image"),
            (whole[:at] + b"0000" + whole[at + 4 :], "Bad CRC-32"),
            (None, "No such file"),
        ):
            path.unlink() if content is None else path.write_bytes(content)
            with pytest.raises(MisconfigurationException, match=why) as error:
                Tiny(root=str(root), **TINY).setup()
            assert "images_background.zip and images_evaluation.zip into" in str(error.value)
            assert "LIGHTNING_BILEVEL_DATA" in str(error.value)

    def test_a_failed_download_says_what_to_put_where(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def offline(*_: Any, **__: Any) -> None:
            raise OSError("no network")

        monkeypatch.setattr("torchvision.datasets.Omniglot", offline)
        with pytest.raises(MisconfigurationException) as error:
            Tiny(root=str(tmp_path / "none"), **TINY).prepare_data()
        for word in (
            "images_background.zip",
            "images_evaluation.zip",
            "LIGHTNING_BILEVEL_DATA",
            "`root`",
        ):
            assert word in str(error.value)
