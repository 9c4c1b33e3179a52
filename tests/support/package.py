"""The modules of the package, by name."""

from pathlib import Path
from types import ModuleType

import lightning_bilevel

PACKAGE = Path(lightning_bilevel.__file__).parent


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def public_names() -> list[str]:
    """What ``from lightning_bilevel import ...`` offers besides the modules of the package."""
    return sorted(
        name
        for name, value in vars(lightning_bilevel).items()
        if not name.startswith("_")
        and not (isinstance(value, ModuleType) and value.__name__.startswith("lightning_bilevel."))
    )
