"""Where libggml comes from: found, proven, refused. One provider per process, so most of this runs in children."""

import ast
import importlib.util
import os
import pathlib
import re
import shutil

import pytest

from qwen3next_ggml import ggml
from qwen3next_ggml.errors import BackendError
from tests.kit import run_python

ROOT = pathlib.Path(__file__).parents[2]
SAY = "from qwen3next_ggml import ggml; p = ggml.provider(); print(p.name, p.version, p.folder, [d.name for d in ggml.devices()])"
RUN = """
from qwen3next_ggml import ggml
import numpy as np
backend = ggml.device("CPU").init()
context = ggml.Context(8, graph_size=8)
g = ggml.Ops(context)
x = g.set_input(context.new_tensor(ggml.types.F32, 8))
y = g.set_output(g.add(x, x))
graph = ggml.Graph(context, 8)
graph.expand(y)
allocator = ggml.GraphAllocator(backend.buffer_type)
allocator.alloc(graph)
x.set(np.arange(8, dtype=np.float32))
backend.compute(graph)
print(y.get().sum())
"""


@pytest.fixture
def copied(tmp_path):
    """Copy the provider's libraries into a folder with a blank and an umlaut in its name."""
    folder = tmp_path / "mein Ördner"
    folder.mkdir()
    for path in pathlib.Path(ggml.provider().folder).glob("libggml*"):
        shutil.copy(path, folder)
    return folder


def test_this_process_runs_on_the_one_asked_for():
    provider = ggml.provider()
    assert provider.name == (os.environ.get("QGRAPH_GGML") or "ggml_python")
    assert tuple(map(int, provider.version.split(".")[:2])) >= (0, 15)
    assert ggml.provider(provider.name) is ggml.provider(provider.folder) is provider


def test_another_one_needs_another_process(copied):
    other = "llama_cpp" if ggml.provider().name == "ggml_python" else "ggml_python"
    for name in (other, str(copied)):
        with pytest.raises(BackendError, match="needs a process of its own"):
            ggml.provider(name)


@pytest.mark.parametrize("name, words", [("no_such_thing", "neither a directory nor one of"), ("/tmp", "no ggml library there")])
def test_one_that_is_not_there(name, words):
    done = run_python("from qwen3next_ggml.ggml import provider; provider()", env={"QGRAPH_GGML": name})
    assert done.returncode == 1 and words in done.stderr.splitlines()[-1]


def test_any_directory_under_any_name(copied, tmp_path):
    registry = next(path for path in sorted(copied.iterdir()) if path.name.startswith("libggml.so"))
    for path in copied.glob("libggml.so*"):
        if path != registry:
            path.unlink()
    registry.rename(copied / "libggml.vulkan.v0.5.0.so")
    env = {"QGRAPH_GGML": str(copied), "PYTHONPATH": str(ROOT)}
    env.update({name: "" for name in ("LD_LIBRARY_PATH",)})
    done = run_python(f"import os; os.chdir({str(tmp_path)!r})\n{RUN}\nprint(ggml.provider().folder)", env=env)
    assert done.stdout.split("\n")[:2] == ["56.0", str(copied)], done.stderr


def test_a_library_that_is_no_library(copied):
    for path in copied.iterdir():
        path.write_bytes(b"\x7fELF" + bytes(60))
    done = run_python(SAY, env={"QGRAPH_GGML": str(copied)})
    assert done.returncode == 1 and "cannot be opened from" in done.stderr.splitlines()[-1]


def test_another_libggml_loaded_first_does_not_get_in(copied):
    """Its symbols are global and its file names equal: either ours are used, or a sentence says that they cannot be."""
    first = "\n".join(
        f"ctypes.CDLL({str(path)!r}, ctypes.RTLD_GLOBAL)"
        for key in ("base", "cpu", "")
        for path in [sorted(copied.glob(f"libggml{'-' if key else ''}{key}.so*"))[-1]]
    )
    done = run_python(f"import ctypes\n{first}\n{RUN}")
    if done.returncode:
        assert "another libggml is already loaded in this process" in done.stderr.splitlines()[-1]
    else:
        assert done.stdout.strip() == "56.0"


def test_ggml_python_imported_first_is_the_same_library():
    done = run_python("import ggml as other\n" + RUN + "print(other.ggml_nelements(other.ctypes.cast(y.ptr, other.ctypes.POINTER(other.ggml_tensor))))")
    if (os.environ.get("QGRAPH_GGML") or "ggml_python") == "ggml_python":
        assert done.stdout.split() == ["56.0", "8"], done.stderr
    else:
        assert done.stdout.split()[:1] == ["56.0"] or "already loaded" in done.stderr


def test_without_the_native_module_the_import_says_so():
    block = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.endswith("ggml._native"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Blocked())
import qwen3next_ggml.ggml
"""
    done = run_python(block)
    assert done.returncode == 1
    assert re.search(r"^ImportError: .*native module is not built.*pip install", done.stderr.splitlines()[-1])


@pytest.mark.parametrize(
    "lie, named",
    [
        ("ggml_tensor_overhead=lambda: lib.ggml_tensor_overhead() + 8", "size"),
        ("ggml_set_name=lambda t, name: t", "name"),
        ("ggml_set_input=lambda t: None", "flags"),
        ("ggml_scale=lambda ctx, a, s: lib.ggml_scale(ctx, a, s + 1)", "op_params"),
        ("ggml_view_1d=lambda ctx, a, n, offset: lib.ggml_view_1d(ctx, a, n, offset + 2)", "view_offs, data"),
        ("ggml_get_type_traits=lambda t: lib.ggml_get_type_traits(t + 1)", "type table"),
    ],
)
def test_another_layout_is_refused_by_field(lie, named):
    code = f"""
