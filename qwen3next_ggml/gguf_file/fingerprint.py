"""Tell models apart without reading them: a hash over hyperparameters, tensor shapes and a few bytes of each tensor (level 2)."""

import hashlib

from .file import GgufFile

SAMPLE = 1024


def fingerprint(file: GgufFile) -> str:
    """Return 32 hex digits that change with architecture, hyperparameters, and any tensor's name, type, shape or middle bytes.

    How a file is split, aligned and named, and its tokenizer, make no difference.
    """
    digest = hashlib.blake2b(file.arch.encode(), digest_size=16)
    for key in sorted(key for key in file.metadata if key.startswith(f"{file.arch}.")):
        digest.update(f"\n{key}={file.metadata[key]!r}".encode())
    for name, info in sorted(file.tensors.items()):
        digest.update(f"\n{name} {info.type_name} {info.ne}".encode())
        data = file.data(name)
        middle = max((len(data) - SAMPLE) // 2, 0)
        digest.update(data[middle : middle + SAMPLE])
    return digest.hexdigest()
