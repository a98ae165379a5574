"""What a run can be compared with besides sessions: traces, and builds of llama.cpp in folders."""

import importlib.util
import pathlib
import shutil
from dataclasses import replace

import numpy as np
import pytest

import qwen3next_ggml as q
from qwen3next_ggml.array_file import read_arrays, write_arrays
from qwen3next_ggml.errors import BackendError, OptionError, StateError
from qwen3next_ggml.parity import Recording, Run, compare, cut_like, providers, record, record_apart, reference_of
from qwen3next_ggml.trace import write_trace
from tests.kit import run_python

TOKENS = tuple(np.random.default_rng(9).integers(0, 97, 12).tolist())


@pytest.fixture(scope="module")
def run(toys):
    return Run(path=str(toys.t0), tokens=TOKENS, graph="plain", flash_attn="off", n_threads=1)


# --- traces


def traced(run, path, *patterns, factor=1.0, n_ubatch=512):
    with q.load(run.path, n_threads=1) as model:
        with model.session(n_ctx=256, n_ubatch=n_ubatch, graph="plain", flash_attn=False, type_k="f32", type_v="f32") as s:
            if factor != 1.0:
                with s.patch("ffn_out-2", lambda g, x: g.scale(x, factor)):
                    write_trace(s, run.tokens, path, *patterns)
            else:
                write_trace(s, run.tokens, path, *patterns)
    return path


@pytest.mark.parametrize("n_ubatch", [512, 5])
def test_a_trace_is_a_reference(run, tmp_path, n_ubatch):
    """Cut as the trace was: all tokens in ubatches, every node of the graph, states too."""
    reference = reference_of(str(traced(run, tmp_path / "t.safetensors", "*-*", "result_*", n_ubatch=n_ubatch)), run)
    here = cut_like(replace(run, n_ubatch=n_ubatch), reference)
    assert here.ubatches(n_ubatch) == list(reference.ubatches) and not here.step
    found = compare(record(here), reference)
    assert found.misses == [] and len(found.nodes) > 150
    names = {"new_state-0", "Kcur-3", "conv_input-1", "ffn_moe_topk-2", "qkv_mixed_transposed-0", "norm-0"}
    assert names <= {node.value.name for node in found.nodes}


def test_a_trace_of_another_graph_differs_where_it_is_another(run, tmp_path):
    reference = Recording.load(traced(run, tmp_path / "t.safetensors", "attn_residual-*", "ffn_out-*", "l_out-*", factor=1.01))
    assert compare(record(cut_like(run, reference)), reference).first.value.name == "ffn_out-2"


def test_a_trace_that_does_not_know_its_axes(run, tmp_path):
    path = traced(run, tmp_path / "t.safetensors", "l_out-*")
    about, arrays = read_arrays(path)
    write_arrays(tmp_path / "old.safetensors", {**about, "trace": about["trace"].replace("token_axes", "axes")}, arrays)
    with pytest.raises(OptionError, match="does not say where its tokens are; write it again"):
        Recording.load(tmp_path / "old.safetensors")


def test_only_recordings_cut_so_change_a_run(run):
    assert cut_like(run, replace(run, device="X")) is run
    assert cut_like(run, record(run)) is run


# --- a build of llama.cpp


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """llama-cpp-python's own libraries in a folder, libllama under a name of its own and another library beside it."""
    source = pathlib.Path(importlib.util.find_spec("llama_cpp").submodule_search_locations[0]) / "lib"
    folder = tmp_path_factory.mktemp("build")
    for path in source.glob("libggml*.so.0"):
        shutil.copy(path, folder)
    shutil.copy(source / "libllama.so.0", folder / "libllama.cpu.v9.so")
    shutil.copy(source / "libggml-base.so", folder / "liballama-common.so")
    return folder


