"""llama.cpp's functions: those of llama-cpp-python, or a few declared here over the libllama of any folder (level 1).

Only for child processes, one libllama in each: a second libggml would meet the first one's symbols. Knows no models.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from types import SimpleNamespace

from ..errors import BackendError

# the llama.cpp whose structures are declared below
VERSION = "0.5"
LogCallback = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
EvalCallback = ctypes.CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)


def _structure(name: str, **fields) -> type[ctypes.Structure]:
    """Declare a structure; a type stands for fields named in one string."""
    return type(name, (ctypes.Structure,), {"_fields_": [(field, kind) for names, kind in fields.values() for field in names.split()]})


ModelParams = _structure(
    "ModelParams", a=("devices tensor_buft_overrides", c_void_p), b=("n_gpu_layers split_mode load_mode lazy_mode main_gpu", c_int32),
    c=("tensor_split progress_callback progress_callback_user_data kv_overrides", c_void_p),
    d=("vocab_only check_tensors use_extra_bufts no_host no_alloc load_mtp", c_bool),
)  # fmt: skip
ContextParams = _structure(
    "ContextParams", a=("n_ctx n_batch n_ubatch n_seq_max n_rs_seq n_outputs_max n_outputs_max_per_seq", c_uint32),
    b=("n_threads n_threads_batch ctx_type rope_scaling_type pooling_type attention_type flash_attn_type", c_int32),
    c=("rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor yarn_beta_fast yarn_beta_slow", c_float),
    d=("yarn_orig_ctx", c_uint32), e=("defrag_thold", c_float), f=("cb_eval", EvalCallback), g=("cb_eval_user_data", c_void_p),
    h=("type_k type_v", c_int32), i=("abort_callback abort_callback_data", c_void_p),
    j=("embeddings offload_kqv no_perf op_offload swa_full kv_unified", c_bool), k=("samplers", c_void_p), l=("n_samplers", c_size_t),
    m=("ctx_other", c_void_p),
)  # fmt: skip
Batch = _structure(
    "Batch", a=("n_tokens", c_int32), b=("token", POINTER(c_int32)), c=("embd", POINTER(c_float)), d=("pos n_seq_id", POINTER(c_int32)),
    e=("seq_id", POINTER(POINTER(c_int32))), f=("logits", POINTER(c_int8)),
)  # fmt: skip
# name → result and arguments
FUNCTIONS = {
    "llama_log_set": (None, LogCallback, c_void_p),
    "llama_backend_init": (None,),
    "llama_model_default_params": (ModelParams,),
    "llama_model_load_from_file": (c_void_p, c_char_p, ModelParams),
    "llama_model_get_vocab": (c_void_p, c_void_p),
    "llama_model_free": (None, c_void_p),
    "llama_vocab_n_tokens": (c_int32, c_void_p),
    "llama_tokenize": (c_int32, c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool),
    "llama_context_default_params": (ContextParams,),
    "llama_init_from_model": (c_void_p, c_void_p, ContextParams),
    "llama_free": (None, c_void_p),
    "llama_get_memory": (c_void_p, c_void_p),
    "llama_memory_clear": (None, c_void_p, c_bool),
    "llama_batch_init": (Batch, c_int32, c_int32, c_int32),
    "llama_batch_free": (None, Batch),
    "llama_decode": (c_int32, c_void_p, Batch),
    "llama_synchronize": (None, c_void_p),
    "llama_get_logits": (POINTER(c_float), c_void_p),
    "llama_get_logits_ith": (POINTER(c_float), c_void_p, c_int32),
}
# where these lie tells whether the structures are laid out as declared
DEFAULTS = {
    "llama_context_default_params": dict(n_ctx=512, n_batch=2048, n_ubatch=512, n_seq_max=1, flash_attn_type=-1, type_k=1, type_v=1),
    "llama_model_default_params": dict(split_mode=1, main_gpu=0, vocab_only=False, check_tensors=False, use_extra_bufts=True),
}


class _Symbol(ctypes.Structure):
    _fields_ = [("file", c_char_p), ("base", c_void_p), ("name", c_char_p), ("address", c_void_p)]


_open: ctypes.CDLL | None = None


def open_llama(folder: str | None = None):
    """Return llama.cpp's functions as attributes: all of llama-cpp-python's, or with a `folder` those of FUNCTIONS in its libllama.

    Raises BackendError when there is none or it is of another version.
    """
    global _open
    api = _of_llama_cpp_python() if folder is None else _of_folder(folder)
    _open = api._lib
    return api


def library() -> ctypes.CDLL:
    """Return the libllama that `open_llama` opened; libggml's functions are found through it."""
    return _open


def _of_llama_cpp_python():
    try:
        from llama_cpp import llama_cpp as api
    except ImportError as error:
        raise BackendError(
            f"llama.cpp comes with llama-cpp-python, which cannot be used here ({error}): pip install 'qwen3next_ggml[parity]'"
        ) from None
    return api


def _of_folder(folder: str) -> SimpleNamespace:
    path, lib = _libllama(folder)
    _check_version(lib, folder)
    api = SimpleNamespace(_lib=lib, llama_token=c_int32, llama_log_callback=LogCallback, ggml_backend_sched_eval_callback=EvalCallback)
    for name, (result, *arguments) in FUNCTIONS.items():
        if not hasattr(lib, name):
            raise BackendError(f"{path} lacks {name}, which llama.cpp {VERSION} has")
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
        setattr(api, name, function)
    home = _file_of(lib.ggml_backend_tensor_get)
    if Path(folder).resolve() not in home.parents:
        raise BackendError(f"{path} runs on the libggml in {home.parent}, expected one beside it")
    if not lib.ggml_backend_dev_count():
        lib.ggml_backend_load_all_from_path(os.fsencode(folder))
    for name, wanted in DEFAULTS.items():
        given = getattr(api, name)()
        found = {field: getattr(given, field) for field in wanted}
        wrong = [f"{field} is {found[field]}, expected {value}" for field, value in wanted.items() if found[field] != value]
        if wrong:
            raise BackendError(f"{path} lays out its parameters otherwise than llama.cpp {VERSION}: {'; '.join(wrong[:2])}")
    return api


def _libllama(folder: str) -> tuple[Path, ctypes.CDLL]:
    """Return the library of `folder` that itself holds llama_decode; names vary, and others are linked to it."""
    reasons = []
    files = (path for pattern in ("*llama*.so*", "*llama*.dylib") for path in sorted(Path(folder).glob(pattern)))
    for path in dict.fromkeys(path.resolve() for path in files):
        try:
            lib = ctypes.CDLL(str(path))
        except OSError as error:
            reasons.append(str(error))
            continue
        if hasattr(lib, "llama_decode") and _file_of(lib.llama_decode) == path:
            return path, lib
    raise BackendError(f"{folder} has no libllama: {'; '.join(reasons[:2]) or 'no library there holds llama_decode'}")


def _check_version(lib: ctypes.CDLL, folder: str) -> None:
    if not hasattr(lib, "llama_version"):
        raise BackendError(f"the llama.cpp in {folder} does not tell its version, expected {VERSION}: its structures may be others")
    lib.llama_version.restype = c_char_p
    version = lib.llama_version().decode()
    if version.split(".")[:2] != VERSION.split("."):
        raise BackendError(f"the llama.cpp in {folder} is {version}, expected {VERSION}: its structures may be others")


def _file_of(function) -> Path:
    found = _Symbol()
    ctypes.CDLL(None).dladdr(ctypes.cast(function, c_void_p), ctypes.byref(found))
    return Path(os.fsdecode(found.file)).resolve()
