"""The command ``lightning-bilevel``."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_bilevel import compare
from lightning_bilevel.cli import BilevelCLI
from lightning_bilevel.problem import BilevelError

__all__ = ["main"]


def main(args: list[str] | None = None) -> None:
    """Run the command line; what the user got wrong ends with its sentence, without a traceback."""
    given = sys.argv[1:] if args is None else args
    try:
        if given[:1] == ["compare"]:
            compare.main(given[1:])
        else:
            BilevelCLI(args)
    except (ValueError, TypeError, BilevelError, MisconfigurationException) as error:
        cause = _own_error(error)
        if cause is None:
            raise
        print(f"lightning-bilevel: {cause}", file=sys.stderr)
        sys.exit(1)


def _own_error(error: BaseException | None) -> BaseException | None:
    """Return the error of this package's own behind what was raised (jsonargparse wraps what a constructor raises).

    An error from a user's module is none of these: it keeps its traceback, which shows where it comes from.
    """
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        if frames and Path(frames[-1].filename).is_relative_to(Path(__file__).parent):
            return error
        error = error.__cause__ or error.__context__
    return None


if __name__ == "__main__":
    main()
