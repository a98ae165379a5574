"""llama.cpp's low-level API as one class, and a recorder for the nodes of its graphs (level 1).

Importing this file loads nothing; making a `Llama` imports llama_cpp, which only a process of its own may do: a second libggml
would meet the first one's symbols. Knows nothing of jobs, files of results, or the rest of this package.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

import numpy as np

from ..errors import BackendError
from .llama_library import library, open_llama


@dataclass(frozen=True, kw_only=True)
class LlamaOptions:
    """Model and context parameters, llama.cpp's names; `repack` is its `use_extra_bufts`, `mtp` a context that runs the NextN block.

    `folder` is a llama.cpp build, None the one in llama-cpp-python; all of the model stays on the CPU.
    """
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
    mtp: bool = False
    folder: str | None = None


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


class _Tensor(ctypes.Structure):
    """The head of struct ggml_tensor, up to its sources (ggml.h of 0.15 to 0.25)."""
    _fields_ = [("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4),
                ("op", ctypes.c_int), ("op_params", ctypes.c_int32 * 16), ("flags", ctypes.c_int32),
                ("src", ctypes.c_void_p * 10)]


_FLAG_INPUT = 1
_NUMPY_TYPES = {"F32": "f4", "F16": "f2", "F64": "f8", "I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8"}


@lru_cache(maxsize=None)
def _ggml():
    """The few ggml entries used here, looked up through libllama, so its own; all types stated, so pointers keep 64 bits."""
    lib = library()
    pointer = ctypes.c_void_p
    for name, result, arguments in [
        ("ggml_nbytes", ctypes.c_size_t, [pointer]),
        ("ggml_op_desc", ctypes.c_char_p, [pointer]),
        ("ggml_get_name", ctypes.c_char_p, [pointer]),
        ("ggml_version", ctypes.c_char_p, []),
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
        api = open_llama(options.folder)
        self.api, self.context, self._recorder = api, None, recorder
        self._log = api.llama_log_callback(_log_errors)
        api.llama_log_set(self._log, None)
        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.load_mode = 1 if options.use_mmap else 0
        params.use_extra_bufts, params.vocab_only, params.n_gpu_layers = options.repack, vocab_only, 0
        params.load_mtp = options.mtp
        # an empty list, or a GPU of the build would take part
        self._no_devices = (ctypes.c_void_p * 1)()
        params.devices = ctypes.addressof(self._no_devices)
        self.model = api.llama_model_load_from_file(os.fsencode(path), params)
        if not self.model:
            raise BackendError(f"llama.cpp cannot load {path}")
        self.vocab = api.llama_model_get_vocab(self.model)
        self.n_vocab = api.llama_vocab_n_tokens(self.vocab)
        if vocab_only:
            return
        params = api.llama_context_default_params()
        for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "kv_unified", "n_threads"):
            setattr(params, name, getattr(options, name))
        params.n_threads_batch, params.flash_attn_type = options.n_threads, int(options.flash_attn)
        params.type_k, params.type_v = (GGMLQuantizationType[t.upper()] for t in (options.type_k, options.type_v))
        params.ctx_type = int(options.mtp)
        if recorder is not None:
            self._callback = api.ggml_backend_sched_eval_callback(recorder.callback)
            params.cb_eval = self._callback
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise BackendError(f"llama.cpp cannot make a context with {options}")
        self.batch = api.llama_batch_init(options.n_batch, 0, 1)

    @property
    def ggml_version(self) -> str:
        return _ggml().ggml_version().decode()

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode("utf-8")
        ids = (self.api.llama_token * (len(data) + 8))()
        n_ids = self.api.llama_tokenize(self.vocab, data, len(data), ids, len(ids), add_special, parse_special)
        return ids[:n_ids]

    def fill(self, tokens) -> int:
        """Put (token, position, sequence, wanted) tuples into the batch; returns how many rows of logits will come."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        return sum(bool(wanted) for *_, wanted in tokens)

    def compute(self) -> None:
        """Decode the filled batch and wait for the end of it."""
        status = self.api.llama_decode(self.context, self.batch)
        if self._recorder is not None and self._recorder.error is not None:
            raise self._recorder.error
        if status != 0:
            raise BackendError(f"llama_decode of {self.batch.n_tokens} tokens returned {status}, expected 0")
        self.api.llama_synchronize(self.context)

    def decode(self, tokens) -> np.ndarray:
        """Fill, compute and copy the wanted rows: float32 [n_wanted, n_vocab]."""
        n_wanted = self.fill(tokens)
        self.compute()
        if n_wanted == 0:
            return np.zeros((0, self.n_vocab), np.float32)
        return np.ctypeslib.as_array(self.api.llama_get_logits(self.context), (n_wanted, self.n_vocab)).copy()

    def last_row(self) -> np.ndarray:
        """The logits [n_vocab] of the last wanted token, where llama.cpp keeps them until the next decode."""
        return np.ctypeslib.as_array(self.api.llama_get_logits_ith(self.context, -1), (self.n_vocab,))

    def clear(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def close(self) -> None:
        if self.context:
            self.api.llama_batch_free(self.batch)
            self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)
        self.context = self.model = None


def _log_errors(level: int, text: bytes, _user_data) -> None:
    if level == 4:
        sys.stderr.write(text.decode("utf-8", "replace"))
