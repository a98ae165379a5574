"""Two engines behind one face, each in a process of its own: ours and llama.cpp's.

A `Worker` starts the process and drives it call by call, so that only one engine computes at a time while both stay loaded.
Knows how to run and time tokens; knows nothing of statistics, options or tables.
"""

import multiprocessing
import os
import resource
import time
import traceback
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What one side is asked to do; `repack` and `use_mmap` are its load policy."""
    model: str
    n_ctx: int
    n_ubatch: int
    n_threads: int
    flash_attn: bool
    repack: bool
    use_mmap: bool = True
    type_kv: str = "f16"
    provider: str = "llama_cpp"
    graph: str = "auto"


class LlamaEngine:
    """llama.cpp through llama-cpp-python's low-level API. Filling its batch from Python is not timed."""

    def __init__(self, config: EngineConfig):
        from tests.kit.llama_api import Llama, LlamaOptions
        self.llama = Llama(config.model, LlamaOptions(
            n_ctx=config.n_ctx, n_batch=config.n_ctx, n_ubatch=config.n_ubatch, n_threads=config.n_threads,
            flash_attn=config.flash_attn, type_k=config.type_kv, type_v=config.type_kv,
            use_mmap=config.use_mmap, repack=config.repack))
        self.name = f"llama.cpp, ggml {self.llama.ggml_version}"
        self.n_past = 0

    def clear(self):
        self.llama.clear()
        self.n_past = 0

    def decode(self, tokens):
        """Append tokens; returns the last one's logits [n_vocab] and the seconds it took."""
        self.llama.fill([(token, self.n_past + i, 0, i == len(tokens) - 1) for i, token in enumerate(tokens)])
        self.n_past += len(tokens)
        start = time.perf_counter()
        self.llama.compute()
        seconds = time.perf_counter() - start
        return self.llama.last_row(), seconds


class OurEngine:
    """A session of this package; everything between tokens in and logits out is timed."""

    def __init__(self, config: EngineConfig):
        import qwen3next_ggml
        from qwen3next_ggml import ggml
        self.model = qwen3next_ggml.load(config.model, ggml=config.provider, n_threads=config.n_threads,
                                         repack=config.repack, mmap=config.use_mmap)
        self.session = self.model.session(
            n_ctx=config.n_ctx, n_ubatch=config.n_ubatch, flash_attn=config.flash_attn,
            type_k=config.type_kv, type_v=config.type_kv, graph=config.graph)
        self.name = f"ours, ggml {ggml.provider().version}"

    def clear(self):
        self.session.clear(0)

    def decode(self, tokens):
        start = time.perf_counter()
        logits = self.session.decode(tokens, seq=0, logits="last")
        return logits[0], time.perf_counter() - start


def forced_logits(engine, prompt, continuation):
    """Logits [1 + n, n_vocab] after a prompt and after each of n given tokens."""
    engine.clear()
    return np.stack([engine.decode(prompt)[0].copy()] + [engine.decode([token])[0].copy() for token in continuation])


def time_prompt(engine, tokens):
    """Seconds for a prompt from an empty context."""
    engine.clear()
    return engine.decode(tokens)[1]


def time_decode(engine, tokens, depth_tokens):
    """Seconds for single-token steps, after `depth_tokens` that are not timed."""
    engine.clear()
    if depth_tokens:
        engine.decode(depth_tokens)
    return sum(engine.decode([token])[1] for token in tokens)


def peak_mib(_engine):
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


_ENGINES = {"ours": OurEngine, "llama.cpp": LlamaEngine}
_VERBS = {verb.__name__: verb for verb in (forced_logits, time_prompt, time_decode, peak_mib)}


def _serve(pipe, side, config):
    try:
        start = time.perf_counter()
        engine = _ENGINES[side](config)
        pipe.send((None, (engine.name, time.perf_counter() - start)))
        while (request := pipe.recv()) is not None:
            verb, args = request
            pipe.send((None, _VERBS[verb](engine, *args)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
        raise SystemExit(1) from None


class Worker:
    """A process that holds one engine. `env` is set before it starts: OpenMP and glibc read theirs once."""

    def __init__(self, side: str, config: EngineConfig, *, env: dict[str, str] | None = None):
        context = multiprocessing.get_context("spawn")
        self.side, self.config = side, config
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_pipe, side, config), daemon=True)
        saved = dict(os.environ)
        os.environ.update(env or {}, QGRAPH_GGML=config.provider)
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(saved)
        child_pipe.close()
        self.name, self.load_seconds = self._receive()

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, verb: str, *args):
        """Run one of the verbs above in the process and wait for its result."""
        self._pipe.send((verb, args))
        return self._receive()

    def _receive(self):
        try:
            error, result = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"{self.side} worker ended with status {self._process.exitcode}") from None
        if error is not None:
            raise RuntimeError(f"{self.side} worker failed\n{error}")
        return result

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(timeout=30)
        self._pipe.close()

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.close()
