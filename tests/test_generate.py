"""Generation: on a scripted session for every way to end, on the embedded model for repeatability."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qwen3next_ggml
from qwen3next_ggml.errors import ContextFull, NonFinite, OptionError
from qwen3next_ggml.generate import _TextOut, stream_generate
from qwen3next_ggml.sampler import SamplerParams
from qwen3next_ggml.tokenizer import Tokenizer

from .kit import read_metadata, run_python
from .kit.process import ROOT

TOKENIZER = Tokenizer.from_metadata(read_metadata(ROOT / "qwen3next_ggml" / "data" / "bard.gguf"))
N_VOCAB = TOKENIZER.n_vocab


class ScriptedSession:
    """Answers with one text's tokens in turn, over and over, whatever is decoded; keeps what the real one keeps."""

    def __init__(self, text, n_ctx=64, closed=None):
        self.script = TOKENIZER.encode(text, parse_special=True)
        self.n_ctx, self.held, self.last_evaluated, self.closed = n_ctx, [], 0, closed

    def prompt(self, tokens, *, seq):
        keep = len(self.held) if self.held == tokens[:len(self.held)] and len(self.held) < len(tokens) else 0
        self.held = self.held[:keep]
        self.last_evaluated = len(tokens) - keep
        self.n_prompt = len(tokens)
        return self.decode(tokens[keep:], seq=seq)

    def decode(self, tokens, *, seq):
        assert len(self.held) + len(tokens) <= self.n_ctx
        self.held += tokens
        logits = np.zeros((1, N_VOCAB), np.float32)
        logits[0, self.script[(len(self.held) - self.n_prompt) % len(self.script)]] = 50
        logits[0, TOKENIZER.encode("!")] = 20
        return logits

    def decode_top(self, token, k, *, seq):
        row = self.decode([token], seq=seq)[0]
        ids = np.argsort(-row, kind="stable")[:k]
        return ids, row[ids]

    def n_past(self, seq):
        return len(self.held)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed.append(True)


def scripted(text, **options):
    closed = []
    session = ScriptedSession(text, closed=closed, **options)
    return SimpleNamespace(tokenizer=TOKENIZER, hparams=SimpleNamespace(n_vocab=N_VOCAB), session=lambda: session, closed=closed)


def run(text, prompt="ROMEO.\n", session_options=None, **options):
    model = scripted(text, **session_options or {})
    steps = list(stream_generate(model, prompt, temp=0, **options))
    assert model.closed == [True]
    assert [step.finish_reason is None for step in steps] == [True] * (len(steps) - 1) + [False]
    assert [step.timings is None for step in steps] == [True] * (len(steps) - 1) + [False]
    return steps, "".join(step.text for step in steps)


def test_ends_at_the_end_of_generation():
    steps, text = run("Good night.<|im_end|>more")
    assert text == "Good night."
    assert (steps[-1].finish_reason, steps[-1].token, steps[-1].text) == ("eog", TOKENIZER.eos, "")
    n_prompt = len(TOKENIZER.encode("ROMEO.\n"))
    assert [step.n_past for step in steps] == list(range(n_prompt, n_prompt + len(steps)))
    assert run("Good night.<|im_end|>", special=True)[1] == "Good night.<|im_end|>"


def test_ends_after_n_predict_tokens():
    steps, text = run("Good night, good night! Parting", n_predict=4)
    assert len(steps) == 4 and steps[-1].finish_reason == "length"
    assert [step.token for step in steps] == TOKENIZER.encode("Good night, good night! Parting")[:4]
    assert text == TOKENIZER.decode([step.token for step in steps])


def test_ends_where_the_context_does():
    prompt = TOKENIZER.encode("ROMEO.\n")
    for n_predict in (-1, 1000):
        steps, _ = run("a " * 50, prompt=prompt, n_predict=n_predict, session_options={"n_ctx": 12})
        # the last token is chosen from a full context and takes no cell
        assert len(steps) == 12 - len(prompt) + 1 and steps[-1].n_past == 12 and steps[-1].finish_reason == "length"
    steps, _ = run("a b", prompt=[1] * 12, session_options={"n_ctx": 12})
    assert len(steps) == 1


