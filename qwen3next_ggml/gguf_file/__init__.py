"""GGUF files as metadata, tensor infos and memory maps (level 2)."""

from .file import GgufFile, Shard, TensorInfo
from .header import KeyValues

__all__ = ["GgufFile", "KeyValues", "Shard", "TensorInfo"]
