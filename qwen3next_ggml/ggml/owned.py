"""Owners of native memory: closed once, by whoever comes first, in an order that never frees what another still needs (level 1)."""

from __future__ import annotations

import weakref
from collections.abc import Callable


class Owned:
    """Something with `close()`, a context manager; freed by the collector or at exit, youngest first, when nobody closed it."""

    __slots__ = ("__weakref__", "_free")

    def _own(self, free: Callable[..., object], *kept: object, at_exit: bool = True) -> None:
        """Call `free(*kept)` once; the objects in `kept` live at least that long."""
        self._free = weakref.finalize(self, free, *kept)
        self._free.atexit = at_exit

    @property
    def closed(self) -> bool:
        return not self._free.alive

    def close(self) -> None:
        """Free the native memory. Closing twice does nothing."""
        self._free()

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