def test_no_token_wanted_evaluates_the_prompt_alone():
    steps, text = run("unseen", n_predict=0)
    assert (len(steps), text, steps[0].token, steps[0].finish_reason) == (1, "", None, "length")
    assert steps[0].timings.prompt_n == steps[0].n_past == len(TOKENIZER.encode("ROMEO.\n"))
    assert steps[0].timings.predicted_n == 0


@pytest.mark.parametrize("stop, expected", [
    ("night", "Good "), (["sorrow", "night,"], "Good "), ("good night", "Good night, "), (["t, g", "ight"], "Good n"), ("G", ""),
    ("Parting is", "Good night, good night! "), ("never", "Good night, good night! Parting is"),
    (["is<"], "Good night, good night! Parting is"),
])
def test_stop_strings_end_the_text_before_them(stop, expected):
    steps, text = run("Good night, good night! Parting is<|im_end|>", stop=stop)
    assert text == expected
    assert steps[-1].finish_reason == ("eog" if "never" in stop or "is<" in stop else "stop")


PIECES = st.lists(st.text("abX", max_size=3), max_size=12)


@given(PIECES, st.lists(st.text("abX", min_size=1, max_size=4), max_size=3))
def test_held_text_is_all_of_it_up_to_the_first_stop(pieces, stops):
    class Pieces:
        def push(self, piece):
            return piece

        def flush(self):
            return ""

    out, shown, stopped = _TextOut(Pieces(), tuple(stops)), "", False
    for i, piece in enumerate(pieces):
        text, stopped = out.push(piece)
        shown += text
        so_far = "".join(pieces[:i + 1])
        assert stopped == any(stop in so_far for stop in stops)
        if stopped:
            break
        # nothing is held that could not be the beginning of a stop string
        held = so_far[len(shown):]
        assert so_far.startswith(shown) and (not held or any(stop.startswith(held) for stop in stops))
    shown += "" if stopped else out.flush()
    whole = "".join(pieces)
    assert shown == whole or stopped and shown == so_far[:min(so_far.find(stop) for stop in stops if stop in so_far)]


def test_text_is_whole_characters():
    steps, text = run("é🤔 done<|im_end|>")
    assert text == "é🤔 done"
    assert all("\ufffd" not in step.text for step in steps)
    thinking = TOKENIZER.encode("🤔")
    assert len(thinking) == 4
    steps, text = run("🤔", n_predict=3)
    assert [step.text for step in steps] == ["", "", "\ufffd"] and text == "\ufffd"


def test_ignore_eos_never_chooses_an_ending():
    steps, text = run("Go<|im_end|><|endoftext|>on", ignore_eos=True, n_predict=5, logit_bias={0: -1.0})
    assert not any(TOKENIZER.is_eog(step.token) for step in steps)
    assert "!" in text and steps[-1].finish_reason == "length"


def test_special_texts_in_the_prompt_only_where_asked():
    model = scripted("x<|im_end|>")
    for parse_special, expected in ((True, 1), (False, len(TOKENIZER.encode("<|im_start|>")))):
        (step,) = stream_generate(model, "<|im_start|>", parse_special=parse_special, n_predict=0)
        assert step.n_past == expected > 0


def test_processors_see_all_tokens_and_change_the_choice():
    seen = []

    def watch(tokens, logits):
        seen.append(list(tokens))
        tokens.clear()
        return logits

    def shout(tokens, logits):
        logits[TOKENIZER.encode("!")] = 90
        return logits

    prompt = TOKENIZER.encode("ROMEO.\n")
    steps, text = run("Good night", n_predict=3, logits_processors=[watch, shout])
    assert text == "!!!"
    assert seen == [prompt + TOKENIZER.encode("!") * n for n in range(3)]
    with pytest.raises(OptionError, match=rf"returned shape \[1, {N_VOCAB}\], expected \[{N_VOCAB}\]"):
        run("Good night", logits_processors=[lambda tokens, logits: logits[None]])


def test_penalties_look_back_into_the_prompt():
    bang = TOKENIZER.encode("!")
    model = scripted("aaaa")
    options = {"n_predict": 1, "samplers": "penalties;temperature", "temp": 0, "penalty_present": 40.0}
    (step,) = stream_generate(model, TOKENIZER.encode("a") + TOKENIZER.encode("b"), **options)
    assert step.token == bang[0]
    (step,) = stream_generate(scripted("aaaa"), TOKENIZER.encode("b"), **options)
    assert step.token == TOKENIZER.encode("a")[0]


