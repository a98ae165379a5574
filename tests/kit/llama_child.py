"""llama.cpp in a child process: a job in, logits, graph nodes, greedy tokens and token ids out.

One file, two processes. The parent imports `run_llama`, `LlamaJob` and the records; the child runs this module as a program
and is the only one that imports llama_cpp, so a test process never holds a second libggml. Knows nothing of qwen3next_ggml.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class LlamaOptions:
    """Model and context parameters, llama.cpp's names; `repack` is its `use_extra_bufts`."""
    n_ctx: int = 512
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    kv_unified: bool = True
    flash_attn: bool = False
    type_k: str = "f32"
    type_v: str = "f32"
    n_threads: int = 2
    use_mmap: bool = True
    repack: bool = False


@dataclass(frozen=True, kw_only=True)
class LlamaJob:
    """What the child does, in the order of the fields.

    texts: strings to tokenize.
    steps: batches of (token, position, sequence, logits wanted), one `llama_decode` each.
    capture: glob patterns of node names recorded during the steps; ("*",) records every node.
    greedy_prompt, n_greedy: cleared memory, then the prompt on sequence 0, then n tokens by argmax.
    """
    model: str
    texts: tuple[str, ...] = ()
    add_special: bool = True
    parse_special: bool = False
    steps: tuple[tuple[tuple[int, int, int, bool], ...], ...] = ()
    capture: tuple[str, ...] = ()
    greedy_prompt: tuple[int, ...] = ()
    n_greedy: int = 0
    options: LlamaOptions = field(default_factory=LlamaOptions)


@dataclass(frozen=True)
class Node:
    """One computed node: ne in ggml order, array in numpy order (ne reversed), strides already undone.

    `occurrence` counts equal names within one graph; graph inputs are nodes with op "NONE".
    """
    name: str
    occurrence: int
    step: int
    ubatch: int
    op: str
    ne: tuple[int, int, int, int]
    array: np.ndarray


@dataclass(frozen=True)
class LlamaResult:
    """ids: one list per text. logits: one [n_wanted, n_vocab] per step. greedy_gaps: top-1 minus top-2 at each greedy token."""
    ids: list[list[int]]
    logits: list[np.ndarray]
    nodes: list[Node]
    greedy: list[int]
    greedy_gaps: np.ndarray


class LlamaChildError(RuntimeError):
    """The child failed or timed out; the message ends with its last lines on stderr."""


