"""From logits to a token: llama.cpp's sampling chain as pure functions on numpy arrays (level 10).

Names, defaults, order and random draws are llama.cpp's (common/common.h, src/llama-sampler.cpp), so one seed gives one text in
both. Knows nothing of models, tokenizers or text.
"""

import math
import secrets
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from numbers import Integral, Real
from typing import NamedTuple

import numpy as np

from .errors import NonFinite, OptionError

DEFAULT_SAMPLERS = "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature"
# dry is known because the default chain names it; it has no parameters here, which is its neutral value
_BUILT = tuple(DEFAULT_SAMPLERS.split(";"))
_ALIASES = {alias: name for name in _BUILT for alias in (name, name.replace("_", "-"), name.replace("_", ""))}
_ALIASES |= {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}
_RANDOM_SEEDS = (None, -1, 0xFFFFFFFF)
_RANGES = {"temp": (0, math.inf), "top_p": (0, 1), "min_p": (0, 1), "typ_p": (0, 1), "xtc_probability": (0, 1),
           "xtc_threshold": (0, 1), "penalty_last_n": (0, math.inf), "min_keep": (0, math.inf)}
_WHOLE = ("seed", "top_k", "min_keep", "penalty_last_n")
_NUMBERS = (*_WHOLE, "temp", "top_p", "min_p", "typ_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "penalty_repeat",
            "penalty_freq", "penalty_present")


@dataclass(frozen=True, kw_only=True)
class SamplerParams:
    """Sampling options under llama.cpp's names and defaults. Raises OptionError for a value that means nothing.

    seed: None, -1 or 0xFFFFFFFF draw one. temp: 0 takes the most likely token. top_k: 0 and less keep all tokens; top_p 1, min_p 0,
    typ_p 1, top_n_sigma 0 and less, xtc_probability 0, penalty_repeat 1, penalty_freq 0 and penalty_present 0 do nothing.
    logit_bias: token id to what is added first of all, -inf forbids. samplers: names in the order applied, joined by ";".
    """

    seed: int | None = None
    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typ_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    min_keep: int = 0
    penalty_last_n: int = 64
    penalty_repeat: float = 1.0
    penalty_freq: float = 0.0
    penalty_present: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    samplers: str = DEFAULT_SAMPLERS

    def __post_init__(self):
        for name in _NUMBERS:
            self._check_number(name)
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not (low <= value <= high and math.isfinite(value)):
                raise OptionError(f"{name} is {value}, expected {f'{low} to {high}' if math.isfinite(high) else f'{low} or more'}")
        for name in ("penalty_freq", "penalty_present", "top_n_sigma"):
            if not math.isfinite(getattr(self, name)):
                raise OptionError(f"{name} is {getattr(self, name)}, expected a finite number")
        if not (self.penalty_repeat > 0 and math.isfinite(self.penalty_repeat)):
            raise OptionError(f"penalty_repeat is {self.penalty_repeat}, expected a finite number above 0")
        if self.seed not in _RANDOM_SEEDS and not 0 <= self.seed < 2**32:
            raise OptionError(f"seed is {self.seed}, expected 0 to {2**32 - 2}, or -1 for a random one")
        for token, bias in self.logit_bias.items():
            if not isinstance(token, Integral) or not isinstance(bias, Real):
                raise OptionError(f"logit_bias has {bias!r} for {token!r}, expected a number for a token id")
            if math.isnan(bias) or bias == math.inf:
                raise OptionError(f"logit_bias of token {token} is {bias}, expected a number or -inf")
        if not isinstance(self.samplers, str):
            raise OptionError(f"samplers is {self.samplers!r}, expected names joined by ';'")
        unknown = [name for name in self._names() if name not in _ALIASES]
        if unknown:
            raise OptionError(f"sampler '{unknown[0]}' is not built, built are {', '.join(_BUILT)}")

    def _check_number(self, name: str) -> None:
        value, whole = getattr(self, name), name in _WHOLE
        if not isinstance(value, Integral if whole else Real) and not (name == "seed" and value is None):
            raise OptionError(f"{name} is {value!r}, expected a {'whole ' if whole else ''}number")

    def _names(self) -> list[str]:
        return [name.strip().lower() for name in self.samplers.split(";") if name.strip()]

    @property
    def chain(self) -> tuple[str, ...]:
        """The names in `samplers`, aliases resolved."""
        return tuple(_ALIASES[name] for name in self._names())


