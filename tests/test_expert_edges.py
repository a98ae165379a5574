"""C24 at the edges of the counts: one expert, all of them used, more used than there are, none; and batches that leave a ragged rest."""

from itertools import product

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml.errors import UnsupportedModelError
from tests.kit import max_abs, reference_of
from tests.kit.gguf_bytes import edit_gguf

TOLERANCE = 1e-4
TOKENS = np.random.default_rng(17).integers(0, 97, 41).tolist()
COUNTS = {"one expert": (1, 1), "all of three": (3, 3), "one of ten": (10, 1), "all of ten": (10, 10)}
F32 = dict(n_ctx=256, type_k="f32", type_v="f32", flash_attn=False)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("layouts", [(), ("ffn_gate_up_exps",)], ids=["apart", "merged"])
def test_any_number_of_experts_is_float64s(toys, count, layouts):
    """Whole prompts and single tokens, plain and lean."""
    n_expert, n_used = COUNTS[count]
    metadata = {"expert_count": n_expert, "expert_used_count": n_used}
    want = reference_of(toys.file(metadata=metadata)).decode(TOKENS)
    with qwen3next_ggml.load(toys.file(metadata=metadata, layouts=layouts), n_threads=1) as model:
        assert (model.hparams.n_expert, model.hparams.n_expert_used) == (n_expert, n_used)
        for graph, n_ubatch in product(("plain", "lean"), (1, 7, 64)):
            with model.session(**F32, graph=graph, n_ubatch=n_ubatch) as s:
                assert max_abs(s.decode(TOKENS, logits="all"), want) < TOLERANCE
    # the experts show in the logits
    fewer = reference_of(toys.file(metadata=metadata | {"expert_used_count": max(1, n_used - 1)})).decode(TOKENS)
    assert n_used == 1 or max_abs(fewer, want) > 100 * TOLERANCE


@pytest.mark.parametrize("changes, says", [
    ({"expert_used_count": 11}, "11.*10"), ({"expert_count": 0}, "0 experts"),
    ({"expert_count": 0, "expert_used_count": 0}, "0 experts, 0 used"),
    ({"expert_used_count": 0}, "10 experts, 0 used"), ({"expert_count": None}, "0 experts"),
], ids=str)  # fmt: skip
def test_counts_that_mean_nothing_are_refused_at_load(toys, tmp_path, changes, says):
    path = tmp_path / "t.gguf"
    edit_gguf(toys.t0, path, metadata={f"qwen3next.{key}": value for key, value in changes.items()})
    with pytest.raises(UnsupportedModelError, match=says):
        qwen3next_ggml.load(path)


@pytest.mark.parametrize("rest", range(1, 10), ids=lambda n: f"32 and {n}")
def test_a_ragged_last_ubatch(toys, rest):
    """32 tokens and a rest of 1 to 9, as in llama.cpp #24064."""
    with qwen3next_ggml.load(toys.t0, n_threads=1) as model, model.session(**F32, n_ubatch=32) as s:
        got = s.decode(TOKENS[: 32 + rest], logits="all")
    assert max_abs(got, reference_of(toys.t0).decode(TOKENS[: 32 + rest])) < TOLERANCE
