"""Toys are the same everywhere, differ only where they should, and hold what real files hold."""

import hashlib

import numpy as np
import pytest

from qwen3next_ggml import toy
from qwen3next_ggml.errors import OptionError, QGraphError, TensorError, UnsupportedModelError
from qwen3next_ggml.ggml import GgmlType
from qwen3next_ggml.ggml import types as types_module
from qwen3next_ggml.gguf_file import GgufFile
from qwen3next_ggml.hparams import Metadata
from qwen3next_ggml.models.qwen3next import load_arch_hparams
from qwen3next_ggml.tokenizer import Tokenizer
from qwen3next_ggml.toy import write_toy

from .kit import read_arrays, read_metadata, run_python


def types_of(path):
    with GgufFile.open(path) as file:
        return {name: info.type_name for name, info in file.tensors.items()}


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_toy_is_the_same_in_every_process(toys, tmp_path):
    for hash_seed in "12":
        path = tmp_path / f"{hash_seed}.gguf"
        code = "import sys; from qwen3next_ggml.toy import write_toy; write_toy(sys.argv[1], mtp=True)"
        run_python(code, path, env={"PYTHONHASHSEED": hash_seed})
        assert digest(path) == digest(toys.mtp)


def test_tensors_depend_on_their_name_and_the_seed_alone(toys):
    t0, deeper, other = read_arrays(toys.mtp), read_arrays(toys.file(n_layer=5, mtp=True)), read_arrays(toys.file(seed=1))
    same = [name for name in t0 if not name.startswith("blk.4.")]
    assert len(same) == len(other) and all(np.array_equal(t0[name], deeper[name]) for name in same)
    assert not any(np.array_equal(t0[name], other[name]) for name in same)
    drawn = [array.ravel()[:6].tobytes() for array in t0.values()]
    assert len(set(drawn)) == len(drawn)


def test_values_are_plausible(toys):
    for name, array in read_arrays(toys.mtp).items():
        assert np.isfinite(array).all()
        if "norm" in name:
            assert abs(array.mean() - 1) < 0.1 and array.std() > 0.01, name
        elif name.endswith("ssm_a"):
            assert (array < 0).all()
        elif array.ndim > 1 and array.size > 2000:
            assert abs(array.mean()) < 0.1 * array.std(), name


def test_no_two_sizes_of_t0_agree_by_accident(toys):
    with GgufFile.open(toys.t0) as file:
        hp = load_arch_hparams(Metadata(file.metadata, file.arch))
    head, conv = hp.n_head * hp.n_embd_head_k, 2 * hp.ssm_n_group * hp.ssm_d_state + hp.ssm_d_inner
    widths = [hp.n_embd, 2 * head, head, hp.n_head_kv * hp.n_embd_head_k, conv, 2 * hp.ssm_dt_rank, hp.n_expert, hp.n_ff_exp, hp.n_ff_shexp, hp.n_vocab]
    assert len(set(widths)) == len(widths)


@pytest.mark.parametrize("type", ["q8_0", "q4_0", "q4_k", "q6_k", "iq4_nl", "bf16", "f16"])
def test_matrices_get_the_type(toys, type):
    found = types_of(toys.file(geometry="tiny-q", type=type, mtp=True))
    small = {name for name in found if "norm" in name or ".ssm_conv1d" in name or ".ssm_a" in name or ".ssm_dt" in name or "gate_inp" in name}
    assert {name for name, t in found.items() if t == "f32"} == small and len(small) > 30
    assert {found[name] for name in found.keys() - small} == {type}


