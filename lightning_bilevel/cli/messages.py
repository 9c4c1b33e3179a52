"""Error messages of the command line: one sentence that names the setting, no traceback."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import lightning

__all__ = ["own_error", "parsing_error"]

# Code in these folders raises its errors on purpose, for the user.
_CHECKED = (Path(__file__).parents[1], Path(lightning.__file__).parent)
# Beginnings of jsonargparse's lines that do not give the reason: types it tried, whole values.
_NO_REASON = (
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
_MAX_REASONS = 3


def own_error(error: BaseException | None) -> BaseException | None:
    """Return the error of this package or Lightning behind an error, or None.

    jsonargparse wraps the errors of constructors. For an error in a user's module the result is
    None: it keeps its traceback, which shows where it comes from.
    """
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        if frames and any(Path(frames[-1].filename).is_relative_to(folder) for folder in _CHECKED):
            return error
        error = error.__cause__ or error.__context__
    return None


def parsing_error(message: str) -> str:
    """Return the key and the reason from jsonargparse's message, which may fill a page.

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
        text = line.strip().removeprefix("- ")
        # A line about a callable has its type, the error, and the value.
        text = re.sub(r"^Type .* expects a function or a callable class: ", "", text)
        text = re.sub(r'^Parser key "[^"]+":', "", text).strip()
        text = re.sub(r"\.? Got value: (Namespace\(|\{).*", "", text)
        if text and not text.startswith(_NO_REASON):
            reasons.append(_plain(text))
    kept = list(dict.fromkeys(reasons))
    # jsonargparse also accepts the path of a file in place of a class; the user hardly meant that.
    kept = [reason for reason in kept if not reason.startswith("Expected a path but")] or kept
    # If a number may also be None, jsonargparse prints the value apart from the reason.
    given = re.search(
        r"Given value: (?!Namespace\(|NestedArg\(|\{)(.+?)(?:\. Got value|\n|$)", message
    )
    if given and len(kept) == 1 and not re.search(", got |there is no class", kept[0]):
        kept = [f"{kept[0]}, got {given[1]}"]
    if not kept:
        # Another version of jsonargparse uses other words: show its whole message.
        kept = [" ".join(message.split())]
    sentence = "; ".join(kept[:_MAX_REASONS])
    if len(kept) > _MAX_REASONS:
        sentence += "; ..."
    return f"{'.'.join(keys)}: {sentence}" if keys else sentence


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
    rule = (
        "expected a class that inherits from BilevelModule, or from BilevelMixin and "
        "LightningModule"
    )
    return f"{rule}, got {found[1]}" if found[1] else rule
