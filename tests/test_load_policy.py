"""Which weights are rewritten, copied and mapped, counted: by policy, provider and size of the file."""

import pytest

import qwen3next_ggml as q
from qwen3next_ggml.errors import BackendError, OptionError
from qwen3next_ggml.ggml import device, provider
from qwen3next_ggml.tensors.policy import KINDS, SMALL, choose_policy, kind_of

from .test_tensors import Loaded, checked


def repacked(weights):
    """The names of weights that lie in a layout of their own."""
    return {name for name, tensor in weights.by_name.items() if weights.placed[name] == "repacked"}


def decls_of(path):
    return {decl.name: decl for decl, _ in checked(path).found}


def names_of(path, *kinds):
    return {decl.name for decl, info in checked(path).found if kind_of(decl) in kinds and info.type_name == "q4_k"}


@pytest.mark.parametrize(
    "asked, kinds", [(False, ()), (True, KINDS), ("dense", ("dense",)), ("dense+head", ("dense", "head")), ("expert", ("expert",))]
)
def test_a_policy_repacks_its_kinds_and_no_others(toys, asked, kinds):
    path = toys.file(type="q4_k", n_vocab=104)  # a multiple of 8 rows, as the repacked layouts want
    with Loaded(path, repack=asked) as w:
        assert repacked(w) == names_of(path, *kinds)
        assert not w.repacked and w.planned["repacked"] == sum(w.by_name[name].nbytes for name in repacked(w))


def test_every_product_has_a_kind(toys):
    kinds = {}
    for decl, _ in checked(toys.file(type="q4_k", mtp=True)).found:
        kinds.setdefault(kind_of(decl), set()).add(decl.attribute)
    assert kinds["expert"] == {"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"} and kinds["head"] == {"output"}
    assert {"attn_qkv", "attn_q", "ssm_out", "ffn_gate_inp", "ffn_up_shexp", "nextn_eh_proj"} <= kinds["dense"]
    assert {"token_embd", "attn_norm", "ssm_a", "ssm_conv1d"} <= kinds[None]


def test_small_files_are_copied_and_of_large_ones_what_every_step_reads_whole(toys, bard, monkeypatch):
    assert not choose_policy("0.25.3", (), SMALL, repack=False, mmap="auto").mmap
    assert choose_policy("0.25.3", (), SMALL + 1, repack=False, mmap="auto").mmap
    for mmap in (True, False):
        policy = choose_policy("0.25.3", (), SMALL, repack=False, mmap=mmap)
        assert policy.mmap is mmap and not policy.copied
    with q.load() as model:
        assert set(model.weights.placed.values()) == {"copied"} and "copied: below 256 MiB" in model.weights.policy.why
    monkeypatch.setattr("qwen3next_ggml.tensors.policy.SMALL", 1000)
    with q.load(repack=False) as model:
        placed, decls = model.weights.placed, [decl for decl, _ in checked(bard).found]
        assert {placed[decl.name] for decl in decls if kind_of(decl) in ("dense", "head")} == {"copied"}
        assert {placed[decl.name] for decl in decls if kind_of(decl) not in ("dense", "head")} == {"mapped"}
        assert model.weights.blk[0].attn_qkv in model.weights.stacks and model.weights.blk[0].ffn_gate_exps not in model.weights.stacks
    with q.load(mmap=True) as model:
        assert set(model.weights.placed.values()) == {"mapped"}


def test_a_file_beyond_the_memory_is_not_asked_into_huge_pages():
    assert choose_policy("0.25.3", (), 1 << 30, repack=False, mmap=True).huge
    assert not choose_policy("0.25.3", (), 1 << 50, repack=False, mmap=True).huge


def test_copies_of_several_threads_are_the_file(toys):
    """Threads share the work and not the tensors, whatever is rewritten."""
    path = toys.file(type="q4_k", n_vocab=104)
    for repack in (False, "dense"):
        with Loaded(path, mmap=False, repack=repack, n_threads=1) as one, Loaded(path, mmap=False, repack=repack, n_threads=4) as four:
            for name in one.placed.keys() - repacked(one):
                assert (one.by_name[name].get() == four.by_name[name].get()).all(), name
            assert one.placed == four.placed


def test_pages_of_the_file_are_given_back_after_a_copy(toys):
    """Else a copied file would be held twice for as long as it takes."""
    path = toys.file(type="f16", geometry="tiny-q", n_layer=8)
    with Loaded(path, mmap=False) as w:
        size, start = path.stat().st_size, None
        resident = 0
        for line in open("/proc/self/smaps"):
            if "-" in line.split()[0]:
                start = line.rstrip().endswith(str(path))
            elif start and line.startswith("Rss:"):
                resident += int(line.split()[1]) << 10
    assert w.planned["copied"] > 4 << 20 and resident < size / 4


