"""Compile a method signature into a direct call of the guarded C function of the same name, with a readable error (level 1)."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from functools import lru_cache

from ..errors import GraphError
from ._native import ffi, lib
from .tensor import Context, Tensor

_BODY = """
def {name}({signature}):
    try:
        p = _call({arguments})
        if p:
            return _Tensor(p, self.context)
    except _MISUSE as error:
        raise _misused(self.context, "{name}", _names, ({values},), error) from None
    raise _refused(self.context, "{name}", _names, ({values},))
"""


def op(stub: Callable) -> Callable:
    """Compile a method that calls `ggml_<name>`: its signature gives names and defaults, the C declaration says what each argument is."""
    return compile_op(stub, "ggml_" + stub.__name__)


def unary(name: str, text: str) -> Callable:
    """Make the method of an op with one operand and no parameters."""

    def stub(self, a: Tensor) -> Tensor: ...

    stub.__name__, stub.__qualname__, stub.__doc__ = name, f"Ops.{name}", text
    return op(stub)


def compile_op(stub: Callable, function: str) -> Callable:
    call = getattr(lib, function)
    _, *parameters = inspect.signature(stub).parameters.values()
    _, *kinds = ffi.typeof(call).args
    if len(parameters) != len(kinds):
        raise TypeError(f"{function} takes {len(kinds)} arguments, the method has {len(parameters)}")
    names = [parameter.name for parameter in parameters]
    arguments = [_argument(parameter, kind.cname) for parameter, kind in zip(parameters, kinds, strict=True)]
    defaults = [f"{p.name}={p.default!r}" if p.default is not p.empty else p.name for p in parameters]
    source = _BODY.format(
        name=stub.__name__, signature=", ".join(["self", *defaults]), arguments=", ".join(["self._p", *arguments]), values=", ".join(names)
    )
    scope = _SCOPE | {"_call": call, "_names": names}
    exec(compile(source, f"<ggml op {stub.__name__}>", "exec"), scope)
    method = scope[stub.__name__]
    method.__doc__, method.__qualname__, method.__module__ = stub.__doc__, stub.__qualname__, stub.__module__
    method.__annotations__ = stub.__annotations__
    return method


def _argument(parameter: inspect.Parameter, c_type: str) -> str:
    name = parameter.name
    if c_type == "struct ggml_tensor *":
        return f"_NULL if {name} is None else {name}._p" if "None" in str(parameter.annotation) else f"{name}._p"
    return f"{name}.id" if name == "type" else name


def _refused(context: Context, name: str, names: list[str], values: tuple) -> GraphError:
    """Compose the error of a call that ggml or a check refused."""
    return GraphError(f"{_spell(name, names, values)}: {context.why()}{caller()}")


def _misused(context: Context, name: str, names: list[str], values: tuple, error: Exception) -> GraphError:
    """Compose the error of arguments that cannot be handed to C at all."""
    missing = [n for n, v in zip(names, values, strict=True) if v is None]
    reason = f"{', '.join(missing)} is None" if missing and isinstance(error, AttributeError) else str(error)
    return GraphError(f"{_spell(name, names, values)}: {reason}{caller()}")


def _spell(name: str, names: list[str], values: tuple) -> str:
    """Return op(argument, …) with the type and shape of each tensor."""
    shown = (f"{n} {v.described}" if isinstance(v, Tensor) else f"{n}={v!r}" for n, v in zip(names, values, strict=True))
    return f"{name}({', '.join(shown)})"


@lru_cache(maxsize=4096)
def encoded(name: str) -> bytes:
    """Return a name as C wants it: a graph gives the same few to thousands of nodes."""
    return name.encode()


def caller() -> str:
    """Return where the op was called: the innermost frame outside this package."""
    here = os.path.dirname(__file__)
    frame = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith((here, "<ggml op")):
        frame = frame.f_back
    return f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})" if frame else ""


_SCOPE = {
    "_Tensor": Tensor, "_NULL": ffi.NULL, "_MISUSE": (AttributeError, TypeError, OverflowError, ValueError), "_refused": _refused, "_misused": _misused,
}  # fmt: skip
