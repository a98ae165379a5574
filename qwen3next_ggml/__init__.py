"""Qwen3-Next as a ggml graph in readable Python: `load` a GGUF file, decode tokens, read what you like.

Names are resolved on first use, so that importing the package opens no native library.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "load": "model",
    "Model": "model",
    "Session": "session",
    "GraphOptions": "graph.options",
    "Graph": "graph.own",
    "stream_generate": "generate",
    "Step": "generate",
    "SamplerParams": "sampler",
    "control_vector": "steering",
    "ControlVector": "steering",
    "write_toy": "toy",
    "write_trace": "trace",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
