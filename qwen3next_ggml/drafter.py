"""Run the NextN head beside the trunk: keep its K and V in step, guess the tokens that come next (level 7).

Position p of the head holds K and V of (hidden after p − 1, token at p), in the cell where the trunk keeps position p: what
forgets, shares or masks the one does so to the other. Knows no sampler and no text.
"""

from collections.abc import Callable, Sequence

import numpy as np

from .errors import OptionError, UnsupportedModelError
from .graph.inputs import Sizes
from .graph.key import GraphKey
from .graph.options import GraphOptions
from .memory import HybridMemory

# so few tokens are fed to the head together with the next draft's first step, which costs less than a run of their own
MAX_WAITING = 16


def check_head(model) -> None:
    """Raise UnsupportedModelError for a file without a NextN head, OptionError where it was not loaded."""
    hp = model.hparams
    if hp.n_layer_nextn != 1 or not hasattr(model.arch, "build_arch_graph_mtp"):
        raise UnsupportedModelError(
            f"{model.file.path}: drafting needs one NextN block of a {model.file.arch} that has a graph for it, "
            f"got {hp.n_layer_nextn} (nextn_predict_layers)"
        )
    if model.weights.blk[hp.n_layer].nextn_eh_proj is None:
        raise OptionError("drafting needs the NextN block, which load_mtp=False left in the file")


class Drafter:
    """The NextN head of one session, over that session's graphs, memory and history.

    `borrowed` names what of it the file leaves to the trunk.
    """

    def __init__(self, model, graphs, memory: HybridMemory, history, options: GraphOptions):
        self.hparams = hp = model.hparams
        wb = model.weights.blk[hp.n_layer]
        own = {"embedding": wb.nextn_embed_tokens, "head": wb.nextn_shared_head_head, "norm": wb.nextn_shared_head_norm}
        self.borrowed = tuple(what for what, tensor in own.items() if tensor is None)
        self.graphs, self.memory, self.history, self.options = graphs, memory, history, options

    def follow(self, seqs: Sequence[int]) -> None:
        """Feed the head what the trunk has decoded, but for a few last tokens; hidden nobody may go back to is dropped."""
        for seq in seqs:
            held = self.history[seq]
            first, n_past = _first_waiting(held), len(held.tokens)
            if n_past - first > MAX_WAITING:
                self._run(seq, held.tokens[first:], _hidden_before(held, first)[:-1], first)
            # one for each state that can be gone back to, and one for each token waiting
            n_kept = max(self.memory.recurrent.ring, n_past - _first_waiting(held) + 1)
            held.hidden = held.hidden[-n_kept:]

    def draft(self, token: int, choose: Callable[[np.ndarray], int | None], *, n: int, seq: int = 0) -> list[int]:
        """Guess up to `n` tokens after `token`, itself the one after those `seq` holds; fewer where cells run out.

        `choose` makes a token of each guess's logits [n_vocab], or None to stop there. Nothing of it stays in the session.
        """
        held, drafted = self.history[seq], []
        n_past = len(held.tokens)
        n = min(n, self.memory.n_ctx - n_past, self.memory.kv.n_free)
        if n < 1 or not held.n_hidden:
            return drafted
        first = _first_waiting(held)
        tokens, hidden = [*held.tokens[first:], token], _hidden_before(held, first)
        try:
            while True:
                logits, hidden = self._run(seq, tokens, hidden, first, n_outputs=1)
                guess = choose(logits[0])
                if guess is None:
                    return drafted
                drafted.append(guess)
                if len(drafted) == n:
                    return drafted
                first, tokens = n_past + len(drafted), [guess]
        finally:
            self.memory.kv.truncate(seq, n_past)

    def _run(self, seq: int, tokens: list[int], hidden: np.ndarray, first: int, n_outputs: int = 0) -> list[np.ndarray]:
        """Run the block on tokens from position `first` on → logits and hidden of the last `n_outputs` of them, if any."""
        kv, held, n_tokens = self.memory.kv, self.history[seq], len(tokens)
        pos = np.arange(first, first + n_tokens, dtype=np.int32)
        cells = kv.nextn_cells(seq, pos)
        values = {
            "inp_tokens": np.asarray(tokens, np.int32), "inp_pos": pos, "mtp_h_input": np.ascontiguousarray(hidden),
            "out_ids": np.arange(n_tokens - n_outputs, n_tokens, dtype=np.int32), "attn_inp_k_idxs": cells,
            "attn_inp_v_idxs": kv.v_elements(cells),
        }  # fmt: skip
        n_kv = 0
        if n_outputs:
            values["attn_inp_kq_mask"] = mask = kv.nextn_mask(seq, pos, cells)
            n_kv = mask.shape[1]
        built = self.graphs.get(GraphKey(Sizes(n_tokens, 1, n_outputs, n_kv, None), self.options, mtp=True))
        shapes = [(n_outputs, self.hparams.n_vocab), (n_outputs, self.hparams.n_embd)] if n_outputs else []
        outs = [np.empty(shape, np.float32) for shape in shapes]
        self.graphs.executor.run(built, built.arrange(values), outs)
        kv.fed[cells] = True
        held.fed = min(first + n_tokens, len(held.tokens))
        return outs


def _first_waiting(held) -> int:
    """Return the first position the head was not fed and can be: the hidden before it is known."""
    return max(held.fed, len(held.tokens) - held.n_hidden + 1)


def _hidden_before(held, first: int) -> np.ndarray:
    """Return the hidden that go with the tokens from position `first` on, the token to come included."""
    return held.hidden[held.n_hidden - (len(held.tokens) - first) - 1 :]
