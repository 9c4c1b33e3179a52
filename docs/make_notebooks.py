"""Make the notebooks of docs/notebooks anew from the examples: run them, and keep what they print.

Run: python docs/make_notebooks.py [NAME ...]
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
OUT = HERE / "notebooks"


def names() -> list[str]:
    """The examples in jupytext's percent format."""
    scripts = sorted(EXAMPLES.glob("*.py"))
    return [path.stem for path in scripts if path.read_text().startswith("# %%")]


def make(name: str) -> None:
    """Run an example cell by cell in an empty folder, and write it with its outputs."""
    script = jupytext.read(EXAMPLES / f"{name}.py")
    notebook = nbformat.v4.new_notebook(cells=script.cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, resources={"metadata": {"path": folder}}, timeout=3600).execute()
    for number, cell in enumerate(notebook.cells):
        # Neither times nor random ids: what has not changed is the same file.
        cell.metadata = {}
        cell.id = f"{name}-{number}".replace("_", "-")
        if cell.cell_type == "code":
            # What Lightning says about the machine is on the standard error.
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
    nbformat.write(notebook, OUT / f"{name}.ipynb")


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(HERE.parent)
    OUT.mkdir(exist_ok=True)
    for name in sys.argv[1:] or names():
        print(f"{name} ...", flush=True)
        make(name)
