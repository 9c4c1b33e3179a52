"""Count code lines, without blanks, comments and docstrings: ``python tools/mass.py [FOLDER]``."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """Count the lines of a source that have code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            lines -= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(lines)


def mass(folder: Path) -> dict[Path, int]:
    """Return the code lines of each module below a folder."""
    return {path: code_lines(path.read_text("utf-8")) for path in sorted(folder.rglob("*.py"))}


def main(folder: str = "lightning_bilevel") -> None:
    """Print modules and code lines by folder, then the longest modules."""
    counted = mass(Path(folder))
    print(f"{sum(counted.values()):,} code lines in {len(counted)} modules of {folder}")
    by_folder: dict[Path, list[int]] = {}
    for path, count in counted.items():
        by_folder.setdefault(path.parent, []).append(count)
    for parent, counts in by_folder.items():
        print(f"{sum(counts):7,} {len(counts):4} {parent}")
    for path, count in sorted(counted.items(), key=lambda item: -item[1])[:8]:
        print(f"{count:7,}      {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
