"""Loading a model, whole: what comes with it, where it lies, what is refused."""

import numpy as np
import pytest

import qwen3next_ggml as q
from qwen3next_ggml.errors import BackendError, OptionError, UnsupportedModelError
from qwen3next_ggml.gguf_file import GgufFile
from tests.kit import max_abs, nmse

TOKENS = list(range(1, 40))


def decode(path, *, load=None, **session):
    """Logits of TOKENS and of three more steps, [42, n_vocab]."""
    with q.load(path, **load or {}) as model, model.session(n_ctx=256, **session) as s:
        return np.concatenate([s.decode(TOKENS, logits="all"), *(s.decode([t]) for t in (5, 6, 7))])


def test_the_embedded_model_is_the_default():
    with q.load() as model:
        assert (model.hparams.n_layer, model.hparams.n_layer_all, model.hparams.n_vocab) == (8, 9, 2048)
        assert model.tokenizer.decode(model.tokenizer.encode("To be")) == "To be"
        assert model.weights.planned.total() == sum(t.nbytes for t in model.tensors.values())


@pytest.mark.parametrize("graph", ["plain", "lean"])
def test_layers_spread_over_devices_give_the_same_bits(toys, graph):
    one = decode(toys.t0, graph=graph)
    two = decode(toys.t0, load={"device": ["CPU", "CPU"]}, graph=graph)
    assert np.array_equal(one, two)


def test_a_copied_file_gives_the_same_bits_and_a_repacked_one_the_same_numbers(toys):
    path = toys.file(geometry="tiny-q", type="q4_0")
    mapped = decode(path, load={"mmap": True, "repack": False})
    assert np.array_equal(mapped, decode(path, load={"mmap": False, "repack": False}))
    repacked = decode(path, load={"repack": True})
    # other kernels, and activations rounded to 8 bits four rows at a time
    assert nmse(repacked, mapped) < 1e-3
    assert nmse(np.roll(repacked, 1, axis=0), mapped) > 1e-1


def test_without_weights_there_is_nothing_to_compute():
    with q.load(weights=False) as model:
        assert model.hparams.n_layer == 8
        with pytest.raises(OptionError, match="weights=False"):
            model.session()


def test_without_its_nextn_block_a_model_computes_the_same(toys):
    with_head, without = (decode(toys.mtp, load={"load_mtp": load}) for load in (True, False))
    assert np.array_equal(with_head, without)


@pytest.mark.parametrize(
    "load, error, says",
    [
        ({"device": "Vulkan7"}, BackendError, "Vulkan7.*CPU"),
        ({"device": []}, OptionError, "empty"),
        ({"n_threads": 0}, OptionError, "at least 1"),
        ({"repack": "some"}, OptionError, "repack"),
        ({"mmap": "some"}, OptionError, "mmap"),
    ],
)
def test_bad_arguments_are_named(load, error, says):
    with pytest.raises(error, match=says):
        q.load(**load)


def test_a_refused_file_is_closed_again(toys, monkeypatch):
    closed = []
    close = GgufFile.close
    monkeypatch.setattr(GgufFile, "close", lambda self: (closed.append(self), close(self)))
    with pytest.raises(UnsupportedModelError, match="qwen3next"):
        q.load(toys.file(metadata={"general.architecture": "kimi-linear"}))
    assert len(closed) == 1


@pytest.mark.parametrize("name, value", [("n_ctx", -1), ("n_seq_max", 0), ("n_ubatch", 0), ("n_rollback", -1), ("checkpoint_every", -1)])
def test_session_sizes_are_checked(name, value):
    with q.load() as model, pytest.raises(OptionError, match=name):
        model.session(**{name: value})


def test_a_context_that_does_not_fit_says_how_much_is_missing():
    with q.load() as model, pytest.raises(BackendError, match=r"needs [\d,]+ MiB.* [\d,]+ MiB are available"):
        model.session(n_ctx=75_000_000)


def test_n_ctx_0_is_what_the_model_was_trained_for():
    with q.load() as model, model.session(n_ctx=0) as s:
        assert s.n_ctx == model.hparams.n_ctx_train
        assert max_abs(s.decode([1]), s.prompt([1])) == 0