def test_types_of_wide_blocks_choose_a_geometry_that_fits(toys):
    assert set(types_of(toys.file(type="q4_k")).values()) == {"f32", "q4_k"}
    # rows of 40 and 56 values do not fill blocks of 32
    narrow = types_of(toys.file(type="q8_0"))
    assert {name.split(".")[2] for name, t in narrow.items() if t == "f16"} == {"ffn_down_exps", "ffn_down_shexp"}
    override = types_of(toys.file(geometry="tiny-q", type="q4_k", tensor_types={"*.attn_[qkv].weight": "q6_k", "output*": "f16"}))
    assert (override["blk.3.attn_v.weight"], override["output.weight"], override["blk.3.attn_output.weight"]) == ("q6_k", "f16", "q4_k")


def test_quantised_toys_hold_the_same_weights(toys):
    exact, rough = (read_arrays(toys.file(geometry="tiny-q", type=type)) for type in ("f32", "q8_0"))
    for name in exact:
        assert np.abs(exact[name] - rough[name]).max() <= 0.01 * np.abs(exact[name]).max(), name


def test_metadata_can_be_set_and_dropped(tmp_path):
    changes = {"block_count": 3, "attention.recurrent_layers": [True, False, True], "full_attention_interval": None, "general.name": "x"}
    path = write_toy(tmp_path / "t.gguf", metadata=changes)
    md = read_metadata(path)
    assert md["qwen3next.attention.recurrent_layers"] == [True, False, True] and md["general.name"] == "x"
    assert "qwen3next.full_attention_interval" not in md
    assert "blk.1.attn_q.weight" in read_arrays(path) and "blk.2.ssm_a" in read_arrays(path)


