"""llama.cpp's low-level API, where the tests look for it."""

from qwen3next_ggml.ggml.llama import Llama, LlamaOptions, Node, Recorder

__all__ = ["Llama", "LlamaOptions", "Node", "Recorder"]
