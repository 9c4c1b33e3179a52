"""Every Python snippet of the README runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(SNIPPETS[number], f"README.md, snippet {number + 1}", "exec"), {"__name__": "readme"})
    assert "KKT stationarity" in capsys.readouterr().out


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) == 2
