"""Layers left out, repeated and reordered when a model is loaded."""

from dataclasses import replace

import numpy as np
import pytest

import qwen3next_ggml as q
from qwen3next_ggml.errors import OptionError, StateError, UnsupportedModelError
from qwen3next_ggml.reference import ReferenceModel, hparams_from_metadata
from tests.kit import max_abs, read_arrays, read_metadata

TOKENS = np.random.default_rng(7).integers(0, 97, 30).tolist()
F32 = dict(n_ctx=256, type_k="f32", type_v="f32", flash_attn=False)


def decoded(path, *, options=None, **load):
    with q.load(path, n_threads=1, **load) as model, model.session(**F32, n_ubatch=16, **options or {}) as s:
        rows = [s.decode(TOKENS[:-3], logits="all")] + [s.decode([token]) for token in TOKENS[-3:]]
    return np.concatenate(rows)


def walked(path, layers):
    """The float64 model over the same blocks, its weights under new names."""
    hp = hparams_from_metadata(read_metadata(path))
    arrays = read_arrays(path)
    blocks = {f"blk.{new}.{name.split('.', 2)[2]}": x for new, il in enumerate(layers) for name, x in arrays.items() if name.startswith(f"blk.{il}.")}
    outside = {name: x for name, x in arrays.items() if not name.startswith("blk.")}
    recurrent = tuple(hp.recurrent_layers[il] for il in layers)
    return ReferenceModel(replace(hp, n_layer=len(layers), n_layer_nextn=0, recurrent_layers=recurrent), outside | blocks).decode(TOKENS)


@pytest.mark.parametrize("layers", [[0, 1, 2, 2, 3], [3, 3, 0], [2, 1, 0], [0], [3], [0, 1, 2, 3, 0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("options", [{}, {"graph": "plain", "delta_net": "chunked"}], ids=["lean", "plain"])
def test_the_layers_are_those_of_the_list(toys, layers, options):
    got = decoded(toys.t0, layers=layers, options=options)
    assert max_abs(got, walked(toys.t0, layers)) < 1e-4
    assert max_abs(got, walked(toys.t0, [0, 1, 2, 3])) > 1e-2


def test_layers_are_skipped(toys):
    assert np.array_equal(decoded(toys.t0, skip=[1]), decoded(toys.t0, layers=[0, 2, 3]))
    assert np.array_equal(decoded(toys.t0, layers=[3, 1, 0, 1], skip=[1]), decoded(toys.t0, layers=[3, 0]))


def test_all_layers_in_order_are_the_model_itself(toys):
    want = decoded(toys.mtp)
    assert np.array_equal(decoded(toys.mtp, layers=range(4)), want) and np.array_equal(decoded(toys.mtp, skip=[]), want)
    with q.load(toys.mtp, layers=np.arange(4)) as model, q.load(toys.mtp) as plain:
        assert model.layers is None and model.hparams == plain.hparams and model.fingerprint == plain.fingerprint
        model.session(n_ctx=256, mtp=True).close()


def test_weights_are_shared_and_states_are_not(toys):
    with q.load(toys.t0, layers=[0, 0, 3, 3]) as model, q.load(toys.t0) as plain, model.session(**F32) as s:
        assert model.weights.planned == plain.weights.planned
        assert model.weights.blk[0] is model.weights.blk[1] and model.hparams.recurrent_layers == (True, True, False, False)
        s.decode(TOKENS)
        assert max_abs(s.state(0)["s"], s.state(1)["s"]) > 1e-3


def test_values_have_the_new_numbers(toys):
    with q.load(toys.t0, n_threads=1, layers=[1, 3, 0]) as model, model.session(**F32) as s, s.capture("l_out-*", "Kcur-1") as t:
        s.decode(TOKENS[:4])
        assert set(t) == {"l_out-0", "l_out-1", "l_out-2", "Kcur-1"}
        assert [layer for layer in s.graph(4).layers] == [0, 1, 2]


def test_a_session_belongs_to_its_layers(toys, tmp_path):
    with q.load(toys.t0, layers=[0, 1, 1, 3]) as model, q.load(toys.t0) as plain:
        with model.session(**F32) as s:
            s.decode(TOKENS)
            s.save(tmp_path / "s")
        with pytest.raises(StateError, match="belongs to another model"):
            plain.load_session(tmp_path / "s")
        with model.load_session(tmp_path / "s") as s:
            assert s.n_past() == len(TOKENS)


@pytest.mark.parametrize(
    "load, says",
    [
        ({"layers": [0, 4]}, "layers: there is no layer 4; the model has 0 to 3"),
        ({"layers": [-1]}, "layers: there is no layer -1"),
        ({"layers": ["one"]}, "layers: there is no layer 'one'"),
        ({"skip": [9]}, "skip: there is no layer 9; the model has 0 to 3"),
        ({"layers": []}, "leave no layer of 4"),
        ({"layers": [1], "skip": [1]}, "leave no layer of 4"),
    ],
)
def test_layers_that_do_not_exist(toys, load, says):
    with pytest.raises(OptionError, match=says):
        q.load(toys.t0, **load)


def test_the_nextn_block_goes_with_the_trunk_it_was_trained_on(toys):
    with q.load(toys.mtp, layers=[0, 1, 3]) as model, pytest.raises(UnsupportedModelError, match="drafting needs one NextN block"):
        model.session(n_ctx=256, mtp=True)
