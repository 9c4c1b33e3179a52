"""Sources of text of graded quality."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_bilevel.data.text import KINDS, TextSources


def test_the_sources_are_as_named() -> None:
    text = TextSources(KINDS, rows=50, seed=3)
    assert text.rows.shape == (50 * len(KINDS), 65)
    assert torch.equal(text.source, torch.arange(len(KINDS)).repeat_interleave(50))
    random = text.rows[text.source == KINDS.index("random")]
    assert int(random.min()) >= 32
    assert int(random.max()) < 127
    # Spaces are the commonest character of code and prose, and one of 95 of random rows.
    spaces = (text.rows == 32).float().view(len(KINDS), -1).mean(1)
    assert bool((spaces[:-1] > 0.1).all())
    assert float(spaces[-1]) < 0.03


def test_shuffling_moves_characters_within_their_row() -> None:
    text = TextSources(["code"], rows=20)
    rows = text.rows
    for share, fewest, most in ((0.0, 0, 0), (0.25, 1, 16), (1.0, 20, 65)):
        moved = text._shuffled(rows, share)
        assert torch.equal(moved.sort(1).values, rows.sort(1).values)
        differing = (moved != rows).sum(1)
        assert fewest <= int(differing.max()) <= most


def test_the_rows_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = TextSources(["code", "prose", "random"], rows=30, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = TextSources(["code", "prose", "random"], rows=30, seed=5)
    other = TextSources(["code", "prose", "random"], rows=30, seed=6)
    for name in ("rows", "trusted", "test"):
        assert torch.equal(getattr(first, name), getattr(again, name))
        assert not torch.equal(getattr(first, name), getattr(other, name))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"names": ["code", "poems"]}, r"must be of 'code', '1/8 shuffled'"),
        ({"names": []}, r"TextSources\(names=\[\]\)` must be of"),
        ({"names": ["code"], "rows": 0}, r"rows=0, length=64\)` must be at least 1 each"),
        ({"names": ["code"], "rows": 10**7}, r"asks for more text than comes with Python"),
    ],
)
def test_what_is_refused(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        TextSources(**arguments)


def test_a_python_without_its_sources_has_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").touch()
    monkeypatch.setattr("os.__file__", str(tmp_path / "os.pyc"))
    with pytest.raises(ValueError, match="there are 0 rows for each source"):
        TextSources(["code"], rows=1)
