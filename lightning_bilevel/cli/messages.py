"""Which errors are a sentence for the user, and which keep their traceback."""

from __future__ import annotations

import traceback
from pathlib import Path

import lightning

__all__ = ["own_error"]

# Code in these folders raises its errors on purpose, for the user.
_CHECKED = (Path(__file__).parents[1], Path(lightning.__file__).parent)


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