@pytest.mark.parametrize("repack", ["dense+", "none", 1.5, None, ["dense"]])
def test_what_is_no_policy_is_refused(repack):
    with pytest.raises(OptionError, match="repack is"):
        choose_policy("0.25.3", (), 0, repack=repack, mmap=True)


@pytest.mark.parametrize("version, features, kept", [
    ("0.15.3", ("AVX2",), set()),
    ("0.20.2", ("AVX2",), set()),
    ("0.25.3", ("AVX2",), {"q4_k"}),
    ("0.25.3-dirty", ("NEON",), set()),
    ("1.0.0", ("AVX512",), {"q4_k"}),
])  # fmt: skip
def test_auto_repacks_what_gains_by_it(toys, version, features, kept):
    """Dense products and the head, never experts; beside the stored ones where tiled kernels take those."""
    policy = choose_policy(version, features, 1000, repack="auto", mmap="auto")
    for decl, _ in checked(toys.file(type="q4_k")).found:
        assert policy.repacks(decl) == (kind_of(decl) in ("dense", "head"))
    assert {name for name in ("q4_k", "q4_0", "iq4_nl", "mxfp4") if policy.keeps(name)} == kept and policy.why
    asked = choose_policy(version, features, 1000, repack="dense", mmap="auto")
    assert not asked.keeps("q4_k") and asked.tiled == policy.tiled


def keeps(type):
    """Say whether over this provider weights of a type are held twice."""
    return type == "q4_k" and provider().version.startswith("0.25") and "AVX2" in device("CPU").features


@pytest.mark.parametrize("type", ["q4_k", "q4_0"])
def test_auto_on_this_provider(toys, type):
    """Counted: what is rewritten, and whether instead of the stored weight, follows from the type and the version of ggml this runs over."""
    path = toys.file(type=type, geometry="tiny-q", n_vocab=104)
    with Loaded(path, repack="auto") as auto, Loaded(path, repack=True) as full, Loaded(path) as stored:
        wanted = {name for name in repacked(full) if kind_of(decls_of(path)[name]) in ("dense", "head")}
        assert len(wanted) == 29 and not any("exps" in name for name in wanted)
        twice = {weight.name for weight in auto.repacked}
        assert (repacked(auto), twice) == ((set(), wanted) if keeps(type) else (wanted, set()))
        assert all(weight.name == other.name and weight.ne == other.ne for weight, other in auto.repacked.items())
        assert auto.planned.total() - stored.planned.total() == sum(weight.nbytes for weight in auto.repacked)


def test_what_is_held_twice_stays_mapped(toys, monkeypatch):
    """Only many tokens at a time read the stored one; types without a layout of their own are copied as before."""
    monkeypatch.setattr("qwen3next_ggml.tensors.policy.SMALL", 1000)
    with Loaded(toys.file(type="q4_k", geometry="tiny-q", n_vocab=104), repack="auto", mmap="auto") as w:
        wanted = "mapped" if keeps("q4_k") else "repacked"
        assert {w.placed[name] for name in ("blk.0.attn_qkv.weight", "output.weight")} == {wanted}
        assert w.placed["blk.0.ffn_gate_inp.weight"] == "copied" and w.placed["blk.0.ffn_up_exps.weight"] == "mapped"


def test_rewritten_weights_are_not_read_back(toys):
    """ggml has no function for it: without the check the interpreter would be gone."""
    with Loaded(toys.file(type="q4_k"), repack="dense") as w:
        for read in (w.blk[0].attn_qkv.get, w.blk[0].attn_qkv.raw):
            with pytest.raises(BackendError, match="repacked as CPU_REPACK.*repack=False"):
                read()
        assert w.blk[0].ffn_up_exps.get().shape == w.blk[0].ffn_up_exps.shape[::-1]


def test_a_copy_does_not_touch_the_map(toys, monkeypatch):
    """Counted: what lies in the file as it is wanted is read, not copied out of the map, which is several times as slow."""
    path, read = toys.file(type="q4_k", n_vocab=104), []
    data = q.gguf_file.GgufFile.data
    monkeypatch.setattr(q.gguf_file.GgufFile, "data", lambda self, name: read.append(name) or data(self, name))
    with Loaded(path, mmap=False) as w:
        assert set(w.placed.values()) == {"copied"} and not read
    with Loaded(path, mmap=False, repack="dense") as w:
        assert len(read) == len(repacked(w)) > 0
