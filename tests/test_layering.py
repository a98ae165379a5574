"""Imports go one way: a module imports lower levels and its own package only, and one package speaks C."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = "qwen3next_ggml"
LEVELS = {
    "errors": 0, "machine": 0, "reference": 0, "ggml": 1, "gguf_file": 2, "batch": 2, "array_file": 2, "hparams": 3, "tokenizer": 3, "chat": 3, "tensors": 4,
    "graph": 5, "models": 6, "memory": 6, "executor": 5, "graph_cache": 6, "probes": 7, "graph_view": 7, "geometry": 10, "history": 7, "drafter": 7, "one_token": 7, "decoder": 7, "session_file": 7, "session": 8, "model": 9, "steering": 9, "surgery": 5,
    "sampler": 10, "planner": 9, "speculative": 10, "generate": 11, "parity": 11, "perplexity": 11, "trace": 10, "profile": 11, "toy": 11, "cli": 12, "__main__": 13, "__init__": 13,
}  # fmt: skip
C_NAMES = {"ffi", "lib", "NULL"}
C_MODULES = {"cffi", "ctypes", "_cffi_backend", "llama_cpp", "ggml"}
# the two places that find a module by name: lazy public names, and an architecture's file
FINDERS = {"__init__.py", "models/__init__.py"}


def sources():
    folder = ROOT / PACKAGE
    return {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*.py"))}


def top_of(path):
    return path.split("/")[0].removesuffix(".py")


def imports(path, tree, names):
    """Yield (line, first component inside the package or None, first component outside or None) of every import, nested ones too."""
    here = [PACKAGE, *path.removesuffix(".py").split("/")][:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            # `from . import x` names a module, or something the package itself defines
            from_root = base == [PACKAGE]
            targets = [[*base, a.name if a.name in names else "__init__"] for a in node.names] if from_root else [base]
        else:
            continue
        for target in targets:
            inside = target[0] == PACKAGE
            yield node.lineno, (target[1] if target[1:] else "__init__") if inside else None, None if inside else target[0]


def problems(files):
    """Return one sentence per import, name or docstring that breaks the layers."""
    names = {top_of(path) for path in files}
    found = [f"{name}: not in the table of levels" for name in sorted(names - LEVELS.keys())]
    for path, source in files.items():
        top, tree = top_of(path), ast.parse(source)
        if top not in LEVELS:
            continue
        for line, inside, outside in imports(path, tree, names):
            at = f"{path}:{line}"
            allowed = inside in (None, top, "errors") or LEVELS.get(inside, 99) < LEVELS[top]
            if not allowed:
                found.append(f"{at}: {top} (level {LEVELS[top]}) imports {inside} (level {LEVELS.get(inside, 'unknown')})")
            if outside in C_MODULES and top != "ggml":
                found.append(f"{at}: imports {outside} outside ggml/")
        for node in ast.walk(tree):
            name = getattr(node, "id", getattr(node, "attr", None))
            if name in C_NAMES and top != "ggml":
                found.append(f"{path}:{node.lineno}: {name} outside ggml/")
            if name in ("import_module", "__import__") and path not in FINDERS:
                found.append(f"{path}:{node.lineno}: {name} hides an import")
        said = re.search(r"\(level (\d+)\)", ast.get_docstring(tree) or "")
        if said and int(said[1]) != LEVELS[top]:
            found.append(f"{path}: says level {said[1]}, the table says {LEVELS[top]}")
    return found


def test_layers_hold():
    assert problems(sources()) == []


@pytest.mark.parametrize(
    "path, line, said",
    [
        ("batch.py", "from .session import Session", "batch (level 2) imports session (level 8)"),
        ("graph/ffn.py", "from ..memory.hybrid import Plan", "graph (level 5) imports memory (level 6)"),
        ("memory/recurrent.py", "from .. import models", "memory (level 6) imports models (level 6)"),
        ("reference/kit.py", "import qwen3next_ggml.ggml", "reference (level 0) imports ggml (level 1)"),
        ("errors.py", "def f():\n    from qwen3next_ggml import load", "errors (level 0) imports __init__ (level 13)"),
        ("hparams.py", "def f():\n    if True:\n        import qwen3next_ggml.tensors as t", "imports tensors (level 4)"),
        ("tensors.py", "from cffi import FFI", "imports cffi outside ggml/"),
        ("tensors.py", "import ggml.utils", "imports ggml outside ggml/"),
        ("session.py", "def f(x):\n    return x.lib.ggml_add", "lib outside ggml/"),
        ("session.py", "p = ffi.new('int *')", "ffi outside ggml/"),
        ("session.py", "from importlib import import_module\nimport_module('x')", "import_module hides an import"),
        ("surprise.py", "", "surprise: not in the table of levels"),
        ("batch.py", '"""Cut batches (level 3)."""', "says level 3, the table says 2"),
    ],
)
def test_a_breach_is_seen(path, line, said):
    files = {"__init__.py": "", "errors.py": "", "session.py": "", "models/__init__.py": "", "tensors.py": ""}
    assert any(said in problem for problem in problems(files | {path: line}))
