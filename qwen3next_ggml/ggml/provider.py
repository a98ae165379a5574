"""Where libggml comes from: opened once per process, proven to be one library, probed for the layout this package was built for (level 1).

Knows no tensors of the user's, no devices and no models.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from ..errors import BackendError
from . import layout
from ._native import ffi, lib

#: packages that carry libggml, and the folder inside them
PACKAGES = {"ggml_python": ("ggml", "lib"), "llama_cpp": ("llama_cpp", "lib"), "libggml": ("libggml", "")}
DEFAULT = "ggml_python"
OLDEST = (0, 15)

_open: Provider | None = None
_opened_by = os.getpid()
_opening = threading.Lock()


@dataclass(frozen=True)
class Provider:
    """The libggml this process runs on. `version` is what it says of itself."""

    name: str
    version: str
    commit: str
    folder: str


def provider(name: str | None = None) -> Provider:
    """Return the provider of this process, opening it on first use: `name`, else $QGRAPH_GGML, else ggml_python.

    `name` is one of PACKAGES or a directory with a ggml build. Raises BackendError when it cannot be used, or when another one is open.
    """
    global _open, _opened_by
    with _opening:
        if _open is None:
            _opened_by = os.getpid()
            _open = _load(name or os.environ.get("QGRAPH_GGML") or DEFAULT)
    if name is not None and name != _open.name and _folder_of(name) != _open.folder:
        raise BackendError(f"this process runs on ggml provider {_open.name}; {name} needs a process of its own")
    return _open


def failure() -> str:
    """Return why the last refused native call was refused, without the path of ggml's source file."""
    text = ffi.string(lib.q_failure()).decode(errors="replace")
    head, found, tail = text.partition(": GGML_ASSERT(")
    return f"ggml requires {tail.removesuffix(' failed').removesuffix(')')} ({os.path.basename(head)})" if found else text


def forked() -> bool:
    """Tell whether this process is the child of one that had opened ggml: its threads are not here."""
    return _opened_by != os.getpid()


def has(function: str) -> bool:
    """Tell whether the open provider has an optional function of ggml."""
    return lib.q_has(function.encode())


def _folder_of(name: str) -> str:
    if name in PACKAGES:
        package, inside = PACKAGES[name]
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise BackendError(f"ggml provider {name} is not installed: no Python package {package}")
        return os.path.realpath(os.path.join(spec.submodule_search_locations[0], inside))
    if os.path.isdir(name):
        return os.path.realpath(name)
    raise BackendError(f"no ggml provider {name}: it is neither a directory nor one of {', '.join(PACKAGES)}")


def _load(name: str) -> Provider:
    folder = _folder_of(name)
    _open_registry(name, folder)
    missing = [_entry(i) for i in range(lib.q_n_entries()) if lib.q_entry_required(i) and lib.q_entry_file(i) == ffi.NULL]
    if missing:
        raise BackendError(f"ggml provider {name} lacks {', '.join(missing[:5])}: it is too old or no ggml at all")
    version = ffi.string(lib.ggml_version()).decode()
    if tuple(int(part) for part in version.split("-")[0].split(".")[:2]) < OLDEST:
        raise BackendError(f"ggml provider {name} is ggml {version}, needed is {'.'.join(map(str, OLDEST))} or later")
    for i in range(lib.q_n_entries()):
        _prove_home(_entry(i), lib.q_entry_file(i), name, folder)
    lib.q_watch_aborts()
    lib.q_set_log_level(1 if os.environ.get("QGRAPH_VERBOSE") else 4)
    _load_backends(name, folder)
    layout.probe(name, version)
    commit = ffi.string(lib.ggml_commit()).decode() if has("ggml_commit") else ""
    return Provider(name=name, version=version, commit=commit, folder=folder)


def _entry(i: int) -> str:
    return ffi.string(lib.q_entry_name(i)).decode()


def _libraries(folder: str) -> list[Path]:
    """Return the ggml libraries of a folder, one name per file, the shortest name first: libggml.so before libggml-vulkan.so."""
    found = [path for pattern in ("*ggml*.so*", "*ggml*.dylib") for path in Path(folder).glob(pattern)]
    found.sort(key=lambda path: (len(path.name), path.name))
    return list({path.resolve(): path for path in reversed(found)}.values())[::-1]


def _open_registry(name: str, folder: str) -> None:
    """Open the library that exports the backend registry; its dependencies bring the rest."""
    reasons = []
    for path in _libraries(folder):
        if lib.q_open(os.fsencode(path)):
            return
        reasons.append(failure())
    raise BackendError(f"ggml provider {name} cannot be opened from {folder}: {'; '.join(reasons[:3]) or 'no ggml library there'}")


def _prove_home(what: str, file: object, name: str, folder: str) -> None:
    """Refuse when an address is not in the provider's own libraries."""
    if file == ffi.NULL:
        return
    path = os.path.realpath(os.fsdecode(ffi.string(file)))
    if not path.startswith(os.path.join(folder, "")):
        raise BackendError(
            f"{what} of ggml provider {name} comes from {path}, not from {folder}: "
            "another libggml is already loaded in this process, or the library's own search path leads there"
        )


def _load_backends(name: str, folder: str) -> None:
    """Register loadable backends when none is built in, then prove that the CPU code runs on the same base library."""
    if lib.ggml_backend_dev_count() == 0 and has("ggml_backend_load_all_from_path"):
        lib.ggml_backend_load_all_from_path(os.fsencode(folder))
    if lib.ggml_backend_dev_count() == 0:
        for path in _libraries(folder):
            lib.ggml_backend_load(os.fsencode(path))
    if lib.ggml_backend_dev_count() == 0:
        raise BackendError(f"ggml provider {name} has no device: no backend library in {folder}")
    for i in range(lib.ggml_backend_dev_count()):
        device = lib.ggml_backend_dev_get(i)
        if lib.ggml_backend_dev_type(device) == 0:
            buffer_type = lib.ggml_backend_dev_buffer_type(device)
            _prove_home("the CPU buffer type", lib.q_file_of(buffer_type), name, folder)
