"""`qgraph run`: continue a prompt, or answer one turn of a chat (level 12)."""

from __future__ import annotations

import click

from .answers import INTERRUPTED, announce, show_speeds, stream
from .conversation import Conversation
from .drafting import drafting_options
from .generation import generation_options
from .kept import KeptSession, session_file_option
from .options import json_option, model_options, option, session_options
from .output import emit_json, note
from .prompts import prompt_options, template_options
from .steering import steering_options

DEFAULT_PROMPT = "ROMEO.\n"


@click.command(name="run")
@model_options
@prompt_options
@option("-cnv/-no-cnv", "--conversation/--no-conversation", " /--raw", "turn", default=None,
        help="put the prompt into the chat template, or take it as it is  [default: as it is, unless -sys or -st is given]")
@option("-st", "--single-turn", is_flag=True, help="the same as -cnv: `run` answers one turn")
@template_options
@generation_options
@drafting_options
@steering_options
@session_file_option
@option("--display-prompt/--no-display-prompt", default=True, help="print the prompt before its continuation  [default: yes]")
@option("--no-parse-special", is_flag=True, help="read the texts of control tokens in the prompt as plain text")
@option("--show-prompt", is_flag=True, help="print on stderr exactly what the model reads")
@option("-v", "--verbose", is_flag=True, help="say which model runs on what")
@session_options
@json_option
def command(
    model, prompt, turn, single_turn, template, generation, drafting, steering, session_file, display_prompt, no_parse_special, show_prompt,
    verbose, session, as_json,
) -> None:  # fmt: skip
    """Continue a prompt.

    It comes from -p, from -f, or from standard input; without any, the embedded model continues "ROMEO.". With -cnv, -st or -sys it is
    one turn of a chat by the file's template; `qgraph chat` has more turns.
    """
    kept = KeptSession(session_file)
    text = prompt.given_or_piped() or (DEFAULT_PROMPT if model.path is None and not kept.goes_on else None)
    if text is None and not kept.goes_on:
        raise click.UsageError("no prompt: give one with -p, -f or on standard input")
    in_turn = bool(single_turn or template.system is not None) if turn is None else turn
    if in_turn and text is None:
        raise click.UsageError("no message: a turn of a chat needs one, with -p, -f or on standard input")
    with model.load() as loaded, kept.open(session, loaded, **drafting.session_options()) as opened, steering.on(opened):
        if verbose:
            announce(loaded, opened)
        settings = kept.with_sampler(loaded, generation.settings(opened.n_ctx, prompt.read) | drafting.settings)
        if in_turn:
            talk = Conversation(loaded, opened, template.of(loaded), template.variables, template.system, settings)
            read, tokens = talk.prompt(text)
            steps = talk.ask(text)
        else:
            from ..generate import stream_generate

            read, tokens = text or "", opened.history[0].tokens.copy()
            if text is not None:
                tokens = loaded.tokenizer.encode(text, parse_special=not no_parse_special)
            steps = stream_generate(loaded, tokens, session=opened, **settings)
        if show_prompt:
            note(read)
        answer = stream(kept.watched(opened, steps), before=read if display_prompt and not in_turn else "")
        show_speeds(answer, full=opened.n_past() >= opened.n_ctx)
        kept.save(opened, tokens + answer.tokens)
        if as_json:
            emit_json({"prompt": read, **answer.plain()})
    if answer.finish_reason == INTERRUPTED:
        raise KeyboardInterrupt
