"""The documentation: Markdown pages, reference from docstrings, formulas without a network."""

import re
from typing import Any

from lightning_bilevel import __version__

project = "lightning-bilevel"
author = "the lightning-bilevel authors"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    # MathJax from the site itself, so that formulas show without a network
    "sphinx-mathjax-offline",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
nb_execution_mode = "off"  # notebooks have their outputs: docs/make_notebooks.py
nb_merge_streams = True

napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_ivar = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_inherit_docstrings = (
    False  # what Lightning says about its hooks is in its own documentation
)
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}

html_theme = "furo"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["width.css"]
html_title = f"lightning-bilevel {__version__}"


def escape_norms(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Escape norms such as |y - z|, which reStructuredText takes for substitutions.

    Formulas stay as they are.
    """
    formula = False
    for i, line in enumerate(lines):
        if line.strip():
            formula = line.lstrip().startswith(".. math::") or (formula and line.startswith(" "))
        if not formula:
            lines[i] = re.sub(r"(`[^`]*`)|(?<!\\)\|", lambda found: found[1] or r"\|", line)


def setup(app: Any) -> None:
    """Let Sphinx call it."""
    app.connect("autodoc-process-docstring", escape_norms)
