"""Print tokens as they come, and say how fast they came (level 12)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from .output import emit, note, placement, waiting

INTERRUPTED = "interrupted"
REASONS = {
    "eog": "end of text",
    "stop": "reverse prompt",
    "length": "as many tokens as wanted",
    INTERRUPTED: "Ctrl-C",
}


@dataclass(frozen=True)
class Answer:
    """What a generation gave; `timings` is None when it was interrupted, `drafts` when nothing was drafted too."""

    text: str
    tokens: list[int]
    seed: int
    finish_reason: str
    timings: object | None
    drafts: object | None = None

    def plain(self) -> dict:
        """Return the values `--json` prints."""
        return asdict(self)


class Brake:
    """Let the first Ctrl-C set a flag, so that no decode step is cut in half; the second one raises as usual."""

    def __init__(self):
        self.pulled = False

    def __enter__(self) -> Brake:
        self._before = signal.signal(signal.SIGINT, self._pull)
        return self

    def __exit__(self, *_) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _pull(self, *_) -> None:
        if self.pulled:
            raise KeyboardInterrupt
        self.pulled = True


def stream(steps: Iterator, *, before: str = "") -> Answer:
    """Print `before` and the text of steps as it comes, to the end of a line.

    Ctrl-C before the first token raises KeyboardInterrupt and prints nothing; later it ends the answer, which keeps what was printed.
    """
    with waiting("reading the prompt …"):
        step = next(steps)
    emit(before)
    text, tokens = "", []
    try:
        with Brake() as brake:
            while True:
                emit(step.text)
                text += step.text
                tokens += [] if step.token is None else [step.token]
                if step.finish_reason or brake.pulled:
                    break
                step = next(steps)
    finally:
        steps.close()
        if before + text and not (before + text).endswith("\n"):
            emit("\n")
    return Answer(text, tokens, step.seed, step.finish_reason or INTERRUPTED, step.timings, step.drafts)


def announce(model, session) -> None:
    """Print on stderr which model runs on what."""
    from ..ggml import provider

    hp, weights = model.hparams, model.weights
    blocks = f"{hp.n_layer} layers" + (f" + {hp.n_layer_nextn} NextN" if hp.n_layer_nextn else "")
    where = ", ".join(device.name for device in model.devices)
    note(f"{model.file.path}: {model.file.arch}, {blocks}, {placement(weights)}")
    if weights.policy.why:
        note(weights.policy.why)
    note(f"{where} by ggml {provider().version} from {provider().name}, context of {session.n_ctx} tokens")
    if session.drafter:
        borrowed = f", with the trunk's {', '.join(session.drafter.borrowed)}" if session.drafter.borrowed else ""
        note(f"drafting up to {session.n_rollback} tokens by the NextN head{borrowed}")
    for sentence in (*model.file.notes, *weights.notes):
        note(f"note: {sentence}")


def show_speeds(answer: Answer, *, full: bool) -> None:
    """Print on stderr how it ended, the seed and, in llama.cpp's words, how long it took; `full`: the context is."""
    t = answer.timings
    why = "the context is full" if full and answer.finish_reason == "length" else REASONS[answer.finish_reason]
    note()
    note(f"stopped: {why}, seed: {answer.seed}")
    if t is not None:
        note(_speed("prompt eval time", t.prompt_ms, t.prompt_n))
        note(_speed("       eval time", t.predicted_ms, t.predicted_n))
        note(f"      total time = {t.prompt_ms + t.predicted_ms:10.2f} ms / {t.prompt_n + t.predicted_n:5d} tokens")
    if answer.drafts is not None:
        note(drafted(answer.drafts))


def drafted(d) -> str:
    """Say in one line what DraftStats hold."""
    if not d.n_rounds:
        return "draft acceptance = nothing was drafted"
    places = " ".join(f"{accepted / n:.3f}" for n, accepted in d.by_position)
    speed_up = "" if d.speed_up is None else f", {d.speed_up:.2f} times the speed of single tokens"
    return (
        f"draft acceptance = {d.draft_n_accepted / d.draft_n:.3f} ({d.draft_n_accepted} of {d.draft_n}; by place {places}), "
        f"{d.tokens_per_round:.2f} tokens a round in {d.n_rounds} rounds, {d.n_plain} single{speed_up}"
    )


def _speed(what: str, ms: float, n: int) -> str:
    each, rate = (ms / n, 1e3 * n / ms) if n and ms else (0.0, 0.0)
    return f"{what} = {ms:10.2f} ms / {n:5d} tokens ({each:8.2f} ms per token, {rate:8.2f} tokens per second)"
