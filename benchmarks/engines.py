"""Two engines behind one face: ours, and llama.cpp through llama-cpp-python's low-level API.

Both know how to take tokens and say how long that took; they know nothing of rows, rounds or tables. One process, one engine.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What one side is asked to do.

    `repack` and `use_mmap` (ours also take "auto", and kinds of weights to repack) and `huge_malloc` are its load policy; `tiled`
    switches ggml's tiled kernels, where it has them; `provider`, `graph` are ours alone, `kv_unified` llama.cpp's. `cpu_clock`
    counts the process's CPU time instead of the wall clock's, which only one thread can be measured by.
    """

    model: str
    n_ctx: int = 1024
    n_ubatch: int = 512
    n_seq_max: int = 1
    n_threads: int = 2
    flash_attn: bool = True
    repack: bool | str = "auto"
    use_mmap: bool | str = "auto"
    huge_malloc: bool = False
    tiled: bool = True
    type_kv: str = "f16"
    kv_unified: bool = True
    provider: str = "llama_cpp"
    graph: str = "auto"
    cpu_clock: bool = False

    @property
    def clock(self) -> Callable[[], float]:
        return time.process_time if self.cpu_clock else time.perf_counter

    @property
    def env(self) -> dict[str, str]:
        """Variables that ggml, glibc and this package read once, when a process starts."""
        env = {"QGRAPH_GGML": self.provider, "GGML_CPU_TILED_MM": str(int(self.tiled))}
        return env | ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if self.huge_malloc else {})

    @property
    def policy(self) -> str:
        """How the weights came into memory, and what differs from llama.cpp's defaults, in a few words."""
        repack = self.repack if isinstance(self.repack, str) else "all" if self.repack else "none"
        words = [f"repack {repack}", {"auto": "map auto", True: "mapped", False: "copied"}[self.use_mmap]]
        words += ["huge malloc"] if self.huge_malloc else []
        words += [] if self.tiled else ["not tiled"]
        words += [] if self.flash_attn else ["no flash attention"]
        words += [f"ub {self.n_ubatch}"] if self.n_ubatch != 512 else []
        words += [] if self.kv_unified or self.n_seq_max == 1 else ["KV per sequence"]
        return ", ".join(words)


class LlamaEngine:
    """llama.cpp. Filling its batch from Python is not timed."""

    CHUNK = 2048

    def __init__(self, config: EngineConfig):
        from qwen3next_ggml.ggml.llama import Llama, LlamaOptions

        self.llama = Llama(config.model, LlamaOptions(
            n_ctx=config.n_ctx, n_batch=self.CHUNK, n_ubatch=config.n_ubatch, n_threads=config.n_threads, n_seq_max=config.n_seq_max,
            flash_attn=config.flash_attn, type_k=config.type_kv, type_v=config.type_kv, kv_unified=config.kv_unified,
            use_mmap=bool(config.use_mmap), repack=bool(config.repack)))  # fmt: skip
        self.name = f"llama.cpp, ggml {self.llama.ggml_version}"
        self.clock, self.n_vocab = config.clock, self.llama.n_vocab
        self.n_past = [0] * config.n_seq_max

    def clear(self) -> None:
        self.llama.clear()
        self.n_past = [0] * len(self.n_past)

    def decode(self, tokens) -> tuple[np.ndarray, float]:
        """Append tokens to sequence 0 → the last one's logits [n_vocab], seconds."""
        seconds = 0.0
        for start in range(0, len(tokens), self.CHUNK):
            chunk = tokens[start : start + self.CHUNK]
            wanted = len(tokens) - 1 - start
            self.llama.fill([(token, self.n_past[0] + i, 0, i == wanted) for i, token in enumerate(chunk)])
            self.n_past[0] += len(chunk)
            began = self.clock()
            self.llama.compute()
            seconds += self.clock() - began
        return self.llama.last_row(), seconds

    def decode_batch(self, tokens) -> tuple[np.ndarray, float]:
        """Append a list of tokens to each sequence → the last logits of each [n_seq, n_vocab], seconds."""
        self.llama.fill([
            (token, self.n_past[seq] + i, seq, i == len(mine) - 1) for seq, mine in enumerate(tokens) for i, token in enumerate(mine)
        ])  # fmt: skip
        for seq, mine in enumerate(tokens):
            self.n_past[seq] += len(mine)
        began = self.clock()
        self.llama.compute()
        seconds = self.clock() - began
        rows = self.llama.api.llama_get_logits(self.llama.context)
        return np.ctypeslib.as_array(rows, (len(tokens), self.n_vocab)), seconds

    def save(self, path) -> None:
        """Write the state of the context to a file."""
        if not self.llama.api.llama_state_save_file(self.llama.context, os.fsencode(path), (self.llama.api.llama_token * 1)(), 0):
            raise RuntimeError(f"llama.cpp cannot write its state to {path}")

    def restore(self, path, n_past: int) -> None:
        """Read the state of a context that held `n_past` tokens of sequence 0."""
        import ctypes

        n_read, api = ctypes.c_size_t(), self.llama.api
        if not api.llama_state_load_file(self.llama.context, os.fsencode(path), (api.llama_token * 1)(), 1, ctypes.byref(n_read)):
            raise RuntimeError(f"llama.cpp cannot read its state from {path}")
        self.n_past[0] = n_past