from types import SimpleNamespace
from qwen3next_ggml.ggml import layout
lib = layout.lib
class Other(SimpleNamespace):
    def __getattr__(self, name):
        return getattr(lib, name)
layout.lib = Other({lie})
from qwen3next_ggml import ggml
ggml.provider()
"""
    done = run_python(code)
    assert done.returncode == 1
    assert re.search(rf"BackendError: ggml provider .* lays out ggml_tensor differently: {named};", done.stderr.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("verbose", [False, True])
def test_what_ggml_says_is_shown_on_request_only(verbose):
    """A warning of ggml's own: there is no room for a fourth tensor."""
    code = """
from qwen3next_ggml import ggml
context = ggml.Context(3)
try:
    for _ in range(4):
        context.new_tensor(ggml.types.F32, 1)
except Exception as error:
    print(error)
"""
    done = run_python(code, env={"QGRAPH_VERBOSE": "1" if verbose else ""})
    assert "made for 3 tensors" in done.stdout
    assert ("not enough space" in done.stderr) == verbose


# the declarations


ALIASES = {
    "ggml_backend_t": "ggml_backend *", "ggml_backend_buffer_t": "ggml_backend_buffer *", "ggml_backend_buffer_type_t": "ggml_backend_buffer_type *",
    "ggml_backend_dev_t": "ggml_backend_device *", "ggml_backend_reg_t": "ggml_backend_reg *", "ggml_backend_sched_t": "ggml_backend_sched *",
    "ggml_gallocr_t": "ggml_gallocr *",
}  # fmt: skip


def kinds(text):
    """Return result and parameter types of a C declaration, spelled one way: no names, no struct, enums as int, arrays as pointers."""
    result, parameters = re.match(r"(.*?)\bggml_\w+\s*\((.*)\)", text, re.DOTALL).groups()
    flat = re.sub(r"\([^()]*\)", "", re.sub(r"\(\*\s*\w*\)", "FUNCTION", parameters))
    return [kind(result + " x"), *(kind(part) for part in flat.split(",") if part.strip() not in ("", "void"))]


def kind(parameter):
    if "callback" in parameter or "FUNCTION" in parameter:
        return "function"
    parameter = re.sub(r"\b(GGML_API|GGML_BACKEND_API|GGML_CALL|struct|const|MAYBE)\b", "", re.sub(r"enum\s+\w+", "int", parameter)).strip()
    stars = parameter.count("*") + parameter.count("[")
    words = re.sub(r"\[.*\]", "", parameter).replace("*", " ").split()
    base = ALIASES.get(words[0], words[0])
    return f"{base}{'*' * stars}".replace(" ", "")


def bound():
    headers = "\n".join((ROOT / "native" / "cdef" / name).read_text() for name in ("ggml.h", "ggml-ops.h", "ggml-backend.h"))
    found = re.findall(r"^(?:CORE|SLOW|OPTIONAL|OP)\s+([^;]+?\b(ggml_\w+)\([^;]*\));", headers, re.MULTILINE)
    return {name: text for text, name in found}


def upstream():
    """Return the declarations of ggml 0.15.3 that ggml-python quotes above each of its functions."""
    source = pathlib.Path(importlib.util.find_spec("ggml").submodule_search_locations[0], "ggml.py").read_text()
    quoted = re.findall(r"^# (.*?)\n(?=@ggml_function\(\s*\"(\w+)\")", source, re.MULTILINE | re.DOTALL)
    found = {}
    for text, name in quoted:
        code = re.sub(r"\s*//[^\n]*", "", re.sub(r"\n# ?", "\n", text))
        # a comma is missing at the end of one quoted line
        code = re.sub(r"(\w)\n(?=\s*\w)", r"\1,\n", code[code.rfind("GGML_API") :])
        if re.search(rf"{name}\s*\(", code):
            found[name] = code
    return found


def test_every_bound_signature_is_upstreams():
    theirs = upstream()
    ours = {name: text for name, text in bound().items() if name in theirs}
    assert bound().keys() - ours.keys() == {"ggml_set_abort_callback"}
    wrong = {name: (kinds(text), kinds(theirs[name])) for name, text in ours.items() if kinds(text) != kinds(theirs[name])}
    assert wrong == {}


@pytest.mark.parametrize(
    "text, other",
    [
        ("ggml_tensor * ggml_add(ggml_context * ctx, ggml_tensor * a)", "ggml_tensor * ggml_add(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b)"),
        ("void ggml_f(int64_t n)", "void ggml_f(int n)"),
        ("void ggml_f(size_t n)", "void * ggml_f(size_t n)"),
    ],
)
def test_a_drifted_signature_is_seen(text, other):
    assert kinds(text) != kinds(other)


def test_every_method_stands_for_a_bound_function():
    trees = [ast.parse(path.read_text()) for path in (ROOT / "qwen3next_ggml/ggml").glob("ops*.py")]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    assert {cls.name for cls in classes} == {cls.__name__ for cls in ggml.Ops.__mro__[:-1]}
    methods = {node.name for cls in classes for node in cls.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
    # `into` gives a node another place, which ggml has no function for
    assert methods - {name.removeprefix("ggml_") for name in bound()} == {"into"}
    assert len(methods) > 70