def test_params_and_names_are_the_same_thing():
    def tokens(**options):
        return [step.token for step in stream_generate(flat_model(), [1], n_predict=20, **options)]

    assert tokens(params=SamplerParams(seed=9, temp=2.0)) == tokens(seed=9, temp=2.0) == tokens(params=SamplerParams(temp=2.0), seed=9)
    assert tokens(seed=9) != tokens(seed=10)


def flat_model():
    class Flat(ScriptedSession):
        def decode(self, tokens, *, seq):
            super().decode(tokens, seq=seq)
            return np.random.default_rng(len(self.held)).standard_normal((1, N_VOCAB)).astype(np.float32)

    session = Flat("x" * 300, closed=[])
    return SimpleNamespace(tokenizer=TOKENIZER, hparams=SimpleNamespace(n_vocab=N_VOCAB), session=lambda: session)


@pytest.mark.parametrize("prompt, options, error, message", [
    ("hi", {"n_predict": -2}, OptionError, "n_predict is -2, expected -1"),
    ("hi", {"stop": ["a", ""]}, OptionError, "a stop string is empty"),
    ("hi", {"temp": -1}, OptionError, "temp is -1"),
    ("", {}, OptionError, "the prompt holds no tokens"),
    ([], {}, OptionError, "the prompt holds no tokens"),
    ([5, N_VOCAB], {}, OptionError, f"the prompt holds token {N_VOCAB}, the vocabulary has {N_VOCAB} tokens"),
    ([-1], {}, OptionError, "the prompt holds token -1"),
    ([5] * 65, {}, ContextFull, "the prompt has 65 tokens, the context holds 64"),
])
def test_refusals_come_before_anything_is_evaluated(prompt, options, error, message):
    model = scripted("unseen")
    session = model.session()
    with pytest.raises(error, match=message):
        next(stream_generate(model, prompt, session=session, **options))
    assert session.held == [] and model.closed == []


def test_bad_values_are_refused_at_the_call():
    with pytest.raises(OptionError):
        stream_generate(scripted("x"), "hi", temp=-1)


def test_nan_logits_are_an_error_and_close_the_session():
    model = scripted("x")
    model.session().decode = lambda tokens, *, seq: np.full((1, N_VOCAB), np.nan, np.float32)
    with pytest.raises(NonFinite, match=f"{N_VOCAB} NaN"):
        list(stream_generate(model, "hi"))
    assert model.closed == [True]


def test_timings_add_up():
    steps, _ = run("Good night, good night!", n_predict=4)
    timings = steps[-1].timings
    assert timings.predicted_n == 4 and timings.prompt_n == len(TOKENIZER.encode("ROMEO.\n"))
    assert timings.prompt_per_second == pytest.approx(1e3 * timings.prompt_n / timings.prompt_ms)
    assert timings.predicted_per_second == pytest.approx(4e3 / timings.predicted_ms)


@pytest.fixture(scope="module")
def model():
    with qwen3next_ggml.load() as model:
        yield model


def words(model, prompt, **options):
    steps = list(stream_generate(model, prompt, **options))
    return [step.token for step in steps], "".join(step.text for step in steps), steps[-1]


@pytest.mark.parametrize("options", [{"temp": 0.0}, {"seed": 5}, {"seed": 5, "temp": 1.4, "penalty_repeat": 1.2}])
def test_one_session_says_the_same_again_and_again(model, options):
    prompt = TOKENIZER.encode("ROMEO.\nWhat light through yonder window")
    with model.session(n_ctx=256) as session:
        first = words(model, prompt, n_predict=20, session=session, **options)
        again = [words(model, prompt, n_predict=20, session=session, **options) for _ in range(2)]
        shorter = words(model, prompt[:-1], n_predict=20, session=session, **options)
        longer = words(model, prompt + [64], n_predict=20, session=session, **options)
    assert first[:2] == again[0][:2] == again[1][:2]
    assert first[2].timings.prompt_n == again[1][2].timings.prompt_n == len(prompt)
    for prompt_, said in ((prompt[:-1], shorter), (prompt + [64], longer)):
        assert said[:2] == words(model, prompt_, n_predict=20, **options)[:2]


