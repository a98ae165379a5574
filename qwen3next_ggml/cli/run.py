"""`qgraph run`: continue a prompt, or answer one turn of a chat (level 12)."""

from __future__ import annotations

import click

from .answers import INTERRUPTED, announce, show_speeds, stream
from .conversation import Conversation
from .drafting import drafting_options
from .generation import generation_options
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
@option("--display-prompt/--no-display-prompt", default=True, help="print the prompt before its continuation  [default: yes]")
@option("--no-parse-special", is_flag=True, help="read the texts of control tokens in the prompt as plain text")
@option("--show-prompt", is_flag=True, help="print on stderr exactly what the model reads")
@option("-v", "--verbose", is_flag=True, help="say which model runs on what")
@session_options
@json_option
def command(
    model, prompt, turn, single_turn, template, generation, drafting, steering, display_prompt, no_parse_special, show_prompt, verbose, session, as_json
) -> None:
    """Continue a prompt.

    It comes from -p, from -f, or from standard input; without any, the embedded model continues "ROMEO.". With -cnv, -st or -sys it is
    one turn of a chat by the file's template; `qgraph chat` has more turns.
    """
    text = prompt.given_or_piped() or (DEFAULT_PROMPT if model.path is None else None)
    if text is None:
        raise click.UsageError("no prompt: give one with -p, -f or on standard input")
    in_turn = bool(single_turn or template.system is not None) if turn is None else turn
    with model.load() as loaded, session.open(loaded, **drafting.session_options()) as opened, steering.on(opened):
        if verbose:
            announce(loaded, opened)
        settings = generation.settings(opened.n_ctx, prompt.read) | drafting.settings
        if in_turn:
            talk = Conversation(loaded, opened, template.of(loaded), template.variables, template.system, settings)
            read, _ = talk.prompt(text)
            steps = talk.ask(text)
        else:
            from ..generate import stream_generate

            read, steps = text, stream_generate(loaded, text, session=opened, parse_special=not no_parse_special, **settings)
        if show_prompt:
            note(read)
        answer = stream(steps, before=text if display_prompt and not in_turn else "")
        show_speeds(answer, full=opened.n_past() >= opened.n_ctx)
        if as_json:
            emit_json({"prompt": read, **answer.plain()})
    if answer.finish_reason == INTERRUPTED:
        raise KeyboardInterrupt
