"""Decode ahead: the NextN head guesses tokens, the trunk evaluates them in one batch, what was wrong is rolled back (level 10).

Stands where one would decode token by token and gives the same logits. Knows no text and, but for what draws proposals, no
sampler.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from .drafter import check_head
from .errors import OptionError
from .planner import Planner

SPEC_TYPES = ("none", "draft-mtp")
AUTO = "auto"
AUTO_MAX = 4


@dataclass(frozen=True)
class SpecParams:
    """How to draft, under llama.cpp's names and defaults. Raises OptionError for a value that means nothing.

    spec_draft_n_max: tokens drafted at most, or "auto" for as many as pay. spec_draft_p_min: a draft ends before the first
    token of which the head's most likely one is less likely than that.
    """

    spec_type: str = "none"
    spec_draft_n_max: int | str = 3
    spec_draft_p_min: float = 0.0

    def __post_init__(self):
        if self.spec_type not in SPEC_TYPES:
            raise OptionError(f"spec_type must be one of {', '.join(SPEC_TYPES)}, got {self.spec_type!r}")
        n = self.spec_draft_n_max
        if n != AUTO and not (isinstance(n, int) and n >= 1):
            raise OptionError(f"spec_draft_n_max is {n!r}, expected a number from 1 on, or {AUTO!r}")
        if not 0 <= self.spec_draft_p_min <= 1:
            raise OptionError(f"spec_draft_p_min is {self.spec_draft_p_min}, expected 0 to 1")

    @property
    def on(self) -> bool:
        return self.spec_type != "none"

    def session_options(self) -> dict:
        """Return what a session must be made with."""
        n = AUTO_MAX if self.spec_draft_n_max == AUTO else self.spec_draft_n_max
        return dict(mtp=True, n_rollback=n) if self.on else {}

    def check(self, model, session=None) -> None:
        """Raise UnsupportedModelError where there is no head to draft with, OptionError for a session not made for it."""
        if not self.on:
            return
        check_head(model)
        n = self.spec_draft_n_max
        if session is not None and (session.drafter is None or session.n_rollback < 1):
            raise OptionError(f"{self.spec_type} needs a session made with mtp=True and n_rollback of at least 1")
        if session is not None and n != AUTO and n > session.n_rollback:
            raise OptionError(f"spec_draft_n_max is {n}, the session can take back n_rollback={session.n_rollback} tokens")

    def lookahead(self, session, propose: Callable, *, seq: int = 0) -> AbstractContextManager:
        """Return a Lookahead over a session that passed `check`; what it gives is None where drafting is off."""
        if not self.on:
            return nullcontext()
        auto = self.spec_draft_n_max == AUTO
        n_max = min(AUTO_MAX, session.n_rollback) if auto else self.spec_draft_n_max
        return Lookahead(session, propose, Planner(n_max, auto=auto), seq=seq, p_min=self.spec_draft_p_min)


@dataclass(frozen=True)
class DraftStats:
    """What drafting gave.

    draft_n, draft_n_accepted: tokens drafted and accepted (llama-server's names); by_position: the same for the first,
    second … token of a draft. n_rounds: batches verified; n_plain: single tokens decoded between them. tokens_per_round:
    what a verified batch gave on average. speed_up: tokens a second of the rounds over tokens a second of the single ones,
    by the lower quartile of their recent times, choosing tokens not counted; None where either was not timed.
    """

    draft_n: int
    draft_n_accepted: int
    by_position: tuple[tuple[int, int], ...]
    n_rounds: int
    n_plain: int
    tokens_per_round: float | None
    speed_up: float | None


class Lookahead:
    """Give the logits after one token at a time, from batches of drafted tokens wherever the tokens chosen are those.

    session: made with `mtp` and `n_rollback`; its sequence `seq` may hold drafted tokens too until `settle`. propose: makes
    a proposal with a `token` of the logits of a draft. planner: says how many to draft.
    """

    def __init__(self, session, propose: Callable, planner: Planner, *, seq: int = 0, p_min: float = 0.0):
        self.session, self.propose, self.planner, self.seq, self.p_min = session, propose, planner, seq, p_min
        self._proposals: list = []
        self._rows = np.empty((0, 0), np.float32)
        self._n_taken = 0
        self._by_position = [[0, 0] for _ in range(max(planner.lengths))]
        self._n_rounds, self._n_plain = 0, 0
        self._n_tokens = dict.fromkeys(planner.lengths, 0)  # given by the rounds of each length
        self._n_judged = dict.fromkeys(planner.lengths, 0)

    def after(self, token: int, *, n_left: int) -> tuple[np.ndarray, object | None]:
        """Return the logits [n_vocab] after `token`, and the proposal for the token to be chosen from them, if any.

        `token` follows all earlier ones; `n_left` are still wanted, the one after these logits included.
        """
        if self._n_taken < len(self._proposals) and token == self._proposals[self._n_taken].token:
            self._n_taken += 1
        else:
            self._close_round(judged=True)
            self._open_round(token, n_left)
        following = self._proposals[self._n_taken :]
        return self._rows[self._n_taken], following[0] if following else None

    def settle(self) -> None:
        """Take back what was decoded ahead: the sequence then holds the tokens handed in and no others."""
        self._close_round(judged=False)

    def _open_round(self, token: int, n_left: int) -> None:
        session = self.session
        start, n_builds = perf_counter(), session.n_builds
        room = min(session.n_ctx - session.n_past(self.seq), session.memory.kv.n_free, n_left) - 1
        self._planned = self.planner.next()
        proposals: list = []
        if n := min(self._planned, room):
            session.drafter.draft(token, lambda logits: self._guess(logits, proposals), n=n, seq=self.seq)
        self._rows = session.decode([token, *(p.token for p in proposals)], seq=self.seq, logits="all")
        self._proposals, self._n_taken = proposals, 0
        # a round that built a graph or was cut short by the context says nothing of what the next one costs
        self._clean = n == self._planned and session.n_builds == n_builds
        self._seconds = perf_counter() - start

    def _guess(self, logits: np.ndarray, proposals: list) -> int | None:
        best = logits.max()
        if not np.isfinite(best) or self.p_min > 0 and 1 / np.exp(logits - best).sum(dtype=np.float64) < self.p_min:
            return None
        proposals.append(self.propose(logits))
        return proposals[-1].token

    def _close_round(self, *, judged: bool) -> None:
        if not len(self._rows):
            return
        n, n_taken = len(self._proposals), self._n_taken
        start = perf_counter()
        if n > n_taken:
            self.session.rewind(self.seq, n=n - n_taken)
        seconds = self._seconds + perf_counter() - start
        self._proposals, self._rows, self._n_taken = [], self._rows[:0], 0
        for i in range(n):
            self._by_position[i][0] += 1
            self._by_position[i][1] += i < n_taken
        self._n_rounds += n > 0
        self._n_plain += n == 0
        if judged:
            self.planner.note(self._planned, n_taken, seconds if self._clean else None)
            self._n_tokens[self._planned] += n_taken + 1
            self._n_judged[self._planned] += 1

    def __enter__(self) -> "Lookahead":
        return self

    def __exit__(self, *_) -> None:
        self.settle()

    def stats(self) -> DraftStats:
        """Return what drafting gave so far."""
        n_drafted, n_accepted = (sum(counts[i] for counts in self._by_position) for i in (0, 1))
        return DraftStats(
            n_drafted, n_accepted, tuple((d, a) for d, a in self._by_position if d), self._n_rounds, self._n_plain,
            1 + n_accepted / self._n_rounds if self._n_rounds else None, self._speed_up(),
        )  # fmt: skip

    def _speed_up(self) -> float | None:
        plain = self.planner.cost(0)
        timed = [n for n in self._n_judged if n and self._n_judged[n] and self.planner.cost(n)]
        if not plain or not timed:
            return None
        seconds = sum(self._n_judged[n] * self.planner.cost(n) for n in timed)
        return plain * sum(self._n_tokens[n] for n in timed) / seconds
