"""The command ``lightning-bilevel``."""

from __future__ import annotations

import errno
import signal
import sys
from argparse import ArgumentError

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_bilevel import compare
from lightning_bilevel.cli import BilevelCLI
from lightning_bilevel.messages import own_error, parsing_error

__all__ = ["main"]

# A folder that cannot be written to and a disk that is full are no errors of the program.
_OUTPUT = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR)


def main(args: list[str] | None = None) -> None:
    """Run the command line; what the user got wrong ends with its sentence, without a traceback."""
    given = sys.argv[1:] if args is None else args
    try:
        if given[:1] == ["compare"]:
            compare.main(given[1:])
        else:
            BilevelCLI(args)
    except SIGTERMException:
        sys.exit(128 + signal.SIGTERM)  # as a shell reports it; Lightning would end with 0
    except OSError as error:
        if error.errno not in _OUTPUT:
            raise
        print(f"lightning-bilevel: {error}", file=sys.stderr)
        sys.exit(1)
    except ArgumentError as error:
        print(f"lightning-bilevel: {parsing_error(str(error))}\nSee `lightning-bilevel fit --help`.", file=sys.stderr)
        sys.exit(2)
    except (ValueError, TypeError, RuntimeError, MisconfigurationException) as error:
        cause = error if isinstance(error, MisconfigurationException) else own_error(error)
        if cause is None:
            raise
        print(f"lightning-bilevel: {cause}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
