"""Files that are good, and files that lie in exactly one place."""

import gc
import os
import random
import struct
import time
import weakref

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3next_ggml.errors import GgufError, QGraphError, TensorError
from qwen3next_ggml.gguf_file import GgufFile
from qwen3next_ggml.hparams import Metadata
from qwen3next_ggml.models import find
from qwen3next_ggml.tensors import TensorTable

from .kit import run_python
from .kit.gguf_bytes import ARRAY, BOOL, F32, I32, STRING, U8, U64, array, edit_gguf, gguf_bytes, kv, string, tensor, u32, u64

ARCH = kv("general.architecture", STRING, string("qwen3next"))
ROW = tensor("a", (8,))  # 32 bytes of f32 at offset 0
GOOD = dict(kvs=[ARCH], tensors=[ROW], data=bytes(32))

# seconds are processor time, which other work on the machine does not stretch; one thread, nothing to wait for.
# the peak of this process alone: getrusage would count what the parent had when it forked
PEAK = """
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) // 1024
"""


def opened(tmp_path, raw):
    path = tmp_path / "file.gguf"
    path.write_bytes(raw)
    return GgufFile.open(path)


def refused(tmp_path, raw, error=GgufError):
    started = time.process_time()
    with pytest.raises(error) as caught:
        opened(tmp_path, raw)
    assert time.process_time() - started < 1
    text = str(caught.value)
    assert "file.gguf" in text and "\n" not in text and len(text) < 400
    return text


@pytest.mark.parametrize("version", [2, 3])
def test_the_good_file_is_good(tmp_path, version):
    file = opened(tmp_path, gguf_bytes(**GOOD, version=version))
    assert (file.version, file.arch, file.alignment, file.notes) == (version, "qwen3next", 32, [])
    info = file.tensors["a"]
    assert (info.ne, info.nbytes, info.type_name, info.shard) == ((8,), 32, "f32", 0)
    assert file.data("a").nbytes == 32 and not file.data("a").flags.writeable


def test_agrees_with_gguf_py(bard):
    file, other = GgufFile.open(bard), gguf.GGUFReader(bard)
    fields = {key: field for key, field in other.fields.items() if not key.startswith("GGUF.")}
    assert list(file.metadata) == list(fields)
    for key, field in fields.items():
        assert file.metadata[key] == field.contents(), key
    assert list(file.tensors) == [t.name for t in other.tensors]
    for t in other.tensors:
        info = file.tensors[t.name]
        assert (info.ne, info.offset, info.type_id) == (tuple(t.shape), t.data_offset, t.tensor_type), t.name
        assert np.array_equal(file.data(t.name), t.data.view(np.uint8).ravel())


def test_every_kind_of_value(tmp_path):
    kinds = [
        (0, "<B", 200), (1, "<b", -3), (2, "<H", 60000), (3, "<h", -300), (4, "<I", 2**32 - 1), (5, "<i", -(2**31)),
        (6, "<f", 0.5), (10, "<Q", 2**64 - 1), (11, "<q", -(2**63)), (12, "<d", 0.1),
    ]  # fmt: skip
    kvs = [kv(f"one.{kind}", kind, struct.pack(code, value)) for kind, code, value in kinds]
    kvs += [kv(f"two.{kind}", ARRAY, array(kind, 2, 2 * struct.pack(code, value))) for kind, code, value in kinds]
    kvs += [kv("flag", BOOL, b"\1"), kv("flags", ARRAY, array(BOOL, 3, b"\1\0\1")), kv("none", ARRAY, array(STRING, 0))]
    kvs += [kv("texts", ARRAY, array(STRING, 2, string("é") + string(""))), kv("text", STRING, string("a\nb"))]
    md = opened(tmp_path, gguf_bytes(kvs=kvs)).metadata
    for kind, _, value in kinds:
        assert md[f"one.{kind}"] == value and md[f"two.{kind}"] == [value, value]
    assert (md["flag"], md["flags"], md["none"], md["texts"], md["text"]) == (True, [True, False, True], [], ["é", ""], "a\nb")
    assert type(md["flags"][0]) is bool and md.length("texts") == 2 and "absent" not in md
    assert md.summary("text") == r"'a\nb'"


