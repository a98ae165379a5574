"""Random model files of an architecture, from its own declarations (level 11).

Each tensor is seeded by the hash of its own name, so a file is the same on every machine, and toys that differ in layout
hold the same weights. Quantised by ggml itself, written tensor by tensor, beside the target and renamed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import chain, islice, product
from math import gcd
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from . import models
from .errors import OptionError, TensorError
from .geometry import stored_type
from .ggml import GgmlType, types
from .hparams import Metadata
from .tensors import Decl, TensorTable

DEFAULT_LAYERS = 4
CHUNK = 1 << 22  # values made and quantised at a time
BANK = 1 << 23  # values of a tensor that are drawn and quantised; a bigger tensor recombines them
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_toy(
    path: str | os.PathLike,
    *,
    arch: str = "qwen3next",
    geometry: str | None = None,
    type: str = "f32",
    n_layer: int | None = None,
    mtp: bool = False,
    legacy: bool = False,
    tied: bool = False,
    layouts: Collection[str] = (),
    optional: Collection[str] = ("nextn_shared_head_norm",),
    tensor_types: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    n_vocab: int | None = None,
    n_merges: int = 0,
    seed: int = 0,
) -> Path:
    """Write a random GGUF file and return its path.

    geometry: a name of the architecture's GEOMETRY; the tiny one, or for types of 256-value blocks the one that fits them.
    type: of the matrices; rows that do not fill its blocks become f16, small and router weights stay f32. tensor_types
    overrides that by name pattern. n_layer: blocks of the trunk. legacy: `ssm_in` instead of two projections; layouts: names
    of other alternatives to write, such as "ffn_gate_up_exps". optional: attributes of optional tensors to write.
    metadata: keys to set, or None to drop; without a prefix they are the architecture's. n_merges: 0 for the least there is.
    Raises OptionError, UnsupportedModelError, TensorError; a file that was there stays until the new one is complete.
    """
    module, stored = models.find(arch), GgmlType.of(type)
    values = _metadata(module, geometry or ("tiny-q" if stored.block_size > 64 else "tiny"), n_layer, mtp, n_vocab, metadata)
    md = Metadata(values, arch)
    hp = module.load_arch_hparams(md)
    values = _tokenizer(hp.n_vocab, n_merges) | values
    table = TensorTable()
    module.load_arch_tensors(table, hp)
    optional = {*optional} if tied else {*optional, "output"}
    decls = [d for d in table.layout({*layouts, "ssm_in"} if legacy else layouts) if d.required or d.attribute in optional]
    plan = [(decl, _stored_type(decl, stored, tensor_types or {})) for decl in decls]

    path = Path(path)
    part = path.with_name(f"{path.name}.part")
    try:
        _write(part, values, plan, seed)
        os.replace(part, path)
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
    return path


def _metadata(module, geometry: str, n_layer: int | None, mtp: bool, n_vocab: int | None, overrides) -> dict[str, Any]:
    if geometry not in module.GEOMETRY:
        raise OptionError(f"geometry {geometry!r}, expected one of {', '.join(module.GEOMETRY)}")
    values = dict(module.TINY)
    key = Metadata(values, module.ARCH).key
    values |= {key(name): value for name, value in module.GEOMETRY[geometry].items()}
    n_trunk = min(values[key("block_count")], DEFAULT_LAYERS) if n_layer is None else n_layer
    if n_trunk < 1:
        raise OptionError(f"n_layer is {n_trunk}, expected at least 1")
    values[key("block_count")] = n_trunk + mtp
    if mtp:
        values[key("nextn_predict_layers")] = 1
    if n_vocab is not None:
        values[key("vocab_size")] = n_vocab
    values |= {key(name): value for name, value in (overrides or {}).items()}
    return {name: value for name, value in values.items() if value is not None}


def _tokenizer(n_vocab: int, n_merges: int) -> dict[str, Any]:
    """Return a byte-level BPE of exactly n_vocab tokens: byte tokens, merges, filler, special tokens last.

    Below 260 tokens there is one special token, and not all bytes have a token: printable ASCII, space and newline come
    first, in an order that lets "hi" be written with any vocabulary of 4.
    """
    n_special = len(SPECIALS) if n_vocab >= 256 + 1 + len(SPECIALS) else 1
    if n_vocab < 4:
        raise OptionError(f"n_vocab is {n_vocab}, expected at least 4")
    chars = _byte_characters()
    letters = sorted(range(256), key=lambda b: (b not in b"hi", b not in b" \n", not 0x21 <= b < 0x7F, b))
    tokens = [chars[b] for b in letters[: n_vocab - n_special - 1]]
    # a file of this kind must list a merge; two spaces are the one that the fewest prompts meet
    first = ("Ġ", "Ġ") if "Ġ" in tokens else ("h", "i")
    pairs = (pair for pair in product(tokens, tokens) if pair != first)
    triples = ((a + b, c) for a, b, c in product(tokens, tokens, tokens) if (a, b) != first)
    n_room = n_vocab - n_special - len(tokens)
    merges = list(islice(chain([first], pairs, triples), min(max(n_merges, 1), n_room)))
    tokens += [a + b for a, b in merges]
    tokens += [f"Ġt{i}" for i in range(len(tokens), n_vocab - n_special)]
    tokens += SPECIALS[:n_special]
    end = n_vocab - n_special
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * end + [3] * n_special,
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],
        "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": n_vocab - 1,
        "tokenizer.ggml.padding_token_id": end,
        "tokenizer.ggml.add_bos_token": False,
    }


def _byte_characters() -> list[str]:
    """Return GPT-2's printable character for each byte."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b if b in shown else next(others)) for b in range(256)]


