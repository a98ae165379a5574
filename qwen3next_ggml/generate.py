"""Text from a prompt: session, sampler and tokenizer joined in one generator of Step records (level 11).

Knows nothing of graphs, devices or terminals.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from numbers import Integral
from time import perf_counter

import numpy as np

from .errors import ContextFull, OptionError
from .sampler import Proposal, Sampler, SamplerParams
from .speculative import DraftStats, SpecParams

LogitsProcessor = Callable[[list[int], np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Timings:
    """What a generation took, under llama-server's names; times in milliseconds, what happens between steps not counted."""

    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


@dataclass(frozen=True)
class Step:
    """One token chosen, and the text it completes; texts joined are the whole text.

    token: None if none was wanted (n_predict 0). text: whole characters only, without a stop string. n_past: tokens the
    sequence holds, without this one. finish_reason: None, or on the last step "eog", "length" or "stop".
    timings: on the last step; drafts too, where tokens were drafted.
    """

    token: int | None
    text: str
    n_past: int
    seed: int
    finish_reason: str | None = None
    timings: Timings | None = None
    drafts: DraftStats | None = None


def stream_generate(
    model, prompt: str | Sequence[int], *, n_predict: int = -1, session=None, seq: int = 0, special: bool = False,
    parse_special: bool = False, ignore_eos: bool = False, stop: str | Sequence[str] = (),
    logits_processors: Sequence[LogitsProcessor] = (), params: SamplerParams | None = None, sampler: Sampler | None = None,
    spec_type: str = "none", spec_draft_n_max: int | str = 3, spec_draft_p_min: float = 0.0, **sampling,
) -> Iterator[Step]:  # fmt: skip
    """Continue a prompt; yields a Step for each token.

    n_predict: tokens wanted at most, -1 until the context is full. session: its sequence `seq` is brought to the prompt,
    keeping what the prompt extends; without one a session of the model's is made and closed. special: control tokens show
    in the text. parse_special: their texts in the prompt become them. stop: strings that end the text.
    logits_processors: called with all tokens so far and logits [n_vocab], return logits. spec_type: "draft-mtp" lets the
    file's NextN head guess tokens ahead, as in SpecParams; temp 0 gives the text it gives without, other settings the same
    distribution. A session handed in must be made for it, and holds guessed tokens too between two steps. params and
    further names are fields of SamplerParams; sampler: one to go on with instead, as `make_sampler` makes it. Raises
    OptionError at the call, UnsupportedModelError where there is no head; while running, ContextFull before anything is
    evaluated, and NonFinite.
    """
    if not isinstance(n_predict, Integral) or n_predict < -1:
        raise OptionError(f"n_predict is {n_predict!r}, expected -1 (until the context is full) or a number of tokens")
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(text, str) for text in stops):
        raise OptionError(f"stop is {stop!r}, expected a string or several")
    if "" in stops:
        raise OptionError("a stop string is empty")
    if sampler is None:
        sampler = make_sampler(model, params, ignore_eos=ignore_eos, **sampling)
    elif params is not None or ignore_eos or sampling:
        raise OptionError("a sampler was given, and options of another one")
    spec = SpecParams(spec_type, spec_draft_n_max, spec_draft_p_min)
    spec.check(model, session)
    tokens = _prompt_tokens(model, prompt, parse_special)
    choose = _Chooser(tokens, sampler, tuple(logits_processors))
    return _generate(model, session, seq, choose, _TextOut(model.tokenizer.stream(special=special), tuple(stops)), n_predict, spec)


def make_sampler(model, params: SamplerParams | None = None, *, ignore_eos: bool = False, **sampling) -> Sampler:
    """Return the sampler that `stream_generate` makes of these arguments."""
    known = [option.name for option in fields(SamplerParams)]
    unknown = [name for name in sampling if name not in known]
    if unknown:
        close = get_close_matches(unknown[0], known, n=3, cutoff=0.4)
        raise OptionError(f"no sampling option is called {unknown[0]}{'; close to it are ' if close else ''}{', '.join(close)}")
    params = replace(params or SamplerParams(), **sampling)
    if ignore_eos:
        params = replace(params, logit_bias={**params.logit_bias, **dict.fromkeys(model.tokenizer.eog, -np.inf)})
    return Sampler(params)


def _prompt_tokens(model, prompt, parse_special: bool) -> list[int]:
    if isinstance(prompt, str):
        tokens = model.tokenizer.encode(prompt, parse_special=parse_special)
    else:
        if not isinstance(prompt, (Sequence, np.ndarray)):
            raise OptionError(f"the prompt is a {type(prompt).__name__}, expected text or a list of token ids")
        strange = [token for token in prompt if not isinstance(token, Integral)]
        if strange:
            raise OptionError(f"the prompt holds {strange[0]!r}, expected token ids")
        tokens = [int(token) for token in prompt]
    n_vocab = model.hparams.n_vocab
    outside = [token for token in tokens if not 0 <= token < n_vocab]
    if outside:
        raise OptionError(f"the prompt holds token {outside[0]}, the vocabulary has {n_vocab} tokens")
    if not tokens:
        raise OptionError("the prompt holds no tokens: there is nothing to continue")
    return tokens


