"""Control vectors: read as llama.cpp reads them, added where it adds them."""

import json

import gguf
import numpy as np
import pytest

import qwen3next_ggml as q
from qwen3next_ggml.errors import GgufError, OptionError
from tests.kit import max_abs, nmse, reference_of, run_python

TOKENS = np.random.default_rng(5).integers(0, 97, 24).tolist()
F32 = dict(n_ctx=256, type_k="f32", type_v="f32", flash_attn=False)
N_EMBD = 64


def write(path, directions, name="direction.{}"):
    writer = gguf.GGUFWriter(path, "controlvector")
    for il, x in directions.items():
        writer.add_tensor(name.format(il), np.asarray(x))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def directions(*layers, seed=0, n=N_EMBD):
    rng = np.random.default_rng(seed)
    return {il: rng.normal(size=n).astype(np.float32) for il in layers}


@pytest.fixture(scope="module")
def model(toys):
    with q.load(toys.t0, n_threads=1) as model:
        yield model


def decoded(model, vector=None, **options):
    with model.session(**F32 | options) as s:
        if vector is None:
            return s.decode(TOKENS, logits="all")
        with vector.on(s):
            return s.decode(TOKENS, logits="all")


def reference(path, added):
    """The float64 model with `added` directions put behind its blocks."""
    model = reference_of(path)
    plain = model._block
    model._block = lambda x, il, state, note: plain(x, il, state, note) + added.get(il, 0)
    return model.decode(TOKENS)


@pytest.mark.parametrize("options", [{}, {"graph": "plain"}, {"n_ubatch": 7, "delta_net": "chunked"}], ids=["lean", "plain", "chunked"])
def test_directions_are_added_to_what_layers_put_out(model, toys, tmp_path, options):
    given = directions(1, 3)
    vector = q.control_vector(write(tmp_path / "v.gguf", given), scale=0.5)
    got = decoded(model, vector, **options)
    assert max_abs(got, reference(toys.t0, {il: 0.5 * x for il, x in given.items()})) < 1e-4
    assert max_abs(got, reference(toys.t0, given)) > 1e-2
    assert max_abs(got, decoded(model)) > 1e-2


def test_vectors_add_up_and_nest(model, toys, tmp_path):
    a, b = directions(1, 2, seed=1), directions(2, 3, seed=2)
    va, vb = q.control_vector(write(tmp_path / "a", a)), q.control_vector(write(tmp_path / "b", b), scale=-2.0)
    want = reference(toys.t0, {1: a[1], 2: a[2] - 2 * b[2], 3: -2 * b[3]})
    assert max_abs(decoded(model, va + vb), want) < 1e-4
    with model.session(**F32) as s, va.on(s), vb.on(s):
        assert max_abs(s.decode(TOKENS, logits="all"), want) < 1e-4


def test_a_range_of_layers(model, toys, tmp_path):
    given = directions(1, 2, 3)
    vector = q.control_vector(write(tmp_path / "v", given))
    assert max_abs(decoded(model, vector.within(2, 2)), reference(toys.t0, {2: given[2]})) < 1e-4
    with pytest.raises(OptionError, match="no direction for layers 4 to 9: it has 1, 2, 3"):
        vector.within(4, 9)


def test_the_session_is_as_before_after_the_block(model, tmp_path):
    with model.session(**F32) as s:
        want = s.decode(TOKENS)
        s.clear()
        with q.control_vector(write(tmp_path / "v", directions(2))).on(s):
            assert max_abs(s.decode(TOKENS), want) > 1e-2
        s.clear()
        assert np.array_equal(s.decode(TOKENS), want)


def test_layers_the_model_has_not_are_left_out(model, tmp_path):
    given = directions(1, 9)
    both, one = (q.control_vector(write(tmp_path / str(i), x)) for i, x in enumerate((given, {1: given[1]})))
    assert np.array_equal(decoded(model, both), decoded(model, one))
    with pytest.raises(OptionError, match="no direction for layers 0 to 3: it has 9"):
        decoded(model, both.within(9, 9))


@pytest.mark.parametrize(
    "given, name, says",
    [
        ({}, "direction.{}", "holds no tensors"),
        (directions(1), "steer.{}", "tensor 'steer.1', expected direction.N with N at least 1"),
        (directions(0), "direction.{}", "tensor 'direction.0', expected direction.N"),
        ({1: np.ones((2, 64), np.float32)}, "direction.{}", r"direction.1 is f32 \[64, 2\], expected one row of f32"),
        ({1: np.ones(64, np.float16)}, "direction.{}", r"direction.1 is f16 \[64\], expected one row of f32"),
        (directions(1) | directions(2, n=32), "direction.{}", r"directions are \[32, 64\] wide, expected one width"),
    ],
)
def test_files_that_are_refused(tmp_path, given, name, says):
    with pytest.raises(GgufError, match=says):
        q.control_vector(write(tmp_path / "v", given, name))


def test_another_width_is_refused(model, tmp_path):
    narrow = q.control_vector(write(tmp_path / "v", directions(1, n=32)))
    with pytest.raises(OptionError, match="the control vector is 32 wide, the model 64"):
        decoded(model, narrow)
    with pytest.raises(OptionError, match="width 32 and 64 cannot be added"):
        narrow + q.control_vector(write(tmp_path / "w", directions(1)))


# llama.cpp's low-level API on the same file, the directions handed over as its common code hands them: layer 1 first
LLAMA = """
import ctypes, json, sys
import numpy as np
from tests.kit.llama_api import Llama, LlamaOptions
path, given, tokens, start, end = sys.argv[1], *map(json.loads, sys.argv[2:])
llama = Llama(path, LlamaOptions())
flat = np.zeros((max(map(int, given)), 64), np.float32)
for il, x in given.items():
    flat[int(il) - 1] = x
data = flat.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
assert llama.api.llama_set_adapter_cvec(llama.context, data, flat.size, 64, start, end) == 0
print(json.dumps(llama.decode([(t, i, 0, True) for i, t in enumerate(tokens)]).tolist()))
llama.close()
"""


def test_llama_cpp_steers_the_same_way(model, toys, tmp_path):
    given = directions(1, 2, 3)
    done = run_python(LLAMA, toys.t0, json.dumps({il: x.tolist() for il, x in given.items()}), json.dumps(TOKENS), 2, 3)
    assert done.returncode == 0, done.stderr[-2000:]
    want, vector = np.array(json.loads(done.stdout)), q.control_vector(write(tmp_path / "v", given))
    assert nmse(decoded(model, vector.within(2, 3)), want) < 1e-6
    assert nmse(decoded(model, vector), want) > 1e-3