# --- what is not a GGUF at all

HTML = b"<!doctype html><html><head><title>404</title></head><body>" + b"x" * 244


@pytest.mark.parametrize("raw", [b"", b"GGU", HTML, b"GGML" + bytes(60)], ids=["empty", "short", "html", "ggml"])
def test_other_files_are_named_as_such(tmp_path, raw):
    assert "not a GGUF file" in refused(tmp_path, raw)


@pytest.mark.parametrize("version, hint", [(0, ""), (1, ""), (4, ""), (3 << 24, "big-endian")])
def test_versions(tmp_path, version, hint):
    text = refused(tmp_path, gguf_bytes(**GOOD, version=version))
    assert str(version) in text and "2 and 3" in text and hint in text


def test_paths(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, what in [("none", "No such file"), (".", "regular file"), ("pipe", "regular file"), ("x\0y", "null byte")]:
        with pytest.raises(GgufError, match=what):
            GgufFile.open(tmp_path / path)


# --- dimensions (C13), counts and nesting (C14), placement (C16): one lie each

DIMENSIONS = {
    "none": tensor("a", ()),
    "five": tensor("a", (1, 1, 1, 1, 1)),
    "a million": tensor("a", (8,), n_dims=1_000_000),
    "u32 max": tensor("a", (8,), n_dims=0xFFFFFFFF),
    "wraps to 4": tensor("a", (4194305, 4194305, 211106198978564)),
    "2^63": tensor("a", (2**63, 2)),
    "negative": tensor("a", (8, 2**64 - 1)),
    "zero": tensor("a", (0, 8)),
    "2^42": tensor("a", (2**42 + 1, 1152)),
    "part of a block": tensor("a", (250,), type_id=12),
}


@pytest.mark.parametrize("entry", DIMENSIONS.values(), ids=DIMENSIONS.keys())
def test_dimensions(tmp_path, entry):
    assert "'a'" in refused(tmp_path, gguf_bytes(kvs=[ARCH], tensors=[entry], data=bytes(64)))


NESTED = b"".join([array(ARRAY, 1)] * 5000) + array(U8, 0)
COUNTS = {
    "keys": dict(n_kv=2**63),
    "tensors": dict(n_tensors=2**63),
    "one tensor more": dict(n_tensors=2),
    "key length": dict(kvs=[u64(2**62) + b"k"]),
    "long key": dict(kvs=[kv("k" * 65536, U8, b"\0")]),
    "string of 1 GiB": dict(kvs=[kv("k", STRING, u64(2**30))]),
    "array of 2^40": dict(kvs=[kv("k", ARRAY, array(U8, 2**40))]),
    "2^61 u64, whose bytes wrap": dict(kvs=[kv("k", ARRAY, array(U64, 2**61, bytes(64)))]),
    "2^40 strings": dict(kvs=[kv("k", ARRAY, array(STRING, 2**40, string("x")))]),
    "a string in an array": dict(kvs=[kv("k", ARRAY, array(STRING, 2, string("x") + u64(2**63)))]),
    "nested": dict(kvs=[kv("k", ARRAY, NESTED)]),
    "empty key": dict(kvs=[kv("", U8, b"\0")]),
    "long key without a type": dict(kvs=[string("k" * 60000)], n_kv=1, tensors=[], n_tensors=0, data=b""),
    "key twice": dict(kvs=[ARCH, ARCH]),
    "key not UTF-8": dict(kvs=[kv(b"\xff", U8, b"\0")]),
    "value type 13": dict(kvs=[kv("k", 13, bytes(8))]),
    "element type 99": dict(kvs=[kv("k", ARRAY, array(99, 1, bytes(8)))]),
    "bool 7": dict(kvs=[kv("k", BOOL, b"\7")]),
    "bools 0 and 7": dict(kvs=[kv("k", ARRAY, array(BOOL, 2, b"\0\7"))]),
    "alignment 0": dict(kvs=[kv("general.alignment", 4, u32(0))]),
    "alignment 24": dict(kvs=[kv("general.alignment", 4, u32(24))]),
    "alignment as text": dict(kvs=[kv("general.alignment", STRING, string("32"))]),
    "tensor name of 64": dict(tensors=[tensor("n" * 64, (8,))]),
    "tensor without name": dict(tensors=[tensor("", (8,))]),
    "tensor name with zero byte": dict(tensors=[tensor("a\0b", (8,))]),
    "tensor twice": dict(tensors=[ROW, tensor("a", (8,), offset=32)], data=bytes(64)),
}


@pytest.mark.parametrize("ne", [(4194305, 4194305, 211106198978564), (2**63, 2), (2**62, 2)], ids=str)
def test_a_product_beyond_2_63_is_no_short_file(tmp_path, ne):
    assert "product < 2^63" in refused(tmp_path, gguf_bytes(kvs=[ARCH], tensors=[tensor("a", ne)]))


@pytest.mark.parametrize("lie, what", [("keys", "keys"), ("tensors", "tensor infos"), ("2^40 strings", "strings of key 'k'")])
def test_counts_are_compared_with_the_bytes_left_first(tmp_path, lie, what):
    assert f" {what} want at least " in refused(tmp_path, gguf_bytes(**{**GOOD, **COUNTS[lie]}))


def test_the_last_string_may_not_reach_past_the_end(tmp_path):
    """Nothing is read after it that would notice."""
    for length, good in [(5, True), (6, False), (2**63, False)]:
        raw = gguf_bytes(kvs=[kv("k", ARRAY, array(STRING, 1, u64(length) + b"12345"))], alignment=1)
        if good:
            assert opened(tmp_path, raw).metadata["k"] == ["12345"]
        else:
            assert "key 'k'[0] reaches byte" in refused(tmp_path, raw)


@pytest.mark.parametrize("lie", COUNTS.values(), ids=COUNTS.keys())
def test_counts_and_names(tmp_path, lie):
    refused(tmp_path, gguf_bytes(**{**GOOD, **lie}))


def test_header_lies_cost_no_memory(tmp_path):
    """All of them in one process that may not grow past 100 MiB, with the recursion limit raised."""
    lies = [gguf_bytes(**{**GOOD, **lie}) for lie in COUNTS.values()]
    lies += [gguf_bytes(kvs=[ARCH], tensors=[entry], data=bytes(64)) for entry in DIMENSIONS.values()]
    for i, raw in enumerate(lies):
        (tmp_path / f"{i}.gguf").write_bytes(raw)
    done = run_python(
        PEAK
        + """
import pathlib, sys
from qwen3next_ggml.gguf_file import GgufFile
from qwen3next_ggml.errors import GgufError
sys.setrecursionlimit(10**6)
n = 0
for path in pathlib.Path(sys.argv[1]).glob("*.gguf"):
    try:
        GgufFile.open(path)
    except GgufError:
        n += 1
print(n, peak())
""",
        tmp_path,
    )
    n, mib = map(int, done.stdout.split())
    assert n == len(lies) and mib < 100, done.stderr


PLACES = {
    "at the end of the file": (tensor("a", (8,), offset=32), "too short"),
    "beyond 2^64": (tensor("a", (8,), offset=2**64 - 32), "too short"),
    "not aligned": (tensor("a", (4,), offset=16), "multiple of 32"),
    "cut off": (tensor("a", (16,)), "too short"),
}


@pytest.mark.parametrize("entry, words", PLACES.values(), ids=PLACES.keys())
def test_places(tmp_path, entry, words):
    text = refused(tmp_path, gguf_bytes(kvs=[ARCH], tensors=[entry], data=bytes(32)))
    assert words in text and "'a'" in text


def test_overlap_is_not_truncation(tmp_path):
    both = [tensor("a", (16,)), tensor("b", (8,), offset=32)]
    text = refused(tmp_path, gguf_bytes(kvs=[ARCH], tensors=both, data=bytes(64)))
    assert "'b'" in text and "overlaps 'a'" in text and "short" not in text
    apart = [tensor("a", (16,)), tensor("b", (8,), offset=64)]
    assert opened(tmp_path, gguf_bytes(kvs=[ARCH], tensors=apart, data=bytes(96))).notes == []


def test_bytes_nobody_owns_are_noted(tmp_path):
    assert opened(tmp_path, gguf_bytes(**{**GOOD, "data": bytes(32 + 100)})).notes == ["file.gguf: 100 bytes after the last tensor"]
    just = [ROW, tensor("b", (8,), offset=64)]
    assert opened(tmp_path, gguf_bytes(kvs=[ARCH], tensors=just, data=bytes(96))).notes == ["file.gguf: 32 unused bytes before 'b'"]
    gap = [ROW, tensor("b", (8,), offset=128)]
    assert opened(tmp_path, gguf_bytes(kvs=[ARCH], tensors=gap, data=bytes(160))).notes == ["file.gguf: 96 unused bytes before 'b'"]


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_alignment_moves_the_data(tmp_path, alignment):
    kvs = [ARCH, kv("general.alignment", 4, u32(alignment))]
    raw = gguf_bytes(kvs=kvs, tensors=[ROW, tensor("b", (2,), offset=max(32, alignment))], alignment=alignment, data=bytes(range(256)) * 32)
    file = opened(tmp_path, raw)
    assert file.tensors["a"].offset % alignment == 0
    assert file.data("a")[:3].tolist() == [0, 1, 2]
    assert file.data("b")[0] == max(32, alignment) % 256


@pytest.mark.parametrize("type_id", [4, 31, 43, 200, 2**31])
def test_unknown_tensor_types(tmp_path, type_id):
    text = refused(tmp_path, gguf_bytes(kvs=[ARCH], tensors=[tensor("blk.0.x", (256,), type_id)], data=bytes(4096)), TensorError)
    assert "'blk.0.x'" in text and str(type_id) in text


def test_cut_anywhere_says_how_many_bytes(tmp_path, toys):
    raw = toys.t0.read_bytes()
    for size in [*range(4, 200), *range(4096, len(raw), 4096), len(raw) - 1]:
        text = refused(tmp_path, raw[:size])
        assert "too short" in text and f"{size} bytes" in text or "are left" in text, text


# --- split sets


@pytest.fixture(scope="module")
def split_set(tmp_path_factory, toys):
    return edit_gguf(toys.t0, tmp_path_factory.mktemp("split") / "t.gguf", split=20)


def copied(files, folder):
    for file in files:
        (folder / file.name).write_bytes(file.read_bytes())
    return [folder / file.name for file in files]


@pytest.mark.parametrize("which", range(4))
def test_any_shard_opens_the_set(split_set, toys, which):
    with GgufFile.open(split_set[which]) as file, GgufFile.open(toys.t0) as whole:
        assert file.arch == "qwen3next" and len(file.shards) == 4 and {t.shard for t in file.tensors.values()} == {0, 1, 2, 3}
        assert file.tensors.keys() == whole.tensors.keys()
        assert all(np.array_equal(file.data(name), whole.data(name)) for name in whole.tensors)


def test_split_sets_that_do_not_add_up(split_set, tmp_path):
    files = copied(split_set, tmp_path)
    files[1].unlink()
    with pytest.raises(GgufError, match="t-00002-of-00004.gguf is missing"):
        GgufFile.open(files[2])

    files[1].write_bytes(split_set[2].read_bytes())
    with pytest.raises(GgufError, match="says it is split 2 of 4"):
        GgufFile.open(files[0])

    edit_gguf(split_set[1], files[1], drop=["blk.1.attn_norm.weight"])
    with pytest.raises(GgufError, match=r"hold 72 tensors, split.tensors.count says 73"):
        GgufFile.open(files[0])

    edit_gguf(split_set[1], files[1], rename={"blk.1.attn_norm.weight": "token_embd.weight"})
    with pytest.raises(GgufError, match="'token_embd.weight' appears in an earlier split file"):
        GgufFile.open(files[0])

    files[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(GgufError, match="expected a name like NAME-00001-of-00004.gguf"):
        GgufFile.open(tmp_path / "renamed.gguf")


# --- laziness (C18)


def test_a_large_vocabulary_opens_fast(tmp_path, toys):
    path = tmp_path / "vocab.gguf"
    words = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(151936)], "tokenizer.ggml.merges": [f"a{i} b" for i in range(151387)]}
    edit_gguf(toys.t0, path, metadata=words)
    done = run_python(
        PEAK
        + """
import sys, time
from qwen3next_ggml.gguf_file import GgufFile
file = GgufFile.open(sys.argv[1])
print(file.metadata.length("tokenizer.ggml.tokens"), time.process_time(), peak())
""",
        path,
    )
    n, seconds, mib = map(float, done.stdout.split())
    assert n == 151936 and seconds < 1 and mib < 200, done.stderr
    file = GgufFile.open(path)
    assert file.metadata["tokenizer.ggml.tokens"] == words["tokenizer.ggml.tokens"]
    assert file.metadata["tokenizer.ggml.merges"][-1] == "a151386 b"
    assert file.metadata.summary("tokenizer.ggml.tokens") == "[151936 values]"


