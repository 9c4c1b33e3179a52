"""The command ``lightning-bilevel``."""

from __future__ import annotations

import sys

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_bilevel import compare
from lightning_bilevel.cli import BilevelCLI, own_error
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
        cause = own_error(error)
        if cause is None:
            raise
        print(f"lightning-bilevel: {cause}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
