"""`qgraph chat`: a conversation by the file's template, from a terminal or a pipe (level 12)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import click

from ..errors import ContextFull
from .answers import INTERRUPTED, Answer, announce, drafted, stream
from .conversation import Conversation
from .drafting import drafting_options
from .generation import generation_options
from .options import json_option, model_options, option, session_options
from .output import complain, emit_json, note
from .prompts import prompt_options, template_options
from .steering import steering_options

HELP = "/clear forgets the conversation, /stats shows its size and speed, /exit or Ctrl-D ends it; Ctrl-C stops an answer"


@click.command(name="chat")
@model_options
@prompt_options
@option("-st", "--single-turn", is_flag=True, help="end after one answer")
@template_options
@generation_options
@drafting_options
@steering_options
@option("--show-prompt", is_flag=True, help="print on stderr exactly what the model reads")
@option("-v", "--verbose", is_flag=True, help="say which model runs on what")
@session_options
@json_option
def command(model, prompt, single_turn, template, generation, drafting, steering, show_prompt, verbose, session, as_json) -> None:
    """Talk with a model by its file's chat template.

    -p or -f is the first message, each line of input another one; /clear forgets the conversation, /stats shows its size and the last
    answer's speed, /exit ends it. Ctrl-C stops an answer. A turn evaluates its new tokens only.
    """
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    with model.load() as loaded, session.open(loaded, **drafting.session_options()) as opened, steering.on(opened):
        settings = generation.settings(opened.n_ctx, prompt.read) | drafting.settings
        talk = Conversation(loaded, opened, template.of(loaded), template.variables, template.system, settings)
        if verbose or interactive:
            announce(loaded, opened)
        if interactive:
            note(HELP)
        answers: list[Answer] = []
        for message in messages(prompt.given(), interactive):
            if message == "/exit":
                break
            if message == "/clear":
                talk.clear()
            elif message == "/stats":
                note(stats(talk, answers))
            elif re.fullmatch(r"/\w+", message):
                note(f"no command {message}; {HELP}")
            else:
                if show_prompt:
                    note(talk.prompt(message)[0])
                answers += turn(talk, message, interactive)
                if single_turn:
                    break
        if as_json:
            emit_json({"messages": talk.messages, "answers": [answer.plain() for answer in answers]})


def messages(first: str | None, interactive: bool) -> Iterator[str]:
    """Yield the first message and the lines that follow it, without empty ones; ends with the input."""
    if first:
        yield first
    if interactive:
        import readline  # noqa: F401, makes input() a line editor
    while True:
        try:
            line = input("> ") if interactive else sys.stdin.readline()
        except EOFError:
            note()
            return
        if not line and not interactive:
            return
        if line.strip():
            yield line.strip()


def turn(talk: Conversation, message: str, interactive: bool) -> list[Answer]:
    """Ask and print; a terminal's conversation goes on after Ctrl-C and when the context is full."""
    try:
        answer = stream(talk.ask(message))
    except KeyboardInterrupt:
        talk.drop()
        if not interactive:
            raise
        note("stopped before the first token; the message is forgotten")
        return []
    except ContextFull as error:
        if not interactive:
            raise
        complain(f"{error}; /clear starts over")
        return []
    talk.keep(answer)
    if interactive:
        note()
    if answer.finish_reason == INTERRUPTED and not interactive:
        raise KeyboardInterrupt
    return [answer]


def stats(talk: Conversation, answers: list[Answer]) -> str:
    """Describe the conversation and the last answer in a few lines."""
    session, t = talk.session, answers[-1].timings if answers else None
    text = f"{len(talk.messages)} messages, {session.n_past()} of {session.n_ctx} tokens of context, {session.n_builds} graphs built"
    if t is None:
        return text
    return (
        f"{text}\nlast answer: {t.prompt_n} tokens read at {t.prompt_per_second:.1f} a second ({session.last_reuse}), "
        f"{t.predicted_n} generated at {t.predicted_per_second:.1f} a second"
        + (f"\n{drafted(answers[-1].drafts)}" if answers[-1].drafts else "")
    )