def test_opening_touches_no_tensor(tmp_path):
    path = tmp_path / "sparse.gguf"
    path.write_bytes(gguf_bytes(kvs=[ARCH], tensors=[tensor("big", (2**28,))]))
    os.truncate(path, path.stat().st_size + 2**30)

    def resident():
        return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])

    before = resident()
    file = GgufFile.open(path)
    assert file.data("big").nbytes == 2**30
    assert resident() - before < 8 * 1024
    file.data("big")[:: 1 << 12].sum()
    assert resident() - before > 512 * 1024  # the measure does see touched pages


def test_broken_text(tmp_path):
    kvs = [kv("general.architecture", STRING, string(b"q\xff")), kv("list", ARRAY, array(STRING, 2, string("ok") + string(b"\xff")))]
    file = opened(tmp_path, gguf_bytes(kvs=kvs))
    assert file.arch == r"q\xff"
    with pytest.raises(GgufError, match=r"list.\[1\] is not UTF-8"):
        file.metadata["list"]


@pytest.mark.parametrize("kvs", [[], [kv("general.architecture", I32, struct.pack("<i", 3))]], ids=["absent", "a number"])
def test_no_architecture(tmp_path, kvs):
    with pytest.raises(GgufError, match="general.architecture is"):
        opened(tmp_path, gguf_bytes(kvs=kvs)).arch


