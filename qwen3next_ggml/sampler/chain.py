"""The chain: which steps, in which order, and what it remembers (level 10)."""

import math
import secrets
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from ..errors import NonFinite, OptionError
from .filters import Candidates, Proposal, draw, min_p, penalties, temperature, top_k, top_n_sigma, top_p, typ_p, verify, xtc
from .params import RANDOM_SEEDS, SamplerParams
from .twister import Twister

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
        self.seed = secrets.randbelow(2**32 - 1) if self.params.seed in RANDOM_SEEDS else self.params.seed
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
