"""The shared expert as one more of the picked ones: where it lies behind them, and the same numbers to the bit in fewer nodes."""

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml.graph.options import LEAN

from .kit.gguf_bytes import edit_gguf
from .test_tensors import Loaded, values_of

ALIKE = {"expert_shared_feed_forward_length": 40}
APART = LEAN.but(shared_as_expert=False)
NAMES = [f"ffn_{kind}{what}" for kind in ("moe_", "") for what in ("up", "gate", "swiglu")] + ["ffn_moe_down", "ffn_shexp"]
LAYOUTS = [(), ("ffn_gate_up_exps",)]


def logits(model, options):
    with model.session(n_ctx=256, graph=options) as s:
        return np.concatenate([s.decode(list(range(1, 20)), logits="all"), *(s.decode([t]) for t in range(30, 36)), s.decode([5, 6], logits="all")])


def counts(model, options):
    with model.session(n_ctx=256, graph=options) as s:
        stats = s.graph(1).stats()
        return np.array([stats["kernels"], stats["barriers"]])


@pytest.mark.parametrize("layouts", LAYOUTS, ids=["gate and up", "gate_up"])
@pytest.mark.parametrize("type", ["f32", "f16", "q8_0"])
def test_one_more_matrix_behind_the_others(toys, type, layouts):
    path = toys.file(type=type, metadata=ALIKE, layouts=layouts, mtp=True)
    with Loaded(path, mmap=False) as w, Loaded(path, mmap=True) as mapped:
        assert len(w.one_more) == 2 * 5 and not mapped.one_more
        for wb in w.blk:
            experts = [wb.ffn_gate_up_exps] if layouts else [wb.ffn_gate_exps, wb.ffn_up_exps]
            for many, one in ((experts, [wb.ffn_gate_shexp, wb.ffn_up_shexp]), ([wb.ffn_down_exps], [wb.ffn_down_shexp])):
                whole = w.one_more[many[0]]
                assert whole.ne == (many[0].ne[0], sum(x.ne[1] for x in many), 11, 1) and {x.view_src for x in [*many, *one]} == {whole}
                assert one[0].view_offs == 10 * whole.nb[2] and {x.ne[2] for x in many} == {10}
            assert w.stacks[wb.ffn_gate_shexp].parts == (wb.ffn_gate_shexp, wb.ffn_up_shexp)
        assert all(np.array_equal(value, mapped.by_name[name].get()) for name, value in values_of(w).items())
        assert w.planned["copied"] == sum(mapped.planned.values())


@pytest.mark.parametrize("layouts", LAYOUTS, ids=["gate and up", "gate_up"])
@pytest.mark.parametrize("type", ["f32", "q8_0"])
def test_the_same_to_the_bit_from_fewer_nodes(toys, type, layouts):
    """Two products and an activation a layer: five barriers, as a product has one inside."""
    with qwen3next_ggml.load(toys.file(type=type, metadata=ALIKE, layouts=layouts), mmap=False, n_threads=1) as model:
        assert np.array_equal(logits(model, LEAN), logits(model, APART))
        assert (counts(model, APART) - counts(model, LEAN)).tolist() == [4 * 3, 4 * 5]


def test_the_embedded_model_runs_so():
    with qwen3next_ggml.load(n_threads=1) as model:
        n_layer = model.hparams.n_layer
        assert (counts(model, APART) - counts(model, LEAN)).tolist() == [n_layer * 3, n_layer * 5]
        assert np.array_equal(logits(model, LEAN), logits(model, APART))


def test_another_expert_in_its_place_shows(toys):
    """The mutation: what lies behind is not the shared expert."""
    with qwen3next_ggml.load(toys.file(metadata=ALIKE), mmap=False, n_threads=1) as model:
        right = logits(model, LEAN)
        down = model.weights.blk[2].ffn_down_shexp
        down.set(down.get() * 0.5)
        assert np.abs(logits(model, LEAN) - right).max() > 1e-2
        assert np.array_equal(logits(model, LEAN), logits(model, APART))


def test_what_is_not_alike_lies_apart(toys):
    """Of another width, of another type, with a scale of its own, or mapped."""
    with qwen3next_ggml.load(toys.t0, mmap=False, n_threads=1) as model:
        # down projections are as wide as the model, but take vectors of other lengths
        assert not model.weights.one_more and (counts(model, LEAN) == counts(model, APART)).all()
    path = toys.file(metadata=ALIKE, tensor_types={"blk.1.ffn_down_shexp.weight": "f16"})
    with qwen3next_ggml.load(path, mmap=False, n_threads=1) as model:
        assert len(model.weights.one_more) == 2 * 4 - 1
        assert (counts(model, APART) - counts(model, LEAN)).tolist() == [3 * 3, 3 * 5]
        assert np.array_equal(logits(model, LEAN), logits(model, APART))
    with qwen3next_ggml.load(toys.file(metadata=ALIKE), mmap=True, n_threads=1) as model:
        assert not model.weights.one_more and (counts(model, LEAN) == counts(model, APART)).all()


def test_a_scale_keeps_it_apart(toys, tmp_path):
    edit_gguf(toys.file(metadata=ALIKE), tmp_path / "scaled.gguf", add={"blk.1.ffn_up_shexp.scale": np.full(1, 2.0)})
    with qwen3next_ggml.load(tmp_path / "scaled.gguf", mmap=False, n_threads=1) as model:
        assert (counts(model, APART) - counts(model, LEAN)).tolist() == [3 * 3, 3 * 5]
        assert np.array_equal(logits(model, LEAN), logits(model, APART))


@pytest.mark.parametrize("layouts", LAYOUTS, ids=["gate and up", "gate_up"])
def test_both_are_found_under_their_names(toys, layouts):
    """Values of their own extent, and the option stays on."""
    names = [f"{name}-{il}" for il in (1, 3) for name in (*NAMES, *(["ffn_moe_gate_up"] if layouts else []))]
    with qwen3next_ggml.load(toys.file(metadata=ALIKE, layouts=layouts), mmap=False, n_threads=1) as model:
        seen = []
        for options in (LEAN, APART):
            with model.session(n_ctx=256, graph=options) as s, s.capture(*names) as found:
                assert s.probes.key(s.probes.base).options.shared_as_expert == options.shared_as_expert
                s.decode(list(range(1, 20)))
                s.decode([30])
                seen.append([found[name] for name in names])
        assert all(np.array_equal(a, b) for a, b in zip(*seen, strict=True))