class Candidates(NamedTuple):
    """Tokens still in play: ids int [n] and logits float32 [n], in the order llama.cpp would have them.

    ordered: known to be by descending logit, equal logits by ascending id.
    """

    ids: np.ndarray
    logits: np.ndarray
    ordered: bool = False

    @classmethod
    def of(cls, logits: np.ndarray) -> "Candidates":
        """Return the whole vocabulary, logits [n_vocab]."""
        return cls(_all_ids(len(logits)), np.asarray(logits, np.float32))

    def take(self, which) -> "Candidates":
        """Return the candidates at these positions, in this order."""
        return self._replace(ids=self.ids[which], logits=self.logits[which])

    def by_logit(self) -> "Candidates":
        return self if self.ordered else self.take(np.lexsort((self.ids, -self.logits)))._replace(ordered=True)

    def weights(self) -> np.ndarray:
        """Return exp(logit - highest logit), float32 [n]: probabilities up to their sum."""
        return np.exp(self.logits - self.logits.max())

    def probabilities(self) -> np.ndarray:
        """Return the softmax, float64 [n]."""
        weights = self.weights()
        return weights / weights.sum(dtype=np.float64)


class Proposal(NamedTuple):
    """A token guessed before its logits were known, and the distribution it was drawn from."""

    token: int
    drawn_from: Candidates


@lru_cache(maxsize=4)
def _all_ids(n_vocab: int) -> np.ndarray:
    ids = np.arange(n_vocab)
    ids.flags.writeable = False
    return ids


def top_k(c: Candidates, k: int) -> Candidates:
    """Keep the k highest logits; all of them for k <= 0."""
    if not 0 < k < len(c.ids):
        return c if k <= 0 else c.by_logit()
    if not c.ordered:
        # only what reaches the k-th highest logit is worth sorting
        c = c.take(np.flatnonzero(c.logits >= np.partition(c.logits, -k)[-k])).by_logit()
    return c.take(slice(k))


def top_p(c: Candidates, p: float, min_keep: int = 0) -> Candidates:
    """Keep the most likely tokens until their probabilities sum to p, at least one; all of them for p >= 1."""
    if p >= 1:
        return c
    total = c.weights().sum(dtype=np.float64)
    n_head = min(256, len(c.ids))
    while True:
        head = top_k(c, n_head)
        sums = np.cumsum(head.weights(), dtype=np.float64) / total
        n_kept = max(int(np.searchsorted(sums, p)) + 1, min_keep)
        if n_kept <= n_head or n_head == len(c.ids):
            return head.take(slice(n_kept))
        n_head = min(8 * n_head, len(c.ids))


def min_p(c: Candidates, p: float, min_keep: int = 0) -> Candidates:
    """Keep what is at least p times as likely as the most likely token; all of them for p <= 0."""
    if p <= 0:
        return c
    kept = np.flatnonzero(c.logits >= c.logits.max() + np.float32(math.log(p)))
    return c.take(kept) if len(kept) >= min_keep else top_k(c, min_keep)


def typ_p(c: Candidates, p: float, min_keep: int = 0) -> Candidates:
    """Keep the tokens whose surprise is nearest to the expected one until their probabilities exceed p; all for p >= 1."""
    if p >= 1:
        return c
    c = c.take(np.flatnonzero(c.weights())).by_logit()
    probabilities = c.probabilities()
    surprise = -np.log(probabilities)
    nearest = np.argsort(np.abs(surprise - probabilities @ surprise), kind="stable")
    n_kept = int(np.searchsorted(np.cumsum(probabilities[nearest]), p, side="right")) + 1
    return c.take(nearest[:max(n_kept, min_keep)])._replace(ordered=False)


def top_n_sigma(c: Candidates, n: float) -> Candidates:
    """Keep the logits within n standard deviations of the highest one; all of them for n <= 0."""
    if n <= 0 or len(c.ids) <= 1:
        return c
    possible = c.logits[c.logits > -np.inf]
    return c.take(np.flatnonzero(c.logits >= possible.max() - n * possible.std(dtype=np.float64)))


def xtc(c: Candidates, draw: Callable[[], float], probability: float, threshold: float, min_keep: int = 0) -> Candidates:
    """With this probability drop every token that reaches the threshold, but the least likely one of those."""
    if probability <= 0 or threshold > 0.5 or len(c.ids) < 2 or draw() > probability:
        return c
    c = c.by_logit()
    n_dropped = int(np.count_nonzero(c.probabilities() >= threshold)) - 1
    return c.take(slice(n_dropped, None)) if n_dropped > 0 and len(c.ids) - n_dropped >= min_keep else c


def temperature(c: Candidates, temp: float) -> Candidates:
    """Divide the logits by temp; for temp 0 keep the highest alone, the lowest id where several are equal."""
    if temp > 0:
        return c._replace(logits=c.logits / np.float32(temp))
    return c.take(np.flatnonzero(c.logits == c.logits.max())).by_logit().take(slice(1))


