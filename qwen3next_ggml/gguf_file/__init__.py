"""GGUF files as metadata, tensor infos and memory maps (level 2)."""

from .file import GgufFile, Shard, TensorInfo
from .fingerprint import fingerprint
from .header import KeyValues

__all__ = ["GgufFile", "KeyValues", "Shard", "TensorInfo", "fingerprint"]
