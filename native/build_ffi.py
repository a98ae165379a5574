"""Write the C source of the native module: cdef/*.h for cffi, a function table and its wrappers, and the C files beside this one.

Run by CMake as `build_ffi.py OUTPUT.c`. The only description of a function is its line in cdef/; its first word says how it is called.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
HEADERS = ("ggml.h", "ggml-ops.h", "ggml-backend.h")
DECLARATION = re.compile(r"^(CORE|SLOW|OPTIONAL|OP)\s+([^;]+?)\b(ggml_\w+)\(([^;]*)\);", re.MULTILINE)

PREAMBLE = """
#include <Python.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

// cffi lets go of the GIL around every call. Building a graph is thousands of calls of a tenth of a microsecond, each of which
// would hand the interpreter to any busy thread: here only what takes long lets go of it, by itself.
#undef  Py_BEGIN_ALLOW_THREADS
#undef  Py_END_ALLOW_THREADS
#define Py_BEGIN_ALLOW_THREADS {
#define Py_END_ALLOW_THREADS   }
"""


@dataclass(frozen=True)
class Function:
    mark: str
    result: str
    name: str
    parameters: str

    @property
    def arguments(self) -> list[str]:
        """Return the parameter names; a parameter that is itself a function has its name behind a star."""
        if self.parameters == "void":
            return []
        flat = re.sub(r"\(\* (\w+)\)\([^)]*\)", r"\1", self.parameters)
        return [re.search(r"(\w+)$", part.strip()).group(1) for part in flat.split(",")]

    @property
    def plain_parameters(self) -> str:
        return self.parameters.replace("MAYBE ", "")

    @property
    def operands(self) -> list[str]:
        """Return the names of the tensors that must be there."""
        return re.findall(r"(?:^|, )ggml_tensor \* (\w+)", self.parameters)

    def slot(self) -> str:
        return f"    {self.result}(* {self.name})({self.plain_parameters});"

    def entry(self) -> str:
        required = "true" if self.mark in ("CORE", "SLOW") else "false"
        return f'    {{ "{self.name}", (void **) &T.{self.name}, {required} }}, \\'

    def wrapper(self, checks: set[str]) -> str:
        call = f"T.{self.name}({', '.join(self.arguments)})"
        head = f"static {self.result}{self.name}({self.plain_parameters}) {{\n"
        if self.mark == "OP":
            return head + self._guarded(call, checks) + "}\n"
        returns = "" if self.result.strip() == "void" else f"{self.result}result = "
        lines = [f"    {returns}{call};"]
        if self.mark == "SLOW":
            lines = ["    PyThreadState * python = PyEval_SaveThread();", *lines, "    PyEval_RestoreThread(python);"]
        if returns:
            lines.append("    return result;")
        return head + "\n".join(lines) + "\n}\n"

    def _guarded(self, call: str, checks: set[str]) -> str:
        conditions = ["open_context(ctx)", *(f'operand("{name}", {name})' for name in self.operands)]
        if f"check_{self.name}" in checks:
            conditions.append(f"check_{self.name}({', '.join(self.arguments[1:])})")
        return (
            f'    if (!T.{self.name}) {{\n        refuse("this ggml has no {self.name}");\n        return NULL;\n    }}\n'
            f"    if (!({' && '.join(conditions)})) {{\n        return NULL;\n    }}\n"
            f"    ggml_tensor * volatile made = NULL;\n    GUARDED(made = {call});\n    return made;\n"
        )


def read(name: str) -> str:
    return (HERE / name).read_text()


def functions(headers: str) -> list[Function]:
    flat = [(mark, result, name, " ".join(parameters.split())) for mark, result, name, parameters in DECLARATION.findall(headers)]
    return [Function(*parts) for parts in flat]


def main(output: str) -> None:
    headers = "\n".join(read(f"cdef/{name}") for name in HEADERS)
    native = read("cdef/native.h")
    found = functions(headers)
    checks = set(re.findall(r"\b(check_ggml_\w+)\b", read("checks.c")))
    types = DECLARATION.sub("", headers)
    structs = "\n".join(re.findall(r"^#define .*?$|^struct \w+ \{.*?^\};", native, re.MULTILINE | re.DOTALL))

    plain = [f.wrapper(checks) for f in found if f.mark != "OP"]
    ops = [f.wrapper(checks) for f in found if f.mark == "OP"]
    source = "\n".join(
        [
            PREAMBLE, types, structs,
            "static struct table {", *(f.slot() for f in found), "} T;\n",
            "#define TABLE_ENTRIES \\", *(f.entry() for f in found), "",
            read("table.c"), *plain, read("guard.c"), read("checks.c"), *ops,
            read("build.c"), read("support.c"), read("step.c"),
        ]
    )  # fmt: skip

    ffi = FFI()
    ffi.cdef(re.sub(r"^(CORE|SLOW|OPTIONAL|OP)\s+", "", headers, flags=re.MULTILINE).replace("MAYBE ", ""))
    ffi.cdef(native)
    ffi.set_source("qwen3next_ggml.ggml._native", source)
    ffi.emit_c_code(output)


if __name__ == "__main__":
    main(sys.argv[1])