class OurEngine:
    """A session of this package; everything between tokens in and logits out is timed."""

    def __init__(self, config: EngineConfig):
        import qwen3next_ggml
        from qwen3next_ggml import ggml

        self.model = qwen3next_ggml.load(
            config.model, ggml=config.provider, n_threads=config.n_threads, repack=config.repack, mmap=config.use_mmap
        )
        self.clock, self.n_vocab, self.n_seq = config.clock, self.model.hparams.n_vocab, config.n_seq_max
        self.session = self.model.session(
            n_ctx=config.n_ctx, n_ubatch=config.n_ubatch, n_seq_max=config.n_seq_max, flash_attn=config.flash_attn,
            type_k=config.type_kv, type_v=config.type_kv, graph=graph_options(config, self.model),
        )  # fmt: skip
        self.name = f"ours, ggml {ggml.provider().version}"

    def clear(self) -> None:
        for seq in range(self.n_seq):
            self.session.clear(seq)

    def decode(self, tokens) -> tuple[np.ndarray, float]:
        """Append tokens to sequence 0 → the last one's logits [n_vocab], seconds."""
        began = self.clock()
        logits = self.session.decode(tokens, seq=0, logits="last")
        return logits[0], self.clock() - began

    def decode_batch(self, tokens) -> tuple[np.ndarray, float]:
        """Append a list of tokens to each sequence → the last logits of each [n_seq, n_vocab], seconds."""
        began = self.clock()
        logits = self.session.decode_batch(dict(enumerate(tokens)), logits="last")
        seconds = self.clock() - began
        return np.concatenate([logits[seq] for seq in range(len(tokens))]), seconds

    def save(self, path) -> None:
        self.session.save(path)

    def restore(self, path, n_past: int) -> None:
        settings = self.session.settings
        self.session.close()
        self.session = self.model.load_session(path, **settings)
        if self.session.n_past(0) != n_past:
            raise RuntimeError(f"{path} holds {self.session.n_past(0)} tokens, expected {n_past}")


def graph_options(config: EngineConfig, model):
    """Return the graph a config asks for: a name, and after it options that differ, as in "lean,prune_last=0"."""
    from qwen3next_ggml.graph.support import resolve_options

    name, *changes = config.graph.split(",")
    if not changes:
        return name
    base = resolve_options(name, "auto", config.flash_attn, model.hparams, model.devices)
    return base.but(**{key: bool(int(value)) for key, value in (change.split("=") for change in changes)})


ENGINES = {"ours": OurEngine, "llama.cpp": LlamaEngine}