FRESH = """
import json, sys, qwen3next_ggml as q
prompt, options = json.loads(sys.argv[1])
with q.load() as model:
    steps = list(q.stream_generate(model, prompt, **options))
print(json.dumps([[step.token for step in steps], "".join(step.text for step in steps)]))
"""


def test_a_fresh_process_says_the_same(model):
    prompt, options = "To be, or not to be", {"n_predict": 20, "seed": 12}
    child = run_python(FRESH, json.dumps([prompt, options]))
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout) == list(words(model, prompt, **options)[:2])


OURS = """
import json, sys, qwen3next_ggml as q
prompt, n_predict, seeds = json.loads(sys.argv[1])
with q.load() as model, model.session(n_ctx=256, graph="plain", flash_attn=False) as session:
    print(json.dumps([[step.token for step in q.stream_generate(model, prompt, session=session, n_predict=n_predict, seed=seed)]
                      for seed in seeds]))
"""

THEIRS = """
import ctypes, json, sys
from llama_cpp import llama_cpp as api
from tests.kit.llama_child import Llama, LlamaOptions
prompt, n_predict, seeds = json.loads(sys.argv[1])
llama = Llama("qwen3next_ggml/data/bard.gguf", LlamaOptions(n_ctx=256, type_k="f16", type_v="f16"))

def choose(chain, row):
    data = (api.llama_token_data * len(row))(*((i, x, 0.0) for i, x in enumerate(row)))
    array = api.llama_token_data_array(data, len(row), -1, False)
    api.llama_sampler_apply(chain, ctypes.byref(array))
    return array.data[array.selected].id

def generate(seed):
    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    for sampler in (api.llama_sampler_init_top_k(40), api.llama_sampler_init_top_p(0.95, 0), api.llama_sampler_init_min_p(0.05, 0),
                    api.llama_sampler_init_temp_ext(0.8, 0.0, 1.0), api.llama_sampler_init_dist(seed)):
        api.llama_sampler_chain_add(chain, sampler)
    llama.clear()
    tokens = llama.tokenize(prompt, add_special=True, parse_special=False)
    n_prompt, n_past = len(tokens), 0
    while len(tokens) < n_prompt + n_predict and not (n_past and api.llama_vocab_is_eog(llama.vocab, tokens[-1])):
        last = len(tokens) - 1
        rows = llama.decode([(tokens[i], i, 0, i == last) for i in range(n_past, len(tokens))])
        n_past = len(tokens)
        tokens.append(choose(chain, rows[-1].tolist()))
    return tokens[n_prompt:]

print(json.dumps([generate(seed) for seed in seeds]))
"""


def test_one_seed_gives_llama_cpps_text():
    job = json.dumps(["ROMEO.\nBut soft", 80, [1, 2, 3, 2**32 - 2]])
    # one libggml and one graph on both sides: the logits are the same numbers, so the draws must be the same tokens
    ours, theirs = run_python(OURS, job, env={"QGRAPH_GGML": "llama_cpp"}), run_python(THEIRS, job)
    assert ours.returncode == 0 and theirs.returncode == 0, ours.stderr + theirs.stderr[-2000:]
    assert json.loads(ours.stdout) == json.loads(theirs.stdout)


def test_a_prompt_that_extends_the_session_costs_the_new_tokens_only(model):
    prompt = TOKENIZER.encode("HAMLET.\nTo be, or not to be")
    with model.session(n_ctx=256) as session:
        tokens, _, _ = words(model, prompt, n_predict=10, session=session, temp=0)
        more = prompt + tokens + TOKENIZER.encode("\n\nHORATIO.\n")
        continued = words(model, more, n_predict=10, session=session, temp=0)
        # the last token of the first answer was chosen and never decoded
        assert continued[2].timings.prompt_n == len(more) - len(prompt) - len(tokens) + 1
    assert continued[0] == words(model, more, n_predict=10, temp=0)[0]


def test_a_prompt_past_the_context_leaves_the_session_as_it_was(model):
    with model.session(n_ctx=256) as session:
        tokens, _, _ = words(model, "To be", n_predict=5, session=session, temp=0)
        n_past = session.n_past(0)
        with pytest.raises(ContextFull, match=f"the prompt has 300 tokens, the context holds {session.n_ctx}"):
            next(stream_generate(model, [64] * 300, session=session))
        assert session.n_past(0) == n_past
        assert words(model, "To be", n_predict=5, session=session, temp=0)[0] == tokens