def _stored_type(decl: Decl, type: GgmlType, overrides: Mapping[str, str]) -> GgmlType:
    for pattern, name in overrides.items():
        if fnmatchcase(decl.name, pattern):
            wanted = GgmlType.of(name)
            if decl.ne[0] % wanted.block_size:
                raise TensorError(f"{decl.name} has rows of {decl.ne[0]}, {name} needs a multiple of {wanted.block_size}")
            return wanted
    return stored_type(decl, type)


def _write(path: Path, values: dict[str, Any], plan: list[tuple[Decl, GgmlType]], seed: int) -> None:
    values = dict(values)
    writer = gguf.GGUFWriter(path, values.pop("general.architecture"))
    for key, value in values.items():
        _add_value(writer, key, value)
    for decl, type in plan:
        nbytes = int(np.prod(decl.ne[1:])) * type.row_size(decl.ne[0])
        writer.add_tensor_info(decl.name, decl.ne[::-1], np.dtype(np.float32), nbytes, _file_type(decl, type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    out = writer.fout[0]
    writer.write_padding(out, out.tell())
    for decl, type in plan:
        n = sum(out.write(chunk) for chunk in _raw(decl, type, seed))
        writer.write_padding(out, n)
    writer.close()


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if key == "general.alignment":
        writer.add_custom_alignment(value)
    elif isinstance(value, (list, tuple)):
        writer.add_array(key, list(value))
    else:
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[value.__class__](key, value)


def _file_type(decl: Decl, type: GgmlType) -> gguf.GGMLQuantizationType:
    try:
        return gguf.GGMLQuantizationType(type.id)
    except ValueError:
        raise TensorError(f"{decl.name}: the gguf package cannot write type {type.name}") from None


def _raw(decl: Decl, type: GgmlType, seed: int) -> Iterator[np.ndarray]:
    """Yield a tensor's bytes, whole rows at a time: [n_rows, row_size]."""
    if decl.parts:
        yield _composed(decl, type, seed)
        return
    n_rows, segment = int(np.prod(decl.ne[1:])), gcd(decl.ne[0], 256)
    if types.requires_imatrix(type):
        yield from _random_blocks(decl, type, seed, n_rows)
        return
    # two segments and n_bank turns make n_bank^2 different rows
    if n_rows * decl.ne[0] > BANK and decl.ne[0] > segment and n_rows <= (BANK // decl.ne[0]) ** 2:
        yield from _reused(decl, type, seed, segment)
    else:
        yield from _rows(decl, type, seed, n_rows)


def _generator(decl: Decl, seed: int) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(f"{seed} {decl.name}".encode()).digest()[:16], "little"))


def _random_blocks(decl: Decl, type: GgmlType, seed: int, n_rows: int) -> Iterator[np.ndarray]:
    """Yield random blocks of a type whose quantiser wants an importance matrix, and takes seconds per million values.

    Such a block is a half-precision scale and then indices, signs and fine scales, of which every pattern is valid.
    """
    rng, row_size = _generator(decl, seed), type.row_size(decl.ne[0])
    gain = float(_shaped(decl, np.ones((1, 1), np.float32))[0, 0])
    scale = np.float16(gain / _unit_spread(type)).tobytes()
    step = max(1, CHUNK // row_size)
    for start in range(0, n_rows, step):
        raw = np.frombuffer(rng.bytes(min(step, n_rows - start) * row_size), np.uint8).reshape(-1, type.type_size).copy()
        raw[:, :2] = np.frombuffer(scale, np.uint8)
        yield raw.reshape(-1, row_size)


@lru_cache
def _unit_spread(type: GgmlType) -> float:
    """Return the spread of the values of random blocks with scale 1."""
    raw = np.random.default_rng(0).integers(0, 256, (4096, type.type_size), np.uint8)
    raw[:, :2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    return float(types.dequantize(type, raw, type.block_size).std())


def _rows(decl: Decl, type: GgmlType, seed: int, n_rows: int) -> Iterator[np.ndarray]:
    rng = _generator(decl, seed)
    step = max(1, CHUNK // decl.ne[0])
    for start in range(0, n_rows, step):
        # the generator draws value by value, so the size of a chunk does not show in the file
        noise = rng.standard_normal((min(step, n_rows - start), decl.ne[0]), np.float32)
        yield types.quantize(type, _shaped(decl, noise))


def _shaped(decl: Decl, noise: np.ndarray) -> np.ndarray:
    """Turn unit noise into plausible weights: norms near 1, decays negative, products that keep their input's size."""
    name = decl.attribute
    if name.endswith("norm"):
        return 1 + noise / 10
    if name == "ssm_a":
        return -np.exp(noise / 2)
    if decl.op is None:
        return noise / 2
    # routers spread wide, so that the choice of experts is rarely a near-tie
    gain = {"token_embd": decl.ne[0] ** 0.5, "ffn_gate_inp": 3.0}.get(name, 1.0)
    return noise * np.float32(gain / decl.ne[0] ** 0.5)


def _reused(decl: Decl, type: GgmlType, seed: int, segment: int) -> Iterator[np.ndarray]:
    """Make BANK values, then build all rows of segments of those rows, each row of a different set.

    Quantisation works on blocks inside a row, so segments of whole blocks may be recombined after it. Quantising every value of
    4 layers of the published model takes minutes; this way most of the time goes into writing bytes, and no two rows are equal.
    """
    n_rows, n_bank, n_segments = int(np.prod(decl.ne[1:])), BANK // decl.ne[0], decl.ne[0] // segment
    bank = np.concatenate(list(_rows(decl, type, seed, n_bank))).reshape(n_bank, n_segments, -1)
    j = np.arange(n_segments)
    for start in range(0, n_rows, n_bank):
        turn, i = start // n_bank, np.arange(min(n_bank, n_rows - start))
        yield bank[(i[:, None] + turn * j) % n_bank, j].reshape(len(i), -1)


def _composed(decl: Decl, type: GgmlType, seed: int) -> np.ndarray:
    """Put the rows of the tensors this one is made of where it has them."""
    n_rows = decl.ne[1]
    out = np.empty((int(np.prod(decl.ne[2:])), n_rows, type.row_size(decl.ne[0])), np.uint8)
    for part, listed in decl.parts:
        rows = listed()
        out[:, rows] = np.concatenate(list(_raw(part, type, seed))).reshape(len(out), len(rows), -1)
    return out.reshape(-1, out.shape[-1])