class _Chooser:
    """Everything between logits and a token: processors, sampler, and the tokens so far."""

    def __init__(self, tokens: list[int], sampler: Sampler, processors: tuple[LogitsProcessor, ...]):
        self.tokens, self.sampler, self.processors = tokens, sampler, processors
        self.n_prompt = len(tokens)
        sampler.look_back(tokens)

    @property
    def n_enough(self) -> int | None:
        return None if self.processors else self.sampler.n_enough

    def among(self, ids: np.ndarray, logits: np.ndarray) -> int:
        """Choose from the `n_enough` likeliest tokens."""
        return self._chosen(self.sampler.sample_among(ids, logits))

    def __call__(self, logits: np.ndarray, proposal: Proposal | None = None) -> int:
        n_vocab = len(logits)
        for process in self.processors:
            logits = np.asarray(process(list(self.tokens), logits), np.float32)
            if logits.shape != (n_vocab,):
                raise OptionError(f"a logits processor returned shape {list(logits.shape)}, expected [{n_vocab}]")
        return self._chosen(self.sampler.sample(logits, proposal))

    def _chosen(self, token: int) -> int:
        self.sampler.accept(token)
        self.tokens.append(token)
        return token


class _TextOut:
    """Holds text back while it may still become a stop string."""

    def __init__(self, stream, stops: tuple[str, ...]):
        self._stream, self._stops, self._held = stream, stops, ""

    def push(self, token: int) -> tuple[str, bool]:
        """Return the text that can be shown now, and whether a stop string was met."""
        return self._release(self._stream.push(token))

    def flush(self) -> str:
        """Return all that was held back, cut at a stop string."""
        text, stopped = self._release(self._stream.flush())
        return text if stopped else text + self._held

    def _release(self, text: str) -> tuple[str, bool]:
        text = self._held + text
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self._held = ""
            return text[:min(ends)], True
        n_held = max((n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - n_held:]
        return text[:len(text) - n_held], False


def _generate(
    model, session, seq: int, choose: _Chooser, out: _TextOut, n_predict: int, spec: SpecParams
) -> Iterator[Step]:
    with (
        nullcontext(session) if session is not None else model.session(**spec.session_options()) as session,
        spec.lookahead(session, choose.sampler.propose, seq=seq) as ahead,
    ):
        n_prompt, seed = choose.n_prompt, choose.sampler.seed
        if n_prompt > session.n_ctx:
            raise ContextFull(f"the prompt has {n_prompt} tokens, the context holds {session.n_ctx}")
        # the last token chosen needs no cell
        n_most = session.n_ctx - n_prompt + 1
        n_wanted = n_most if n_predict == -1 else min(n_predict, n_most)
        start = perf_counter()
        logits = session.prompt(choose.tokens, seq=seq)[-1]
        prompt_s, predicted_s = perf_counter() - start, 0.0
        prompt = (session.last_evaluated, prompt_s)
        n_enough = choose.n_enough and min(choose.n_enough, model.hparams.n_vocab)
        if n_wanted == 0:
            yield Step(None, "", session.n_past(seq), seed, "length", _timings(*prompt, 0, 0.0))
        for n_done in range(1, n_wanted + 1):
            start = perf_counter()
            if n_done == 1:
                token = choose(logits)
            elif ahead:
                token = choose(*ahead.after(choose.tokens[-1], n_left=n_wanted - n_done + 1))
            elif n_enough:
                token = choose.among(*session.decode_top(choose.tokens[-1], n_enough, seq=seq))
            else:
                token = choose(session.decode(choose.tokens[-1:], seq=seq)[-1])
            text, stopped = out.push(token)
            ended = "eog" if model.tokenizer.is_eog(token) else "stop" if stopped else None
            finish = ended or ("length" if n_done == n_wanted else None)
            if finish in ("eog", "length"):
                text += out.flush()
            if finish and ahead:
                ahead.settle()
            predicted_s += perf_counter() - start
            timings = _timings(*prompt, n_done, predicted_s) if finish else None
            drafts = ahead.stats() if finish and ahead else None
            yield Step(token, text, n_prompt + n_done - 1, seed, finish, timings, drafts)
            if finish:
                return


def _timings(prompt_n: int, prompt_s: float, predicted_n: int, predicted_s: float) -> Timings:
    def rate(n, seconds):
        return n / seconds if seconds > 0 else 0.0
    return Timings(prompt_n, 1e3 * prompt_s, rate(prompt_n, prompt_s),
                   predicted_n, 1e3 * predicted_s, rate(predicted_n, predicted_s))
