"""From a file's tensors to weights on a device: what is found, what is refused, where the bytes end up."""

import gc
import os
import re
import time
import tracemalloc

import numpy as np
import pytest

from qwen3next_ggml import ggml
from qwen3next_ggml.errors import OptionError, TensorError
from qwen3next_ggml.ggml import types
from qwen3next_ggml.gguf_file import GgufFile
from qwen3next_ggml.hparams import Metadata
from qwen3next_ggml.models.qwen3next import ARCH, GEOMETRY, TINY, legacy_rows, load_arch_hparams, load_arch_tensors
from qwen3next_ggml.tensors import TensorTable, load_weights, warnings

from .kit import nmse, read_arrays
from .kit.gguf_bytes import edit_gguf, gguf_bytes, tensor


def table_of(file, load_mtp=True):
    table = TensorTable()
    load_arch_tensors(table, load_arch_hparams(Metadata(file.metadata, file.arch)), load_mtp)
    return table


def checked(path, **options):
    with GgufFile.open(path) as file:
        return table_of(file, **options).check(file)


class Loaded:
    """Weights of a file for one `with` block."""

    def __init__(self, path, *, devices=None, load_mtp=True, **options):
        self.file = GgufFile.open(path)
        devices = devices or ggml.device("CPU")
        self.weights = load_weights(self.file, table_of(self.file, load_mtp), devices, **options)

    def __enter__(self):
        return self.weights

    def __exit__(self, *_):
        self.weights.close()
        self.file.close()


def refused(path, *words, without=()):
    with pytest.raises(TensorError) as caught:
        checked(path)
    text = str(caught.value)
    assert all(word in text for word in words) and not any(word in text for word in without) and "\n" not in text, text


def values_of(weights):
    return {name: tensor.get() for name, tensor in weights.by_name.items()}