def run_llama(job: LlamaJob, *, timeout: float = 120, env: dict[str, str] | None = None) -> LlamaResult:
    """Run one job in a child process and return what it wrote; quantised caches are not rotated. Raises LlamaChildError."""
    with tempfile.TemporaryDirectory(prefix="llama-child-") as folder:
        job_path, out_path = Path(folder, "job.json"), Path(folder, "out.npz")
        job_path.write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [sys.executable, "-m", "tests.kit.llama_child", str(job_path), str(out_path)]
        env = {**os.environ, "LLAMA_ATTN_ROT_DISABLE": "1", **(env or {})}
        try:
            done = subprocess.run(command, cwd=ROOT, env=env, timeout=timeout,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        except subprocess.TimeoutExpired as error:
            raise LlamaChildError(f"llama.cpp child got {timeout} s and did not finish\n{_tail(error.stderr)}") from None
        if done.returncode != 0:
            raise LlamaChildError(f"llama.cpp child ended with status {done.returncode}, expected 0\n{_tail(done.stderr)}")
        return _read_result(out_path)


def _tail(stderr: bytes | None, n_lines: int = 25) -> str:
    return "\n".join((stderr or b"").decode("utf-8", "replace").splitlines()[-n_lines:])


def _read_result(path: Path) -> LlamaResult:
    with np.load(path) as arrays:
        index = json.loads(bytes(arrays["index"]))
        nodes = [Node(*head[:5], tuple(head[5]), arrays[f"node{i}"]) for i, head in enumerate(index["nodes"])]
        logits = [arrays[f"logits{i}"] for i in range(index["n_steps"])]
        return LlamaResult(index["ids"], logits, nodes, index["greedy"], arrays["greedy_gaps"])


def _write_result(path: str, result: LlamaResult) -> None:
    heads = [(n.name, n.occurrence, n.step, n.ubatch, n.op, n.ne) for n in result.nodes]
    index = json.dumps({"ids": result.ids, "n_steps": len(result.logits), "nodes": heads, "greedy": result.greedy})
    arrays = {f"node{i}": node.array for i, node in enumerate(result.nodes)}
    arrays |= {f"logits{i}": rows for i, rows in enumerate(result.logits)}
    np.savez(path, index=np.frombuffer(index.encode(), np.uint8), greedy_gaps=result.greedy_gaps, **arrays)


class _Tensor(ctypes.Structure):
    """The head of struct ggml_tensor, up to its sources (ggml.h of 0.15 to 0.25)."""
    _fields_ = [("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4),
                ("op", ctypes.c_int), ("op_params", ctypes.c_int32 * 16), ("flags", ctypes.c_int32), ("src", ctypes.c_void_p * 10)]


_FLAG_INPUT = 1
_NUMPY_TYPES = {"F32": "f4", "F16": "f2", "F64": "f8", "I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8"}


@lru_cache(maxsize=None)
def _ggml():
    """The few ggml entries used here, looked up through libllama so that they are its own; every type is stated (64-bit pointers)."""
    from llama_cpp.llama_cpp import _lib as lib
    pointer = ctypes.c_void_p
    for name, result, arguments in [
        ("ggml_nbytes", ctypes.c_size_t, [pointer]),
        ("ggml_op_desc", ctypes.c_char_p, [pointer]),
        ("ggml_get_name", ctypes.c_char_p, [pointer]),
        ("ggml_backend_tensor_get", None, [pointer, pointer, ctypes.c_size_t, ctypes.c_size_t]),
    ]:
        entry = getattr(lib, name)
        entry.restype, entry.argtypes = result, arguments
    return lib


def _read_tensor(address: int) -> np.ndarray:
    """Copy a tensor out in numpy order: f16, bf16 and quantised become float32, integers stay."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
    head = _Tensor.from_address(address)
    kind = GGMLQuantizationType(head.type)
    shape, strides = tuple(head.ne)[::-1], tuple(head.nb)[::-1]
    if 0 in shape:
        return np.zeros(shape, np.float32)
    raw = np.empty(_ggml().ggml_nbytes(address), np.uint8)
    _ggml().ggml_backend_tensor_get(address, raw.ctypes.data, 0, raw.size)
    if kind.name in _NUMPY_TYPES:
        values = np.ndarray(shape, _NUMPY_TYPES[kind.name], raw, strides=strides)
        return values.astype(np.float32) if kind.name in ("F16", "F64") else values.copy()
    if kind.name == "BF16":
        return (np.ndarray(shape, "u2", raw, strides=strides).astype("u4") << 16).view(np.float32)
    block, size = GGML_QUANT_SIZES[kind]
    rows = np.ndarray((*shape[:3], shape[3] // block * size), np.uint8, raw, strides=(*strides[:3], 1))
    return quants.dequantize(np.ascontiguousarray(rows), kind)


class Recorder:
    """Collects nodes through llama.cpp's eval callback; asked for a node, the graph is cut there and its data is final."""

    def __init__(self, patterns):
        self.nodes: list[Node] = []
        self.error: BaseException | None = None
        self._wanted = lru_cache(maxsize=None)(lambda name: any(fnmatchcase(name, p) for p in patterns))
        self.start_step(-1)

    def start_step(self, step):
        self._step, self._ubatch = step, -1
        self._start_graph()

    def _start_graph(self):
        self._ubatch += 1
        self._counts, self._inputs = Counter(), set()

    def callback(self, address, ask, _user_data):
        # an exception cannot cross the C frames: it is kept, and false stops the graph
        try:
            return self._on_ask(address) if ask else self._on_data(address)
        except BaseException as error:
            self.error = error
            return False

    def _on_ask(self, address):
        for source in _Tensor.from_address(address).src:
            if source and source not in self._inputs and _Tensor.from_address(source).flags & _FLAG_INPUT:
                self._inputs.add(source)
                self._record(source)
        name = _name(address)
        # llama.cpp ends every graph with this node, which is how one ubatch is told from the next
        return self._wanted(name) or name == "result_output"

    def _on_data(self, address):
        self._record(address)
        if _name(address) == "result_output":
            self._start_graph()
        return True

    def _record(self, address):
        name = _name(address)
        occurrence = self._counts[name]
        self._counts[name] += 1
        if self._wanted(name):
            op = _ggml().ggml_op_desc(address).decode()
            ne = tuple(_Tensor.from_address(address).ne)
            self.nodes.append(Node(name, occurrence, self._step, self._ubatch, op, ne, _read_tensor(address)))


def _name(address: int) -> str:
    return _ggml().ggml_get_name(address).decode()


class Llama:
    """A model, and a context on it, over llama.cpp's low-level API. Only for child processes; close() frees both."""

    def __init__(self, path: str, options: LlamaOptions, *, recorder: Recorder | None = None, vocab_only: bool = False):
        from gguf import GGMLQuantizationType
        from llama_cpp import llama_cpp as api
        self.api, self.context, self._recorder = api, None, recorder
        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.load_mode = 1 if options.use_mmap else 0
        params.use_extra_bufts, params.vocab_only, params.n_gpu_layers = options.repack, vocab_only, 0
        self.model = api.llama_model_load_from_file(os.fsencode(path), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.vocab = api.llama_model_get_vocab(self.model)
        self.n_vocab = api.llama_vocab_n_tokens(self.vocab)
        if vocab_only:
            return
        params = api.llama_context_default_params()
        for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "kv_unified", "n_threads"):
            setattr(params, name, getattr(options, name))
        params.n_threads_batch, params.flash_attn_type = options.n_threads, int(options.flash_attn)
        params.type_k, params.type_v = (GGMLQuantizationType[t.upper()] for t in (options.type_k, options.type_v))
        if recorder is not None:
            self._callback = api.ggml_backend_sched_eval_callback(recorder.callback)
            params.cb_eval = self._callback
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot make a context with {options}")
        self.batch = api.llama_batch_init(options.n_batch, 0, 1)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode("utf-8")
        ids = (self.api.llama_token * (len(data) + 8))()
        n_ids = self.api.llama_tokenize(self.vocab, data, len(data), ids, len(ids), add_special, parse_special)
        return ids[:n_ids]

    def decode(self, tokens) -> np.ndarray:
        """Decode (token, position, sequence, wanted) tuples; returns float32 [n_wanted, n_vocab]."""
        batch = self.batch
        batch.n_tokens, n_wanted = len(tokens), 0
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            n_wanted += wanted
        status = self.api.llama_decode(self.context, batch)
        if self._recorder is not None and self._recorder.error is not None:
            raise self._recorder.error
        if status != 0:
            raise RuntimeError(f"llama_decode of {len(tokens)} tokens returned {status}, expected 0")
        if n_wanted == 0:
            self.api.llama_synchronize(self.context)
            return np.zeros((0, self.n_vocab), np.float32)
        rows = self.api.llama_get_logits(self.context)
        return np.ctypeslib.as_array(rows, (n_wanted, self.n_vocab)).copy()

    def clear(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def close(self) -> None:
        if self.context:
            self.api.llama_batch_free(self.batch)
            self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)
        self.context = self.model = None


def _run_job(job: LlamaJob) -> LlamaResult:
    recorder = Recorder(job.capture) if job.capture else None
    llama = Llama(job.model, job.options, recorder=recorder, vocab_only=not job.steps and not job.n_greedy)
    ids = [llama.tokenize(text, add_special=job.add_special, parse_special=job.parse_special) for text in job.texts]
    logits = []
    for i_step, step in enumerate(job.steps):
        if recorder is not None:
            recorder.start_step(i_step)
        logits.append(llama.decode(step))
    nodes = list(recorder.nodes) if recorder is not None else []
    greedy, gaps = _generate_greedy(llama, job.greedy_prompt, job.n_greedy) if job.n_greedy else ([], [])
    llama.close()
    return LlamaResult(ids, logits, nodes, greedy, np.array(gaps, np.float32))


def _generate_greedy(llama: Llama, prompt, n_tokens: int) -> tuple[list[int], list[float]]:
    llama.clear()
    tokens, gaps = [], []
    rows = llama.decode([(token, i, 0, i == len(prompt) - 1) for i, token in enumerate(prompt)])
    for i in range(n_tokens):
        second, first = np.sort(rows[-1])[-2:]
        tokens.append(int(rows[-1].argmax()))
        gaps.append(float(first - second))
        if i + 1 < n_tokens:
            rows = llama.decode([(tokens[-1], len(prompt) + i, 0, True)])
    return tokens, gaps


def main(job_path: str, out_path: str) -> None:
    fields = json.loads(Path(job_path).read_text(encoding="utf-8"))
    options = LlamaOptions(**fields.pop("options"))
    _write_result(out_path, _run_job(LlamaJob(**fields, options=options)))


if __name__ == "__main__":
    main(*sys.argv[1:])
