"""The rows of the comparison: which file, which work, which ratio is to be reached against which side.

Knows how a row is run on a worker; knows nothing of rounds, tables or where files come from.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

N_FORCED = 32
N_DEEP_RUNS = 64  # runs of a deep row go on where the last one ended, so its context has room for so many
BATCH_PROMPT = 32
# NMSE that a change of kernels may make where it is not 1e-3: random weights amplify a rounding from layer to layer, and llama.cpp
# with and without flash attention differs from itself by 4e-2 after 48 of them
LIMITS = {"twelve": 1e-2, "whole": 1e-1}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    `kind`: "decode" (`n` tokens one by one after `depth`), "prompt" (`n` at once), "batch" (`n` steps of one token for each of
    `n_seq` sequences), "deep" (decode where filling `depth` is dear and done once), "start" (process start to the first token
    of a prompt of `n`). `times` runs at a time and `more` times the rounds, where a run takes a tenth of a second. `targets`: side → ratio
    of speeds to reach, for "start" the share of their time that may be taken.
    """

    name: str
    what: str
    kind: str
    n: int
    model: str = "four"
    provider: str = "llama_cpp"
    depth: int = 0
    n_seq: int = 1
    times: int = 1
    more: int = 1
    targets: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def n_ctx(self) -> int:
        needed = {
            "decode": self.depth + max(self.n, N_FORCED) + 1, "prompt": self.n + N_FORCED, "start": self.n + N_FORCED,
            "batch": self.n_seq * (BATCH_PROMPT + self.n), "deep": self.depth + N_FORCED + self.n * N_DEEP_RUNS,
        }  # fmt: skip
        return -(-needed[self.kind] // 256) * 256

    @property
    def n_tokens(self) -> int:
        """Tokens that one run gives or takes."""
        return self.n * self.n_seq


def _twice(name: str, what: str, kind: str, n: int, *, same, installed, **more) -> tuple[Row, Row]:
    """Return a row over llama.cpp's libggml and one over the default install's."""
    return (
        Row(name=name, what=what, kind=kind, n=n, provider="llama_cpp", targets=same, **more),
        Row(name=f"{name}-install", what=f"{what}, default install", kind=kind, n=n, provider="ggml_python", targets=installed, **more),
    )


ROWS = {
    row.name: row
    for row in (
        *_twice("decode", "decode", "decode", 64, same={"best": 1.10, "default": None}, installed={"default": 1.05}),
        *_twice("prompt", "prompt 512", "prompt", 512, same={"best": 1.25, "default": 1.55}, installed={"default": 1.10}),
        *_twice("start", "start to first token of a 64-token prompt", "start", 64, same={"default": 0.25}, installed={"default": 0.25}),
        *_twice("bard-decode", "embedded model, decode", "decode", 128, same={"default": 1.5, "best": None},
                installed={"default": 1.5}, model="embedded", times=3, more=5),
        *_twice("bard-prompt", "embedded model, prompt 512", "prompt", 512, same={"default": 1.3, "best": None},
                installed={"default": 1.3}, model="embedded", times=3, more=5),
        Row(name="batch8", what="8 sequences decoding together", kind="batch", n=16, n_seq=8, targets={"best": 1.15, "default": None}),
        Row(name="deep", what="decode at 32k context", kind="deep", n=16, depth=32768, targets={"best": 1.3}),
        Row(name="twelve-decode", what="12 layers, decode", kind="decode", n=32, model="twelve", targets={"best": 1.10}),
        Row(name="twelve-prompt", what="12 layers, prompt 512", kind="prompt", n=512, model="twelve", targets={"best": 1.10}),
        Row(name="whole-decode", what="48 layers, decode", kind="decode", n=16, model="whole", targets={"same": None}),
        Row(name="whole-prompt", what="48 layers, prompt 512", kind="prompt", n=512, model="whole", targets={"same": None}),
    )
}  # fmt: skip
# what `make bench` prints; the file of the others takes an hour of writing and most of a machine's memory
TABLE = tuple(name for name, row in ROWS.items() if row.model != "whole")


class Work:
    """A row's tokens, the same for every side, and the verbs that take them."""

    def __init__(self, row: Row, n_vocab: int, *, depth: int | None = None, state_path=None):
        rng = np.random.default_rng(2)
        self.row, self._draw = row, lambda *shape: rng.integers(0, n_vocab, shape).tolist()
        self.state_path = state_path
        self.tokens, self.forced = self._draw(row.n), self._draw(N_FORCED)
        self.deep = self._draw(row.depth if depth is None else depth)
        self.prompts = self._draw(row.n_seq, BATCH_PROMPT)
        self.steps = [[[token] for token in step] for step in self._draw(row.n, row.n_seq)]

    def prepare(self, worker) -> None:
        """Do what all runs of the row share."""
        if self.row.kind == "deep":
            worker.call("fill", self.deep, self.state_path and self.state_path(worker))

    def logits(self, worker) -> np.ndarray:
        """Return logits [n, n_vocab] that show whether two workers compute the same."""
        if self.row.kind == "batch":
            return worker.call("forced_batch", self.prompts, self.steps[:4])
        if self.row.kind == "deep":
            return worker.call("forced_on", self.forced)
        return worker.call("forced_logits", self.tokens if self.row.kind != "decode" else [*self.deep, *self.tokens[:1]], self.forced)

    def run(self, worker) -> float:
        """Return the seconds of one run, of a short row the median of `times` in a row."""
        return statistics.median(self._once(worker) for _ in range(self.row.times))

    def _once(self, worker) -> float:
        if self.row.kind == "batch":
            return worker.call("time_batch", self.prompts, self.steps)
        if self.row.kind == "deep":
            return worker.call("time_on", self.tokens)
        if self.row.kind == "prompt":
            return worker.call("time_prompt", self.tokens)
        return worker.call("time_decode", self.tokens, self.deep)
