"""The command ``lightning-bilevel``."""

from __future__ import annotations

import errno
import signal
import sys
import warnings
from argparse import ArgumentError

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_bilevel.cli import catalogue, compare
from lightning_bilevel.cli.app import BilevelCLI
from lightning_bilevel.cli.messages import own_error, parsing_error
from lightning_bilevel.version import __version__

__all__ = ["main"]

OVERVIEW = """\
lightning-bilevel: bilevel optimisation for PyTorch Lightning

  min over x, y of f(x, y)    such that y minimises g(x, .)

Try it (finds wrong labels among 600 digits; no download, half a minute):
  lightning-bilevel fit --config digits/ivsp_default

Commands:
  tasks      list the ready configs with the data and the time that they need
  fit        solve a problem: --config FILE, or the name of a ready config
  compare    run several methods on one task for the same time each
  certify    print the certificate of a checkpoint
  probe      print the constants that IVSP would choose for a config, and why
  validate, test, predict    as with any LightningCLI

Every command explains its options with --help. Any setting of a config can be
changed on the command line, and --print_config shows the result:
  lightning-bilevel fit --config synthetic/ivsp --model.n=10 --print_config

Your own module: --model my_package.MyModule (a BilevelModule, or a
LightningModule with BilevelMixin), or from Python with Trainer.fit.
--version prints the version.
"""

# An unwritable folder or a full disk is not a bug: these errors are printed without a traceback.
_OUTPUT = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR)


def main(args: list[str] | None = None) -> None:
    """Run the command line; a mistake of the user ends with one sentence, without a traceback."""
    if args is None:
        # Changed in place, because Lightning starts further processes with `sys.argv`.
        sys.argv[1:] = catalogue.with_ready_configs(sys.argv[1:])
    else:
        args = catalogue.with_ready_configs(args)
    given = sys.argv[1:] if args is None else args
    # Lightning's own, for its maintainers.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
    if given in ([], ["-h"], ["--help"]):
        print(OVERVIEW, end="")
        return
    if given == ["--version"]:
        print(f"lightning-bilevel {__version__}")
        return
    try:
        if given[:1] == ["tasks"]:
            catalogue.main(given[1:])
        elif given[:1] == ["compare"]:
            compare.main(given[1:])
        else:
            BilevelCLI(args)
    except SIGTERMException:
        sys.exit(128 + signal.SIGTERM)  # the exit code of shells; Lightning would exit with 0
    except OSError as error:
        if error.errno not in _OUTPUT:
            raise
        print(f"lightning-bilevel: {error}", file=sys.stderr)
        sys.exit(1)
    except ArgumentError as error:
        print(f"lightning-bilevel: {parsing_error(str(error))}", file=sys.stderr)
        print(_where_to_look(given[0], str(error)), file=sys.stderr)
        sys.exit(2)
    except (ValueError, TypeError, RuntimeError, MisconfigurationException) as error:
        cause = error if isinstance(error, MisconfigurationException) else own_error(error)
        if cause is None:
            raise
        print(f"lightning-bilevel: {cause}", file=sys.stderr)
        sys.exit(1)


def _where_to_look(command: str, error: str) -> str:
    if "File does not exist" in error:
        return "See `lightning-bilevel tasks`, which lists the ready configs."
    if command not in BilevelCLI.subcommands():
        return "See `lightning-bilevel --help`, which lists the commands."
    return f"See `lightning-bilevel {command} --help`."


if __name__ == "__main__":
    main()