def test_a_folder_is_llama_cpp_too(run, build):
    """All nodes, computed by the libraries of that folder."""
    wanted = reference_of(str(build), replace(run, graph="lean", ggml="x"))
    assert (wanted.kind, wanted.ggml, wanted.device) == ("llama.cpp", str(build), "CPU")
    reference = record_apart(wanted)
    assert reference.title.startswith(f"llama.cpp of {build}, ggml ")
    found = compare(record(run), reference)
    assert (found.misses, found.only_here, found.only_there, found.unlike) == ([], (), (), ())


def test_it_is_the_library_of_that_folder(build):
    done = run_python(
        "import sys\nfrom qwen3next_ggml.ggml.llama_library import _file_of, open_llama\napi = open_llama(sys.argv[1])\n"
        "print(_file_of(api.llama_decode))\nprint(_file_of(api._lib.ggml_backend_tensor_get).parent)\n"
        "print('llama_cpp' in sys.modules, api.llama_context_default_params().n_batch)",
        build,
    )  # fmt: skip
    assert done.stdout.splitlines() == [str(build / "libllama.cpu.v9.so"), str(build), "False 2048"], done.stderr


@pytest.mark.parametrize("change, said", [
    ("m.VERSION = '0.4'", "is 0.5.0-dev, expected 0.4: its structures may be others"),
    ("m.DEFAULTS['llama_context_default_params']['n_ubatch'] = 7", "parameters otherwise than llama.cpp 0.5: n_ubatch is 512, expected 7"),
    ("m.ContextParams._fields_; m.FUNCTIONS['llama_fly'] = (None,)", "lacks llama_fly, which llama.cpp 0.5 has"),
], ids=["version", "layout", "function"])  # fmt: skip
def test_another_llama_cpp_is_refused(build, change, said):
    done = run_python(
        f"import sys\nimport qwen3next_ggml.ggml.llama_library as m\nfrom qwen3next_ggml.errors import BackendError\n{change}\n"
        "try:\n    m.open_llama(sys.argv[1])\nexcept BackendError as error:\n    print(error)",
        build,
    )  # fmt: skip
    assert said in done.stdout and str(build) in done.stdout and done.stdout.count("\n") == 1, done.stderr


def test_a_field_more_moves_what_follows(build):
    """The check that finds it looks at where llama.cpp wrote its defaults, not at a copy of them."""
    done = run_python(
        "import ctypes, sys\nimport qwen3next_ggml.ggml.llama_library as m\nfrom qwen3next_ggml.errors import BackendError\n"
        "fields = m.ContextParams._fields_\n"
        "Longer = type('Longer', (ctypes.Structure,), {'_fields_': [*fields[:9], ('new', ctypes.c_int32), *fields[9:]]})\n"
        "m.FUNCTIONS['llama_context_default_params'] = (Longer,)\n"
        "try:\n    m.open_llama(sys.argv[1])\nexcept BackendError as error:\n    print(error)",
        build,
    )  # fmt: skip
    assert "lays out its parameters otherwise" in done.stdout, (done.stdout, done.stderr)


def test_folders_without_llama_cpp(run, tmp_path):
    with pytest.raises(BackendError, match="has no libllama: no library there holds llama_decode"):
        record_apart(reference_of(str(tmp_path), run))
    (tmp_path / "libllama.so").write_bytes(b"not a library")
    with pytest.raises(BackendError, match="has no libllama: .*libllama.so"):
        record_apart(reference_of(str(tmp_path), run))
    with pytest.raises(StateError, match="No such file"):
        reference_of(str(tmp_path / "none"), run)


# --- providers


def test_the_providers_of_a_sweep(monkeypatch):
    monkeypatch.delenv("QGRAPH_GGML", raising=False)
    assert providers()[:2] == ("ggml_python", "llama_cpp") and providers("llama_cpp")[:2] == ("llama_cpp", "ggml_python")
    assert providers("/some/where")[0] == "/some/where" and len(set(providers("/some/where"))) == len(providers()) + 1
    monkeypatch.setenv("QGRAPH_GGML", "llama_cpp")
    assert providers()[0] == "llama_cpp"