def penalties(c: Candidates, counts: Mapping[int, int], repeat: float, freq: float, present: float) -> Candidates:
    """Make tokens seen before (id to count) less likely, as llama.cpp does: scale by repeat, then subtract."""
    at = np.flatnonzero(np.isin(c.ids, list(counts)))
    times = np.array([counts[token] for token in c.ids[at].tolist()], np.float32)
    logits = c.logits.copy()
    repeat, old = np.float32(repeat), logits[at]
    logits[at] = np.where(old <= 0, old * repeat, old / repeat) - (times * np.float32(freq) + np.float32(present))
    return c._replace(logits=logits, ordered=False)


def draw(c: Candidates, weights: np.ndarray, at: float) -> int:
    """Return the token at `at` in [0, 1) of the running sum of weights [n] over the candidates."""
    sums = np.cumsum(weights, dtype=np.float64)
    return int(c.ids[np.searchsorted(sums, sums[-1] * at)])


def verify(c: Candidates, proposal: Proposal, uniform: Callable[[], float]) -> int:
    """Return the proposed token with probability min(1, p/q), else one of what p has more than q: in sum a draw from p.

    p are the probabilities of c, q those the proposal was drawn from (speculative sampling, arXiv:2211.17192).
    """
    p, q = c.probabilities(), proposal.drawn_from
    order = np.argsort(q.ids)
    at = order[np.minimum(np.searchsorted(q.ids, c.ids, sorter=order), len(order) - 1)]
    q_of_c = np.where(q.ids[at] == c.ids, q.probabilities()[at], 0.0)
    here = np.flatnonzero(c.ids == proposal.token)
    if here.size and uniform() * q_of_c[here[0]] < p[here[0]]:
        return proposal.token
    rest = np.maximum(p - q_of_c, 0.0)
    return draw(c, rest if rest.any() else p, uniform())


class Twister:
    """C++'s std::mt19937 and its uniform distributions over [0, 1), so that draws equal llama.cpp's."""

    def __init__(self, seed: int):
        self._bits = np.random.MT19937()
        self._bits.state = np.random.RandomState(seed).get_state(legacy=False)

    def double(self) -> float:
        low, high = self._bits.random_raw(2).tolist()
        return min((float(low) + float(high) * 2.0**32) / 2.0**64, math.nextafter(1, 0))

    def single(self) -> float:
        return min(float(np.float32(self._bits.random_raw()) / np.float32(2**32)), 1 - 2**-24)

    @property
    def state(self) -> np.ndarray:
        """Where in its numbers it is: 624 words and the index of the next one, uint32 [625]; can be set."""
        state = self._bits.state["state"]
        return np.array([*state["key"], state["pos"]], np.uint32)

    @state.setter
    def state(self, words: np.ndarray) -> None:
        self._bits.state = {"bit_generator": "MT19937", "state": {"key": words[:-1], "pos": int(words[-1])}}


# steps that look at more than the logits: a proposal is made without them
_NOT_OF_LOGITS = ("penalties", "xtc")
# steps that never lose the most likely token, and so cannot change a greedy choice
_KEEP_THE_BEST = ("top_k", "top_p", "min_p", "top_n_sigma")


def _after(steps: Sequence[Callable[[Candidates], Candidates]], c: Candidates) -> Candidates:
    for step in steps:
        c = step(c)
    return c


