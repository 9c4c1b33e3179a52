"""What the command line says to a user who got something wrong: a sentence that names the key, and
no traceback.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import lightning

__all__ = ["own_error", "parsing_error"]

# Errors that were raised by the code in these folders were raised on purpose.
_CHECKED = (Path(__file__).parents[1], Path(lightning.__file__).parent)
# What jsonargparse says around the reason, line by line: the types it tried, the whole value that
# it was given.
_AROUND = (
    "Does not validate against",
    "Subtypes:",
    "Errors:",
    "Expected a <class 'NoneType'>",
    "Problem with given class_path",
    "Not a valid subclass of",
    "Subclass types expect",
    "a class path",
    "a dict with",
)
_REASONS = 3


def own_error(error: BaseException | None) -> BaseException | None:
    """Return the error of this package's or Lightning's own behind what was raised.

    jsonargparse wraps what a constructor raises. An error from a user's module is none of these: it
    keeps its traceback, which shows where it comes from.
    """
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        if frames and any(Path(frames[-1].filename).is_relative_to(folder) for folder in _CHECKED):
            return error
        error = error.__cause__ or error.__context__
    return None


def parsing_error(message: str) -> str:
    """Return the key and the reason from what jsonargparse has to say about a value, which may be a
    page.

    Example:
        >>> parsing_error('''Parser key "model":
        ...   Does not validate against any of the Union subtypes
        ...   Errors:
        ...     - Problem with given class_path 'SineProblem':
        ...         Parser key "n":
        ...           Expected a <class 'int'>. Got value: many
        ...     - Expected a <class 'NoneType'>
        ...   Given value type: <class 'dict'>
        ...   Given value: {'class_path': 'SineProblem', 'init_args': {'n': 'many'}}''')
        'model.n: expected int, got many'
    """
    keys = re.findall(r'Parser key "([^"]+)"', message)
    reasons = []
    for line in re.split(r"\n\s*Given value", message)[0].splitlines():
        # A callable's own error follows its type, on the same line; the value that it was given
        # follows the error.
        text = re.sub(
            r"^Type .* expects a function or a callable class: ",
            "",
            line.strip().removeprefix("- "),
        )
        text = re.sub(r'^Parser key "[^"]+":', "", text).strip()
        text = re.sub(r"\.? Got value: (Namespace\(|\{).*", "", text)
        if text and not text.startswith(_AROUND):
            reasons.append(_plain(text))
    kept = list(dict.fromkeys(reasons))
    # A class may also be given as the path of a file that has its arguments, which is hardly what
    # was meant.
    kept = [reason for reason in kept if not reason.startswith("Expected a path but")] or kept
    # Where a number may also be None, the value stands apart from the reason.
    given = re.search(
        r"Given value: (?!Namespace\(|NestedArg\(|\{)(.+?)(?:\. Got value|\n|$)", message
    )
    if given and len(kept) == 1 and not re.search(", got |there is no class", kept[0]):
        kept = [f"{kept[0]}, got {given[1]}"]
    if not kept:
        kept = [
            " ".join(message.split())
        ]  # another version of jsonargparse says it in other words: better those than none
    told = "; ".join(kept[:_REASONS]) + ("; ..." if len(kept) > _REASONS else "")
    return f"{'.'.join(keys)}: {told}" if keys else told


def _plain(text: str) -> str:
    text = re.sub(r"Expected an? <class '([\w.]+)'>", r"expected \1", text)
    text = re.sub(r"Expected an? typing\.Literal\[(.*?)\]", r"expected one of \1", text)
    text = re.sub(
        r"Expected a dot import path string: (.*)",
        r"there is no class \1: write a known name or a dotted path",
        text,
    )
    text = re.sub(
        r"^Import path(?: (\S+))? does not correspond to a subclass of BilevelMixin",
        _no_bilevel_module,
        text,
    )
    text = re.sub(r"argument subcommand: invalid choice: (\S+).*", r"there is no command \1", text)
    return re.sub(r"\. Got value: ", ", got ", text)


def _no_bilevel_module(found: re.Match[str]) -> str:
    rule = "expected a class that inherits from BilevelModule, or from BilevelMixin and LightningModule"
    return f"{rule}, got {found[1]}" if found[1] else rule
