"""A text cut into windows where llama.cpp cuts it, and the logits that count in each (level 11).

Upstream: tools/perplexity/perplexity.cpp. Knows nothing of scores or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import OptionError, UnsupportedModelError

# llama.cpp rounds the size of a context up to a multiple of this, and a strided window fills the context
N_PAD = 256


@dataclass(frozen=True, eq=False)
class Windows:
    """Which tokens are evaluated together, and which predictions count.

    Window i holds `n_ctx` tokens from token i · `stride` on; its rows `first` to n_ctx − 2 are scored, each against the token
    after it. `bos` takes the place of a window's first token while it is evaluated; None: it does not.
    """

    tokens: np.ndarray
    n_ctx: int
    stride: int
    first: int
    count: int
    bos: int | None = None

    @classmethod
    def cut(
        cls, tokens: Sequence[int], *, n_ctx: int = 512, stride: int = 0, n_chunks: int = -1, bos: int | None = None
    ) -> Windows:
        """Cut a text; `n_chunks` windows at most, -1 for all of it.

        Without a stride windows lie end to end and the second half of each is scored. With one they begin every `stride`
        tokens, hold n_ctx + stride / 2 tokens rounded up to 256 (llama.cpp's with -b equal to -c), and the last `stride` of
        them are scored; `bos` is not used. Raises OptionError.
        """
        tokens = np.asarray(tokens, np.int32)
        if n_ctx < 3 or stride < 0:
            raise OptionError(f"windows of {n_ctx} tokens with stride {stride}: expected at least 3 tokens and a stride of 0 or more")
        if stride:
            n_ctx = -(-(n_ctx + stride // 2) // N_PAD) * N_PAD
        if len(tokens) < 2 * n_ctx:
            raise OptionError(f"the text has {len(tokens)} tokens; windows of {n_ctx} tokens need at least {2 * n_ctx}")
        if not stride:
            first, stride, count = n_ctx // 2, n_ctx, len(tokens) // n_ctx
        elif stride < n_ctx:
            first, count, bos = n_ctx - 1 - stride, -(-(len(tokens) - n_ctx) // stride), None
        else:
            raise OptionError(f"the stride is {stride}, expected less than the window's {n_ctx} tokens")
        return cls(tokens, n_ctx, stride, first, count, bos).limited(n_chunks)

    def limited(self, n_chunks: int) -> Windows:
        """Return the first `n_chunks` windows, or all for -1. Raises OptionError."""
        if n_chunks == 0 or n_chunks < -1:
            raise OptionError(f"{n_chunks} chunks: expected 1 or more, or -1 for all")
        return self if n_chunks == -1 else replace(self, count=min(n_chunks, self.count))

    @property
    def n_scored(self) -> int:
        """How many rows of a window are scored."""
        return self.n_ctx - 1 - self.first

    def window(self, i: int) -> np.ndarray:
        """Return the tokens of window `i` [n_ctx]."""
        return self.tokens[i * self.stride : i * self.stride + self.n_ctx]

    def targets(self, i: int) -> np.ndarray:
        """Return the tokens that the scored rows of window `i` should predict [n_scored]."""
        return self.window(i)[self.first + 1 :]


def read_tokens(model, text: str) -> tuple[list[int], int | None]:
    """Return a text's token ids and the token that begins each window, if any. Raises UnsupportedModelError."""
    wants = {role: model.file.metadata.get(f"tokenizer.ggml.add_{role}_token", False) for role in ("bos", "eos")}
    if wants["eos"]:
        raise UnsupportedModelError("tokenizer.ggml.add_eos_token is true: windows of a text would not end as the model knows it")
    return model.tokenizer.encode(text), model.tokenizer.bos if wants["bos"] else None


def evaluate(session, windows: Windows) -> Iterator[np.ndarray]:
    """Yield the scored logits of each window, float32 [n_scored, n_vocab]; as many windows side by side as the session has sequences."""
    first = windows.first
    for start in range(0, windows.count, session.n_seq_max):
        batch = {i - start: windows.window(i)[:-1].copy() for i in range(start, min(start + session.n_seq_max, windows.count))}
        for seq in range(session.n_seq_max):
            session.clear(seq)
        if windows.bos is not None:
            for tokens in batch.values():
                tokens[0] = windows.bos
        if first:
            session.decode_batch({seq: tokens[:first] for seq, tokens in batch.items()}, logits="none")
        rows = session.decode_batch({seq: tokens[first:] for seq, tokens in batch.items()}, logits="all")
        yield from (rows[seq] for seq in batch)