class Sampler:
    """Chooses tokens by SamplerParams and remembers what the penalties look back on; `seed` is the one in use."""

    def __init__(self, params: SamplerParams | None = None):
        self.params = params or SamplerParams()
        self.seed = secrets.randbelow(2**32 - 1) if self.params.seed in _RANDOM_SEEDS else self.params.seed
        self.reset()

    def reset(self) -> None:
        """Forget the tokens accepted and start the random numbers over."""
        self._history: deque[int] = deque(maxlen=self.params.penalty_last_n)
        self._draws, self._xtc_draws = Twister(self.seed), Twister(self.seed)
        active = self._active_steps()
        self._first = active[0][0] if active else None
        self._steps = [step for _, step in active]
        self._proposing_steps = [step for name, step in active if name not in _NOT_OF_LOGITS]

    def _active_steps(self) -> list[tuple[str, Callable[[Candidates], Candidates]]]:
        p = self.params
        penalised = p.penalty_last_n and (p.penalty_repeat, p.penalty_freq, p.penalty_present) != (1, 0, 0)
        steps = {
            "penalties": self._penalise if penalised else None,
            "top_n_sigma": partial(top_n_sigma, n=p.top_n_sigma) if p.top_n_sigma > 0 else None,
            "top_k": partial(top_k, k=p.top_k) if p.top_k > 0 else None,
            "typ_p": partial(typ_p, p=p.typ_p, min_keep=p.min_keep) if p.typ_p < 1 else None,
            "top_p": partial(top_p, p=p.top_p, min_keep=p.min_keep) if p.top_p < 1 else None,
            "min_p": partial(min_p, p=p.min_p, min_keep=p.min_keep) if p.min_p > 0 else None,
            "xtc": partial(xtc, draw=self._xtc_draws.single, probability=p.xtc_probability, threshold=p.xtc_threshold,
                           min_keep=p.min_keep) if p.xtc_probability > 0 else None,
            "temperature": partial(temperature, temp=p.temp) if p.temp != 1 else None,
        }
        active: list[str] = []
        for name in p.chain:
            if name == "temperature" and p.temp == 0:
                while active and active[-1] in _KEEP_THE_BEST:
                    active.pop()
            if steps.get(name) is not None:
                active.append(name)
        return [(name, steps[name]) for name in active]

    def _penalise(self, c: Candidates) -> Candidates:
        p = self.params
        return penalties(c, Counter(self._history), p.penalty_repeat, p.penalty_freq, p.penalty_present)

    def accept(self, token: int) -> None:
        """Note a token of the prompt or one that was chosen."""
        self._history.append(token)

    def look_back(self, tokens: Sequence[int]) -> None:
        """Let the penalties look back on these tokens, and on none accepted before."""
        self._history.clear()
        self._history.extend(tokens)

    def state(self) -> dict[str, np.ndarray]:
        """Return seed, random numbers and the tokens looked back on, for `restore`."""
        return {
            "seed": np.array(self.seed, np.uint32), "draws": self._draws.state, "xtc_draws": self._xtc_draws.state,
            "history": np.array(self._history, np.int32),
        }  # fmt: skip

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on where the sampler was whose state this is; the parameters stay."""
        self.seed = int(state["seed"])
        self._draws.state, self._xtc_draws.state = state["draws"], state["xtc_draws"]
        self.look_back(state["history"].tolist())

    def candidates(self, logits: np.ndarray) -> Candidates:
        """Return what the chain leaves of logits [n_vocab], which stay as they are. Raises NonFinite, OptionError."""
        c = Candidates.of(self._biased(logits))
        if not math.isfinite(c.logits.max()):
            n_nan, n_inf = (int(np.count_nonzero(f(c.logits))) for f in (np.isnan, np.isposinf))
            raise NonFinite(f"no token can be chosen from {len(c.ids)} logits: {n_nan} NaN, {n_inf} +inf, "
                            f"{int(np.count_nonzero(np.isneginf(c.logits)))} -inf")
        return _after(self._steps, c)

    def _biased(self, logits: np.ndarray) -> np.ndarray:
        if not self.params.logit_bias:
            return logits
        ids, biases = zip(*self.params.logit_bias.items())
        outside = [token for token in ids if not 0 <= token < len(logits)]
        if outside:
            raise OptionError(f"logit_bias names token {outside[0]}, the vocabulary has {len(logits)} tokens")
        logits = np.array(logits, np.float32)
        logits[list(ids)] += np.array(biases, np.float32)
        return logits

    @property
    def n_enough(self) -> int | None:
        """How many of the likeliest tokens decide what `sample` chooses; None: all of them count."""
        if self.params.logit_bias:
            return None
        greedy = self._first == "temperature" and self.params.temp == 0
        return 1 if greedy else self.params.top_k if self._first == "top_k" else None

    def sample_among(self, ids: np.ndarray, logits: np.ndarray) -> int:
        """Choose a token from the `n_enough` likeliest, likeliest first, as `sample` does from all."""
        c = _after(self._steps, Candidates(ids, logits, ordered=True))
        return draw(c, c.weights(), self._draws.double())

    def sample(self, logits: np.ndarray, proposal: Proposal | None = None) -> int:
        """Choose a token from logits [n_vocab], the proposed one where that may stand; `accept` is the caller's.

        Raises NonFinite, OptionError.
        """
        c = self.candidates(logits)
        if proposal is not None:
            return verify(c, proposal, self._draws.double)
        return draw(c, c.weights(), self._draws.double())

    def propose(self, logits: np.ndarray) -> Proposal:
        """Guess a token from a draft's finite logits [n_vocab], by the steps of the chain that look at logits alone."""
        c = _after(self._proposing_steps, Candidates.of(self._biased(logits)))
        return Proposal(draw(c, c.weights(), self._draws.double()), c)