def assert_equal_values(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert np.array_equal(got[name], np.asarray(want[name], np.float32).reshape(got[name].shape)), name


# --- names and values


def test_weights_carry_gguf_names(toys):
    with Loaded(toys.mtp) as w:
        names = {
            **{"token_embd": w.token_embd, "output_norm": w.output_norm, "output": w.output},
            **{f"blk.0.{name}": getattr(w.blk[0], name.replace(".", "_")) for name in ("attn_qkv", "ssm_dt.bias", "ssm_a", "ffn_gate_inp_shexp")},
            **{f"blk.3.{name}": getattr(w.blk[3], name) for name in ("attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm")},
            **{f"blk.4.{name}": getattr(w.blk[4], name.replace(".", "_")) for name in ("attn_q", "nextn.eh_proj", "nextn.shared_head_norm")},
        }
        for name, tensor in names.items():
            assert tensor.name.removesuffix(".weight") == name and tensor.op == "NONE"
        for il, absent in [(0, "ssm_in"), (0, "ffn_gate_up_exps"), (3, "attn_qkv"), (3, "attn_q_bias"), (4, "nextn_embed_tokens")]:
            assert getattr(w.blk[il], absent) is None
        with pytest.raises(AttributeError):
            w.blk[0].attn_q
        assert len(w.blk) == 5 and w.leftovers == () and w.notes == [] and w.scales == {}


@pytest.mark.parametrize("type", ["f32", "q8_0", "q4_k"])
@pytest.mark.parametrize("mmap", [True, False])
def test_values_equal_the_file(toys, type, mmap):
    path = toys.file(type=type)
    with Loaded(path, mmap=mmap) as w:
        assert_equal_values(values_of(w), read_arrays(path))
        assert (w.planned["mapped"] > 0, w.planned["copied"] > 0) == (mmap, not mmap)
        assert w.planned.total() == sum(tensor.type.row_size(tensor.nelements) for tensor in w.by_name.values())


def test_mapped_weights_lie_in_the_file(toys):
    with GgufFile.open(toys.t0) as file, load_weights(file, table_of(file), ggml.device("CPU")) as w:
        for name, tensor in w.by_name.items():
            assert tensor.data == file.shards[0].address + file.tensors[name].offset


def test_a_split_set_is_mapped_file_by_file(toys, tmp_path):
    files = edit_gguf(toys.t0, tmp_path / "t.gguf", split=20)
    with Loaded(files[1]) as w:
        assert w.planned["copied"] == 0
        assert_equal_values(values_of(w), read_arrays(toys.t0))


def test_misaligned_tensors_are_copied(toys):
    path = toys.file(metadata={"general.alignment": 8})
    with Loaded(path) as w:
        assert w.planned["copied"] and w.planned["mapped"]
        assert_equal_values(values_of(w), read_arrays(path))


def test_without_data_there_are_only_shapes(toys):
    with Loaded(toys.t0, data=False) as w, Loaded(toys.t0) as full:
        assert w.planned == full.planned and all(tensor.data == 0 for tensor in w.by_name.values())
        assert {n: (t.ne, t.type) for n, t in w.by_name.items()} == {n: (t.ne, t.type) for n, t in full.by_name.items()}


def test_a_tied_head_is_the_embedding(toys):
    with Loaded(toys.file(tied=True)) as w:
        assert w.output == w.token_embd and "output.weight" not in w.by_name
    with Loaded(toys.t0) as w:
        assert w.output != w.token_embd


def test_weights_are_ready_before_they_are_read(tmp_path):
    """Four layers of the published geometry in F16, 12 GiB of holes."""
    md = Metadata(TINY, ARCH)
    sizes = TINY | {md.key(key): value for key, value in GEOMETRY["qwen3-next-80b"].items()} | {md.key("block_count"): 4}
    table = TensorTable()
    load_arch_tensors(table, load_arch_hparams(Metadata(sizes, ARCH)))
    entries, offset = [], 0
    for decl in table.layout():
        entries.append(tensor(decl.name, decl.ne, type_id=1 if decl.op else 0, offset=offset))
        offset += int(np.prod(decl.ne)) * (2 if decl.op else 4) + 31 & ~31
    path = tmp_path / "holes.gguf"
    path.write_bytes(gguf_bytes(tensors=entries))
    os.truncate(path, path.stat().st_size + offset)
    started = time.process_time()
    with GgufFile.open(path) as file, load_weights(file, table, ggml.device("CPU")) as w:
        assert time.process_time() - started < 1
        assert w.planned["mapped"] > 10 * 2**30 and w.planned["copied"] == 0


# --- layouts


@pytest.mark.parametrize("type", ["f32", "q8_0", "q4_k"])
def test_legacy_projections_are_split_at_load(toys, type):
    with Loaded(toys.file(type=type)) as new, Loaded(toys.file(type=type, legacy=True)) as old:
        assert_equal_values(values_of(old), values_of(new))
        for a, b in zip(new.blk, old.blk):
            assert vars(a).keys() == vars(b).keys()
        assert old.blk[0].attn_qkv.type == new.blk[0].attn_qkv.type and old.blk[0].ssm_in is None
        assert "blk.2.ssm_in.weight split into attn_qkv and attn_gate" in old.notes


def test_the_legacy_order_of_rows():
    """Two key heads of width 2, three value heads each: q k vvv zzz, twice."""
    hp = load_arch_hparams(Metadata(TINY | {f"{ARCH}.ssm.state_size": 2, f"{ARCH}.ssm.inner_size": 12}, ARCH))
    qkv, z = legacy_rows(hp)
    assert qkv.tolist() == [0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 6, 7, 8, 9, 20, 21, 22, 23, 24, 25]
    assert z.tolist() == [10, 11, 12, 13, 14, 15, 26, 27, 28, 29, 30, 31]


@pytest.mark.parametrize("layout, parts", [("ffn_gate_up_exps", ("ffn_gate_exps", "ffn_up_exps")), ("attn_qkv", ("attn_q", "attn_k", "attn_v"))])
def test_fused_layouts_stay_fused(toys, layout, parts):
    with Loaded(toys.t0) as separate, Loaded(toys.file(layouts=(layout,))) as fused:
        block, other = fused.blk[3], separate.blk[3]
        want = np.concatenate([getattr(other, part).get() for part in parts], axis=-2)
        assert np.array_equal(getattr(block, layout).get(), want)
        assert all(getattr(block, part) is None for part in parts) and getattr(other, layout) is None


def test_the_nextn_block_can_stay_in_the_file(toys, tmp_path):
    with Loaded(toys.mtp, load_mtp=False) as w, Loaded(toys.t0) as trunk:
        assert_equal_values(values_of(w), values_of(trunk))
        assert w.leftovers == () and w.blk[4].nextn_eh_proj is None
    with_mtp, without = checked(toys.mtp), checked(toys.mtp, load_mtp=False)
    assert {info.name for _, info in without.unloaded} == {n for n in (info.name for _, info in with_mtp.found) if n.startswith("blk.4.")}
    edit_gguf(toys.mtp, tmp_path / "cut.gguf", drop=["blk.4.attn_q.weight", "blk.4.nextn.eh_proj.weight"])
    checked(tmp_path / "cut.gguf", load_mtp=False)
    refused(tmp_path / "cut.gguf", "block 4", "attn_q + attn_k + attn_v")


# --- refusals


@pytest.mark.parametrize(
    "lie",
    [
        {"attention.head_count": 2**24}, {"attention.head_count": 2**60}, {"expert_feed_forward_length": 2**62}, {"vocab_size": 2**62},
        {"ssm.state_size": 2**40, "ssm.inner_size": 6 * 2**40}, {"block_count": 512},
    ],
    ids=str,
)  # fmt: skip
def test_sizes_from_a_header_cost_nothing_before_they_are_checked(toys, lie):
    md = Metadata(TINY, ARCH)
    tracemalloc.start()
    try:
        with GgufFile.open(toys.t0) as file:
            table = TensorTable()
            load_arch_tensors(table, load_arch_hparams(Metadata(TINY | {md.key(key): n for key, n in lie.items()}, ARCH)))
            with pytest.raises(TensorError):
                table.check(file)
        assert tracemalloc.get_traced_memory()[1] < 32 * 2**20
    finally:
        tracemalloc.stop()


def changed(toys, tmp_path, source="t0", **changes):
    edit_gguf(getattr(toys, source), tmp_path / "changed.gguf", **changes)
    return tmp_path / "changed.gguf"


INPUTS = ["blk.1.attn_qkv.weight", "blk.1.attn_gate.weight"]


def test_missing_input_projections(toys, tmp_path):
    layouts = ("block 1", "attn_qkv + attn_gate", "ssm_in")
    refused(changed(toys, tmp_path, drop=INPUTS), *layouts, "none of them")
    refused(changed(toys, tmp_path, drop=INPUTS[1:]), *layouts, "only attn_qkv")
    refused(changed(toys, tmp_path, drop=INPUTS[:1]), *layouts, "only attn_gate")
    refused(changed(toys, tmp_path, "legacy", drop=["blk.1.ssm_in.weight"]), *layouts, "none of them")


def test_missing_tensors_are_named(toys, tmp_path):
    missing = ["blk.1.ssm_norm.weight", "blk.2.ffn_down_exps.weight"]
    refused(changed(toys, tmp_path, drop=missing), "missing 2 tensors", *missing, "[40, 64, 10]", without=["truncated", "short", "cut"])
    refused(changed(toys, tmp_path, drop=["token_embd.weight"]), "missing 1 tensor:", "token_embd.weight [64, 97]")
    all_norms = [name for name in read_arrays(toys.t0) if "norm" in name]
    refused(changed(toys, tmp_path, drop=all_norms), f"missing {len(all_norms)} tensors", f"and {len(all_norms) - 4} more")


def test_shapes_show_wanted_and_found(toys, tmp_path):
    narrow = {"blk.1.ssm_in.weight": ("f32", np.zeros((100, 64)))}
    refused(changed(toys, tmp_path, "legacy", replace=narrow), "blk.1.ssm_in.weight has shape [64, 100], wanted [64, 512]")
    turned = {"blk.0.ffn_gate_inp.weight": ("f32", np.zeros((64, 10)))}
    refused(changed(toys, tmp_path, replace=turned), "blk.0.ffn_gate_inp.weight has shape [10, 64], wanted [64, 10]")


def test_a_trailing_one_is_no_other_shape(toys, tmp_path):
    path = changed(toys, tmp_path, replace={"blk.0.ffn_gate_inp_shexp.weight": ("f32", np.ones((1, 64)))})
    with Loaded(path) as w:
        assert w.blk[0].ffn_gate_inp_shexp.shape == (64,)


@pytest.mark.parametrize("pattern, block, kind, found", [("rrrr", 3, "recurrent", "attn_q.weight"), ("rara", 1, "attention", "ssm_conv1d.weight")])
def test_the_metadata_and_the_tensors_disagree(toys, tmp_path, pattern, block, kind, found):
    recurrent = {f"{ARCH}.attention.recurrent_layers": [c == "r" for c in pattern]}
    refused(changed(toys, tmp_path, metadata=recurrent), f"block {block} is {kind}", f"blk.{block}.{found}")
    checked(changed(toys, tmp_path, metadata={f"{ARCH}.attention.recurrent_layers": [True, True, True, False]}))


def small_table(tmp_path, type_id, op, ne=(256, 2)):
    path = tmp_path / "small.gguf"
    path.write_bytes(gguf_bytes(tensors=[tensor("a.weight", ne, type_id)], data=bytes(4096)))
    table = TensorTable()
    table.declare("a.weight", ne, role="test", op=op)
    return path, table


@pytest.mark.parametrize("type_id, name", [(9, "q8_1"), (15, "q8_k"), (24, "i8"), (26, "i32"), (27, "i64"), (28, "f64")])
@pytest.mark.parametrize("op", ["mul_mat", None])
def test_types_that_are_no_weights(tmp_path, type_id, name, op):
    path, table = small_table(tmp_path, type_id, op)
    with GgufFile.open(path) as file, pytest.raises(TensorError, match=f"a.weight has type {name}"):
        table.check(file)


@pytest.mark.parametrize("type", types.known(), ids=str)
def test_every_other_type_loads(tmp_path, type):
    if type.name in {"q8_1", "q8_k", "i8", "i16", "i32", "i64", "f64"}:
        return
    for op in ("mul_mat", None):
        path, table = small_table(tmp_path, type.id, op)
        with GgufFile.open(path) as file, load_weights(file, table, ggml.device("CPU")) as w:
            assert w.a.type.name == (type.name if op else "f32")
            assert w.a.get().shape == (2, 256)


def test_what_is_read_by_value_becomes_f32(toys, tmp_path):
    arrays = read_arrays(toys.t0)
    stored = {"blk.0.ssm_conv1d.weight": "f16", "blk.1.ssm_a": "f16", "blk.2.attn_norm.weight": "q8_0", "output_norm.weight": "bf16"}
    path = changed(toys, tmp_path, replace={name: (type, arrays[name]) for name, type in stored.items()})
    with Loaded(path) as w:
        assert_equal_values(values_of(w), read_arrays(path))
        assert {t.type.name for t in w.by_name.values()} == {"f32"}
        assert sorted(w.notes) == sorted(f"{name} converted from {type} to f32" for name, type in stored.items())
    report = "\n".join(found for found in warning_list(path) if "converted" in found)
    assert all(f"{name} ({type})" in report for name, type in stored.items())


def test_leftovers_are_listed(toys, tmp_path):
    strangers = {"blk.0.attn_sinks.weight": np.ones(8), "rope_freqs.weight": np.ones(3)}
    path = changed(toys, tmp_path, add=strangers)
    with Loaded(path) as w:
        assert w.leftovers == tuple(strangers) and not w.by_name.keys() & strangers.keys()
    assert any("not used" in found and "rope_freqs.weight" in found for found in warning_list(path))


def test_scales_belong_to_their_weights(toys, tmp_path):
    scales = {"blk.0.attn_qkv.scale": np.full(1, 2.0), "blk.1.ffn_down_exps.scale": np.arange(10.0), "blk.3.attn_q.scale": np.full(1, 3.0)}
    with Loaded(changed(toys, tmp_path, add=scales)) as w:
        assert {weight.name: scale.get().tolist() for weight, scale in w.scales.items()} == {
            name.replace(".scale", ".weight"): value.tolist() for name, value in scales.items()
        }
        assert w.scales[w.blk[0].attn_qkv] == w.blk[0].attn_qkv_scale and w.leftovers == ()
    refused(changed(toys, tmp_path, add={"blk.1.ffn_down_exps.scale": np.ones(1)}), "shape [1], wanted [10]")
    with Loaded(changed(toys, tmp_path, "legacy", add={"blk.0.ssm_in.scale": np.full(1, 2.0)})) as w:
        assert {weight.name for weight in w.scales} == {"blk.0.attn_qkv.weight", "blk.0.attn_gate.weight"}


# --- warnings (C07, C10)


def warning_list(path):
    with GgufFile.open(path) as file:
        return warnings(file, table_of(file).check(file))


def test_good_files_give_no_warning(toys, bard):
    for path in (toys.t0, toys.mtp, bard):
        assert warning_list(path) == []


@pytest.mark.parametrize("suffix", ["attn_norm.weight", "blk.4.nextn.hnorm.weight", "blk.0.ssm_norm.weight"])
def test_norms_centred_at_zero(toys, tmp_path, suffix):
    arrays = read_arrays(toys.mtp)
    norms = {name: ("f32", array - 1) for name, array in arrays.items() if name.endswith(suffix)}
    found = warning_list(changed(toys, tmp_path, "mtp", replace=norms))
    assert len(found) == 1 and "centred at 0" in found[0] and all(name in found[0] for name in norms)


def test_coarse_gates(toys):
    path = toys.file(geometry="tiny-q", tensor_types={"*.ssm_ba.weight": "q4_k"})
    with Loaded(path) as w:
        assert w.blk[0].ssm_ba.type.name == "q4_k"
    found = warning_list(path)
    assert len(found) == 1 and "blk.2.ssm_ba.weight (q4_k)" in found[0]
    assert warning_list(toys.file(geometry="tiny-q", tensor_types={"*.ssm_ba.weight": "q8_0"})) == []


def test_roles_group_a_file(toys):
    roles = {}
    for decl, info in checked(toys.mtp).found:
        roles.setdefault(decl.role, set()).add(info.name)
    assert {"blk.0.ssm_ba.weight", "blk.0.ssm_a", "blk.0.ssm_dt.bias", "blk.3.ffn_gate_inp_shexp.weight"} <= roles["gate"]
    assert roles["conv"] == {f"blk.{il}.ssm_conv1d.weight" for il in range(3)}
    assert roles["mtp"] == {name for name in read_arrays(toys.mtp) if name.startswith("blk.4.")}
    assert set(roles) == {"embedding", "output", "norm", "attention", "linear attention", "gate", "conv", "router", "expert", "shared expert", "mtp"}


# --- repacked weights


def product(weight, x):
    """Multiply on the CPU with the weight where it lies: x [n, n_in] → [n, n_out]."""
    with ggml.Context(8, 8) as ctx, ggml.device("CPU").init() as backend:
        ops, inp = ggml.Ops(ctx), ctx.new_tensor(types.F32, x.shape[1], x.shape[0])
        out = ops.mul_mat(weight, inp)
        graph = ggml.Graph(ctx, 8)
        graph.expand(out)
        with ggml.alloc_tensors(ctx, ggml.device("CPU").buffer_type()):
            inp.set(x)
            backend.compute(graph)
            return out.get()


def test_repacking_changes_speed_only(toys):
    path = toys.file(type="q4_k")
    x = np.random.default_rng(0).standard_normal((7, 256), np.float32)
    with Loaded(path, repack=False) as mapped, Loaded(path, repack="dense+head") as dense, Loaded(path, repack=True) as full:
        assert mapped.planned["repacked"] == 0
        assert full.planned["mapped"] + full.planned["repacked"] == dense.planned["mapped"] + dense.planned["repacked"] == mapped.planned.total()
        experts = sum(t.nbytes for name, t in full.by_name.items() if "_exps" in name)
        assert full.planned["repacked"] == dense.planned["repacked"] + experts > experts
        assert any(note.startswith("repacked as CPU_") and "q4_k" in note for note in full.notes)
        # rows are looked up in the embedding, which needs them as they were
        assert np.array_equal(full.token_embd.get(), mapped.token_embd.get())
        want = product(mapped.blk[0].attn_qkv, x)
        assert nmse(product(full.blk[0].attn_qkv, x), want) < 1e-4
        # mutation: another block's weights are far away
        assert nmse(product(full.blk[1].attn_qkv, x), want) > 1


def test_a_tied_head_is_not_repacked(toys):
    sizes = dict(type="q4_k", n_vocab=104)  # a multiple of 8 rows, as the repacked layouts want
    with Loaded(toys.file(**sizes, tied=True), repack=True) as w, Loaded(toys.file(**sizes), repack=True) as untied:
        assert w.output == w.token_embd and w.output.get().shape == (104, 256)
        assert untied.planned["repacked"] - w.planned["repacked"] == untied.output.nbytes


def test_f32_weights_stay_mapped(toys):
    with Loaded(toys.t0, repack=True) as w:
        assert w.planned["repacked"] == 0 and w.planned["copied"] == 0


def test_repack_wants_a_value_it_knows(toys):
    for wrong in ("yes", "dense+heads", "", None):
        with pytest.raises(OptionError, match=re.escape(repr(wrong))):
            Loaded(toys.t0, repack=wrong)


# --- devices


class Twin(ggml.Device):
    """The same device under another identity."""

    __slots__ = ()

    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return id(self)


def test_blocks_are_spread_over_devices_in_order(toys):
    cpu = ggml.device("CPU")
    a, b = Twin(cpu._p), Twin(cpu._p)
    with Loaded(toys.t0, devices=[a, b]) as w:
        assert [w.device_of(il) for il in range(4)] == [a, a, b, b]
        assert_equal_values(values_of(w), read_arrays(toys.t0))
    with Loaded(toys.file(tied=True), devices=[a, a, a, b]) as w:
        assert w.output != w.token_embd and np.array_equal(w.output.get(), w.token_embd.get())
        assert [w.device_of(il) for il in range(4)] == [a, a, a, b]
    for devices in ([a] * 5, []):
        with pytest.raises(OptionError, match=f"{len(devices)} devices for 4 blocks"):
            with GgufFile.open(toys.t0) as file:
                load_weights(file, table_of(file), devices)


# --- life and death


def test_closing_frees_and_may_be_repeated(toys):
    def resident():
        gc.collect()
        return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])

    def cycle(n):
        for _ in range(n):
            with Loaded(toys.t0, mmap=False) as w:
                held = w.token_embd
            w.close()
        return held

    cycle(5)
    before = resident()
    cycle(100)
    assert resident() - before < 5 * 1024


def test_a_load_that_fails_halfway_frees_its_buffers(toys, monkeypatch):
    buffers, alloc = [], ggml.alloc_tensors

    def failing(*args):
        buffers.append(alloc(*args))
        monkeypatch.setattr(ggml.Tensor, "memory", lambda _: 1 / 0)
        return buffers[-1]

    monkeypatch.setattr(ggml, "alloc_tensors", failing)
    with GgufFile.open(toys.t0) as file, pytest.raises(ZeroDivisionError):
        load_weights(file, table_of(file), ggml.device("CPU"), mmap=False)
    assert len(buffers) == 1 and buffers[0].closed


def test_a_refused_file_can_be_used_again(toys):
    with GgufFile.open(toys.t0) as file:
        table = table_of(file)
        table.declare("nobody.weight", (3,), role="norm")
        with pytest.raises(TensorError, match="nobody.weight"):
            load_weights(file, table, ggml.device("CPU"))
        with load_weights(file, table_of(file), ggml.device("CPU")) as w:
            assert_equal_values(values_of(w), read_arrays(toys.t0))
