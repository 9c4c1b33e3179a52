"""lightning-bilevel: bilevel optimisation for PyTorch Lightning.

  min over x, y of f(x, y)    such that y minimises g(x, .)

Try it (finds wrong labels among 600 digits; no download, under a minute):
  lightning-bilevel fit --config digits/ivsp_default

Commands:
  tasks      list the ready configs with the data and the time that they need
  fit        solve a problem: --config FILE, or the name of a ready config
  compare    run several methods on one task for the same time each
  certify    print the certificate of a checkpoint
  probe      print the constants that IVSP would choose for a config, and why
  validate, test, predict    as with any LightningCLI

Every command explains its options with --help; --print_config shows a config
with all settings. --version prints the version.
"""

from __future__ import annotations

import signal
import sys
import traceback
import warnings
from argparse import ArgumentError
from pathlib import Path

import lightning
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_bilevel.cli import catalogue, compare
from lightning_bilevel.cli.app import BilevelCLI
from lightning_bilevel.version import __version__

# Raised by a user's module too, and then shown with their traceback.
_ANYBODYS = (ValueError, TypeError, RuntimeError)
# Code in these folders raises its errors on purpose, for the user.
_CHECKED = (Path(__file__).parent, Path(lightning.__file__).parent)


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


def main(args: list[str] | None = None) -> None:
    """Run the command line; a mistake of the user ends with its message, without a traceback."""
    given = catalogue.with_ready_configs(sys.argv[1:] if args is None else args)
    if args is None:
        sys.argv[1:] = given  # Lightning starts further processes with it
    # Lightning's own: for its maintainers, of arguments beside `sys.argv`, and that `certify` does
    # without the callbacks of the run.
    for message in (".*LeafSpec.*", "LightningCLI's args parameter", "Be aware that when using"):
        warnings.filterwarnings("ignore", message)
    if given in ([], ["-h"], ["--help"]):
        print(__doc__, end="")
        return
    if given == ["--version"]:
        print(f"lightning-bilevel {__version__}")
        return
    try:
        if given[0] in ("tasks", "compare"):
            {"tasks": catalogue.main, "compare": compare.main}[given[0]](given[1:])
        else:
            BilevelCLI(None if args is None else given)
    except SIGTERMException:
        sys.exit(128 + signal.SIGTERM)  # the exit code of shells; Lightning would exit with 0
    except (ArgumentError, OSError, MisconfigurationException, *_ANYBODYS) as error:
        cause = own_error(error) if isinstance(error, _ANYBODYS) else error
        if cause is None:
            raise
        parsing = isinstance(error, ArgumentError)
        hint = "\nSee `lightning-bilevel --help`." if parsing else ""
        print(f"lightning-bilevel: {cause}{hint}", file=sys.stderr)
        sys.exit(2 if parsing else 1)


if __name__ == "__main__":
    main()
