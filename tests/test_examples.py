"""Every example runs, offline, in its short mode; and says what it says it does."""

from __future__ import annotations

import ast
import importlib
import runpy
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jupytext
import nbformat
import pytest
import torch
from matplotlib import pyplot as plt
from places import ROOT

EXAMPLES = ROOT / "examples"
NAMES = [
    "sine",
    "few_shot_glyphs",
    "regularisation",
    "imbalance",
    "simplex_weights",
    "mixture",
    "lora",
    "own_solver",
    "plain_loop",
    "fabric",
    "walkthrough",
]
# Those that are notebooks, too; docs/make_notebooks.py runs them.
NOTEBOOKS = ["walkthrough", "regularisation", "mixture"]


def run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the example returns; it leaves one figure in the current folder."""
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(f"examples.{name}")
    result = module.main(short=True)
    assert len(list(tmp_path.glob("*.png"))) == 1
    return result


def run_cells(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The names that a notebook has defined in the end; it leaves one figure."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--short"])
    defined = SimpleNamespace(**runpy.run_path(str(EXAMPLES / f"{name}.py")))
    plt.close("all")
    assert len(list(tmp_path.glob("*.png"))) == 1
    return defined


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_says_how_to_run_it(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert f"python examples/{name}.py" in text
    assert '"--short" in sys.argv' in text
    if name in NOTEBOOKS:
        assert len(text.splitlines()) <= 180
        assert text.startswith("# %% [markdown]\n# # ")
    else:
        assert len(text.splitlines()) <= 135
        assert ast.get_docstring(ast.parse(text))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_its_script_with_outputs(name: str) -> None:
    """`python docs/make_notebooks.py` makes them anew."""
    path = ROOT / "docs" / "notebooks" / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    script = jupytext.read(EXAMPLES / f"{name}.py")
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in script.cells
    ]
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert {output.output_type for output in outputs} == {"stream", "display_data"}
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    assert path.stat().st_size < 300_000


def test_no_notebook_is_left_without_its_script() -> None:
    made = [path.stem for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")]
    assert sorted(made) == sorted(NOTEBOOKS)


@pytest.mark.integration
def test_sine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = run("sine", tmp_path, monkeypatch)
    # the solution, up to what the relaxation gives away
    assert x == pytest.approx(2.356, abs=0.1)
    assert y == pytest.approx(4.356, abs=0.1)


@pytest.mark.integration
def test_few_shot_glyphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = run("few_shot_glyphs", tmp_path, monkeypatch)
    assert errors["after"] < errors["before"] - 0.05


@pytest.mark.integration
def test_own_solver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = run("own_solver", tmp_path, monkeypatch)
    assert errors["HeavyBall"] < 0.5 * errors["HeavyBall without momentum"]


@pytest.mark.integration
def test_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights tell right labels from wrong ones, which 0.5 would not."""
    found = run("plain_loop", tmp_path, monkeypatch)
    assert found["weights"] > 0.75
    assert found["trusted alone"] > 0.75


@pytest.mark.integration
def test_fabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("fabric", tmp_path, monkeypatch) > 0.75
    assert (tmp_path / "fabric.ckpt").is_file()


@pytest.mark.integration
def test_regularisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_cells("regularisation", tmp_path, monkeypatch).found
    assert found["one per feature"] < found["one coefficient"]
    assert found["shuffled"] > found["real"] + 0.1


@pytest.mark.integration
def test_imbalance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = run("imbalance", tmp_path, monkeypatch)
    assert errors["learned weights"] < errors["equal weights"] - 0.1


@pytest.mark.integration
def test_simplex_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("simplex_weights", tmp_path, monkeypatch)
    assert found["auroc"] > 0.65
    assert found["weight of the spoilt third"] < 0.3


@pytest.mark.integration
def test_walkthrough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = run_cells("walkthrough", tmp_path, monkeypatch).certificate
    assert certificate.stationarity < 0.1
    assert certificate.feasibility < 0.01
    assert certificate.own_multiplier


@pytest.mark.integration
def test_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A narrow model tells code from shuffled code as well.
    module = importlib.import_module("examples.mixture")
    monkeypatch.setattr(module, "Transformer", partial(module.Transformer, width=16))
    found = run("mixture", tmp_path, monkeypatch)
    assert list(found) == ["StreamingIVSP, 2 sources", "F2SA, 2 sources"]
    for shares in found.values():
        assert len(shares) == 60
        assert shares[0][1] == pytest.approx(0.5, abs=0.01)
        # AdamW moves each of the two logits by about its rate: 1/(1 + e^1.2) = 0.23.
        assert shares[-1][1] == pytest.approx(0.23, abs=0.06)
        assert sum(shares[-1]) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.integration
def test_lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first 16 characters of a row tell code from shuffled code as well.
    module = importlib.import_module("examples.lora")
    monkeypatch.setattr(module, "LENGTH", 16)
    found = run("lora", tmp_path, monkeypatch)
    # 40 steps of AdamW move each of the two logits by about 40 * 0.02: 1/(1 + e^-1.6) = 0.83.
    assert found["shares"]["code"] == pytest.approx(0.83, abs=0.1)
    kinds = {parameter.dtype: parameter.requires_grad for parameter in found["model"].parameters()}
    assert kinds == {torch.bfloat16: False, torch.float32: True}
    # A and B of rank 4 for the four linear maps of two blocks.
    sizes = [(64, 192), (64, 64), (64, 128), (128, 64)]
    assert found["trained"] == 2 * sum(4 * (a + b) for a, b in sizes)
