"""One file per architecture, found by its file name (level 6).

A file named like `general.architecture`, with dashes as underscores, is the whole registration.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from ..errors import UnsupportedModelError


def supported() -> list[str]:
    """List the architectures there is a file for."""
    return sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))


def find(arch: str) -> ModuleType:
    """Return the module of an architecture; UnsupportedModelError lists the ones that exist.

    A mistake inside an existing file is shown as it is.
    """
    name = arch.replace("-", "_")
    if name not in supported():
        shown = repr(arch) if len(arch) <= 40 else f"{arch[:40]!r}… ({len(arch)} characters)"
        raise UnsupportedModelError(f"no graph for architecture {shown}, supported: {', '.join(supported())}")
    return importlib.import_module(f".{name}", __name__)
