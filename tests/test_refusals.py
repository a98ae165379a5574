"""What a caller gets wrong is told in a sentence of his own words: closed sessions and models, values of the wrong kind, names close by."""

import pytest

import qwen3next_ggml as q
from qwen3next_ggml.chat import ChatTemplate
from qwen3next_ggml.errors import OptionError, StateError
from qwen3next_ggml.generate import stream_generate

CALLS = {
    "decode": lambda s: s.decode([1]),
    "decode, several": lambda s: s.decode([1, 2]),
    "decode_batch": lambda s: s.decode_batch({0: [1]}),
    "decode_top": lambda s: s.decode_top(1, 2),
    "prompt": lambda s: s.prompt([1, 2]),
    "prompt, nothing new": lambda s: s.prompt([1, 2, 3, 4]),
    "rewind": lambda s: s.rewind(n=1),
    "fork": lambda s: s.fork(0, dst=1),
    "clear": lambda s: s.clear(),
    "checkpoint": lambda s: s.checkpoint(),
    "save": lambda s: s.save("nowhere"),
    "n_past": lambda s: s.n_past(),
    "state": lambda s: s.state(0),
    "graph": lambda s: s.graph(),
    "capture": lambda s: s.capture("l_out-1").__enter__(),
    "patch": lambda s: s.patch("l_out-1", lambda g, x: x).__enter__(),
    "debug_capture": lambda s: s.debug_capture({0: [1]}),
}


@pytest.fixture(scope="module")
def model(toys):
    with q.load(toys.t0, n_threads=1) as model:
        yield model


def used(model):
    """A session that holds four tokens, the last of them taken the short way."""
    session = model.session(n_ctx=256, n_seq_max=2)
    session.decode([1, 2, 3])
    session.decode([4])
    return session


@pytest.fixture(scope="module")
def closed(model):
    session = used(model)
    session.close()
    session.close()
    return session


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_closed_session(closed, call):
    with pytest.raises(StateError, match=r"^the session is closed$"):
        call(closed)


def test_a_closed_model_takes_its_sessions_along(toys):
    model = q.load(toys.t0, n_threads=1)
    session, gone = used(model), used(model)
    gone.close()
    model.close()
    model.close()
    with pytest.raises(StateError, match=r"^the session is closed$"):
        session.decode([5])
    with pytest.raises(StateError, match=r"^the model .*\.gguf is closed$"):
        model.session()


@pytest.mark.parametrize("options, words", [
    ({"n_ctx": "4096"}, "n_ctx is '4096', expected a whole number"),
    ({"n_ctx": 4096.0}, "n_ctx is 4096.0, expected a whole number"),
    ({"n_ctx": -1}, "n_ctx must be at least 0, got -1"),
    ({"n_ubatch": 0}, "n_ubatch must be at least 1, got 0"),
    ({"n_threads": 0}, "n_threads must be at least 1, got 0"),
    ({"n_rollback": None}, "n_rollback is None, expected a whole number"),
])  # fmt: skip
def test_sizes_of_a_session(model, options, words):
    with pytest.raises(OptionError) as caught:
        model.session(**options)
    assert str(caught.value) == words


@pytest.mark.parametrize("call, words", [
    (lambda s: s.decode("To be"), "sequence 0: expected a non-empty list of token ids, got a str"),
    (lambda s: s.decode([]), "sequence 0: expected a non-empty list of token ids, got shape (0,)"),
    (lambda s: s.decode([1.5]), "sequence 0: token ids must be integers, got float64"),
    (lambda s: s.state(99), "there is no layer 99; the model has 0 to 3"),
    (lambda s: s.decode_top(1, 0), "k is 0, expected 1 to 97"),
    (lambda s: ChatTemplate.from_metadata({}, source="{{ messages }}").render("To be"), "a message is 'T', expected a mapping with role and content"),
])  # fmt: skip
def test_calls(model, call, words):
    with used(model) as session, pytest.raises(OptionError) as caught:
        call(session)
    assert str(caught.value) == words


@pytest.mark.parametrize("options, words", [
    ({"n_predict": "4"}, "n_predict is '4', expected -1 (until the context is full) or a number of tokens"),
    ({"stop": 3}, "stop is 3, expected a string or several"),
    ({"stop": ["a", 3]}, "stop is ['a', 3], expected a string or several"),
    ({"stop": ["a", ""]}, "a stop string is empty"),
    ({"temp": "hot"}, "temp is 'hot', expected a number"),
    ({"top_k": 1.5}, "top_k is 1.5, expected a whole number"),
    ({"seed": "4"}, "seed is '4', expected a whole number"),
    ({"samplers": ["top_k"]}, "samplers is ['top_k'], expected names joined by ';'"),
    ({"logit_bias": {"a": 1}}, "logit_bias has 1 for 'a', expected a number for a token id"),
    ({"repeat_penalty": 1.1}, "no sampling option is called repeat_penalty; close to it are penalty_freq, penalty_repeat, penalty_last_n"),
    ({"zzz": 1}, "no sampling option is called zzz"),
    ({"prompt": None}, "the prompt is a NoneType, expected text or a list of token ids"),
    ({"prompt": [1, 2.5]}, "the prompt holds 2.5, expected token ids"),
])  # fmt: skip
def test_options_of_a_generation(model, options, words):
    with pytest.raises(OptionError) as caught:
        stream_generate(model, **{"prompt": [1, 2]} | options)
    assert str(caught.value) == words
