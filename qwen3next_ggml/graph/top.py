"""The largest logits, found where the logits are (level 5)."""

from .. import ggml
from .builder import GraphBuilder


def top_logits(g: GraphBuilder, logits: ggml.Tensor, k: int) -> tuple[ggml.Tensor, ggml.Tensor]:
    """Return ids [k, n] of the `k` largest of logits [n_vocab, n], in any order, and those logits [1, k, n]."""
    n_vocab, n, _, _ = logits.ne
    ids = g.reshape_2d(g.argmax(logits), 1, n) if k == 1 else g.top_k(logits, k)
    values = g.get_rows(g.reshape_3d(logits, 1, n_vocab, n), ids)
    g.expand(values)
    return ids, values