def test_optional_tensors(toys):
    with_all = {"nextn_shared_head_norm", "nextn_embed_tokens", "nextn_shared_head_head"}
    nextn = {name.split(".", 2)[2] for name in read_arrays(toys.file(mtp=True, optional=tuple(sorted(with_all)))) if ".nextn." in name}
    assert nextn == {f"nextn.{n}.weight" for n in ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head_head", "shared_head_norm")}
    assert "output.weight" in read_arrays(toys.t0) and "output.weight" not in read_arrays(toys.file(tied=True))


@pytest.mark.parametrize("n_vocab", [4, 40, 97, 259, 260, 1000])
def test_the_vocabulary_has_the_size_asked_for_and_can_say_hi(toys, n_vocab):
    md = read_metadata(toys.file(n_vocab=n_vocab))
    tokens = md["tokenizer.ggml.tokens"]
    assert len(set(tokens)) == n_vocab == len(md["tokenizer.ggml.token_type"])
    tokenizer = Tokenizer.from_metadata(md)
    assert tokenizer.decode(tokenizer.encode("hihi")) == "hihi"
    assert tokens[md["tokenizer.ggml.eos_token_id"]] == ("<|im_end|>" if n_vocab >= 260 else "<|endoftext|>")
    if n_vocab >= 97:
        assert tokenizer.decode(tokenizer.encode("Say (hi) at 10:45,\nplease!")) == "Say (hi) at 10:45,\nplease!"
    if n_vocab >= 260:
        assert tokenizer.decode(tokenizer.encode("naïve 漢字 🙂\t")) == "naïve 漢字 🙂\t"


def test_merges_on_request(toys):
    # gguf-py's reader takes seconds here
    with GgufFile.open(toys.file(n_vocab=66000, n_merges=65700)) as file:
        md = dict(file.metadata)
    pieces = [merge.split(" ") for merge in md["tokenizer.ggml.merges"]]
    known = set(md["tokenizer.ggml.tokens"])
    assert len(pieces) == 65700 and all(a in known and b in known and a + b in known for a, b in pieces)


# --- big tensors recombine blocks


@pytest.mark.parametrize("type", ["f32", "q8_0", "q4_k"])
def test_recombined_rows_are_all_different(tmp_path, monkeypatch, type):
    sizes = dict(geometry="tiny-q", type=type, n_layer=1, metadata={"embedding_length": 512}, n_vocab=300)
    plain = read_arrays(write_toy(tmp_path / "plain.gguf", **sizes))
    monkeypatch.setattr(toy, "BANK", 1 << 15)
    reused = read_arrays(write_toy(tmp_path / "reused.gguf", **sizes))
    n_bank = (1 << 15) // 512
    for name in ("token_embd.weight", "blk.0.ffn_up_exps.weight"):
        rows = reused[name].reshape(-1, 512)
        assert len(np.unique(rows, axis=0)) == len(rows) > 4 * n_bank
        assert np.array_equal(rows[:n_bank], plain[name].reshape(-1, 512)[:n_bank])
        assert not np.array_equal(rows[n_bank:], plain[name].reshape(-1, 512)[n_bank:])
    assert np.array_equal(plain["blk.0.ffn_gate_inp.weight"], reused["blk.0.ffn_gate_inp.weight"])


def test_memory_is_bounded(tmp_path):
    """One layer of the published width with 64 experts: 0.9 GB of f32 values pass through a small process."""
    code = """
import sys
from qwen3next_ggml.toy import write_toy
write_toy(sys.argv[1], geometry="qwen3-next-80b", n_layer=1, type="q4_0", n_vocab=1000, metadata={"expert_count": 64})
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""
    done = run_python(code, tmp_path / "wide.gguf")
    assert int(done.stdout) < 160 * 1024, done.stderr
    assert (tmp_path / "wide.gguf").stat().st_size > 120e6


# --- refusals


@pytest.mark.parametrize(
    "options, error, words",
    [
        (dict(geometry="huge"), OptionError, "tiny, tiny-q, qwen3-next-80b"),
        (dict(type="q9"), TensorError, "q9"),
        (dict(type="i32"), TensorError, "i32"),
        (dict(n_layer=0), OptionError, "n_layer is 0"),
        (dict(n_vocab=3), OptionError, "n_vocab is 3"),
        (dict(arch="kimi-linear"), UnsupportedModelError, "supported: qwen3next"),
        (dict(metadata={"rope.dimension_count": 7}), UnsupportedModelError, "7"),
        (dict(tensor_types={"*ssm_ba*": "q4_k"}), TensorError, "blk.0.ssm_ba.weight"),
    ],
)
def test_refusals_leave_no_file_behind(tmp_path, options, error, words):
    path = tmp_path / "t.gguf"
    path.write_text("precious")
    with pytest.raises(error, match=words):
        write_toy(path, **options)
    assert [p.name for p in tmp_path.iterdir()] == ["t.gguf"] and path.read_text() == "precious"


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = write_toy(tmp_path / "t.gguf")
    before = digest(path)

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(toy, "_raw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_toy(path, seed=1)
    assert digest(path) == before and [p.name for p in tmp_path.iterdir()] == ["t.gguf"]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(QGraphError, match="No such file"):
        write_toy(tmp_path / "none" / "t.gguf")


@pytest.mark.parametrize("type", ["iq1_s", "iq2_xxs", "iq2_xs"])
def test_types_that_want_an_importance_matrix_are_drawn_block_by_block(toys, type):
    """Values have the spread that keeps a product's size, around 0, and no two rows or tensors are equal."""
    path, stored = toys.file(type=type), GgmlType.of(type)
    seen = set()
    with GgufFile.open(path) as file:
        for name, info in file.tensors.items():
            if info.type_name != type:
                continue
            rows = file.data(name).reshape(-1, stored.row_size(info.ne[0]))
            values = types_module.dequantize(stored, rows, info.ne[0])
            wanted = 1.0 if name == "token_embd.weight" else info.ne[0] ** -0.5
            assert abs(values.std() / wanted - 1) < 0.1 and abs(values.mean()) < 0.1 * wanted, name
            assert len(np.unique(rows, axis=0)) == len(rows), name
            seen.add(rows[0].tobytes())
        assert len(seen) == sum(info.type_name == type for info in file.tensors.values()) > 20
    assert digest(toys.file(type=type, seed=1)) != digest(path)