def test_closing(tmp_path):
    kvs = [ARCH, kv("read", ARRAY, array(F32, 1, bytes(4))), kv("unread", ARRAY, array(F32, 1, bytes(4)))]
    file = opened(tmp_path, gguf_bytes(**{**GOOD, "kvs": kvs}))
    held, mapped = file.data("a"), weakref.ref(file.shards[0].map)
    assert file.metadata["read"] == [0.0]
    file.close()
    file.close()
    assert file.metadata["read"] == [0.0]
    for use in (lambda: file.data("a"), lambda: file.metadata["unread"]):
        with pytest.raises(GgufError, match="closed"):
            use()
    gc.collect()
    assert mapped() is not None and not held.any()
    del held
    gc.collect()
    assert mapped() is None


# --- whatever the bytes, one of our errors or a model


def whole_load(path):
    """Go as far as data-free loading goes."""
    with GgufFile.open(path) as file:
        for key in file.metadata:
            assert file.metadata.summary(key)
            file.metadata[key]
        arch = find(file.arch)
        table = TensorTable()
        arch.load_arch_tensors(table, arch.load_arch_hparams(Metadata(file.metadata, file.arch)))
        table.check(file)


@pytest.fixture(scope="module")
def header(toys):
    """The toy's bytes, and where its header ends."""
    with GgufFile.open(toys.t0) as file:
        return toys.t0.read_bytes(), min(info.offset for info in file.tensors.values())


def test_the_unchanged_file_loads(toys):
    whole_load(toys.t0)


@given(seed=st.integers(0, 2**32), n=st.integers(1, 6))
def test_changed_bytes(tmp_path_factory, header, seed, n):
    raw, end = header
    rng, changed = random.Random(seed), bytearray(raw)
    for _ in range(n):
        at = rng.randrange(end)
        kind = rng.randrange(4)
        if kind == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[at : at + rng.randrange(1, 40)]
        elif kind == 2:
            changed[at:at] = rng.randbytes(rng.randrange(1, 40))
        else:
            changed[at : at + 8] = u64(rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    path.write_bytes(changed)
    started = time.process_time()
    try:
        whole_load(path)
    except QGraphError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
    assert time.process_time() - started < 2
