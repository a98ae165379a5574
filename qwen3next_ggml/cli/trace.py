"""`qgraph trace`: named values of a prompt, written to a safetensors file (level 12)."""

from __future__ import annotations

import click

from .options import json_option, model_options, option, session_options
from .output import emit, emit_json, table
from .prompts import prompt_options


@click.command(name="trace")
@model_options
@prompt_options
@option("--capture", "patterns", multiple=True, default=("l_out-*",), metavar="NAME", show_default=False,
        help="llama.cpp's name of a value, or a glob over names; may be given several times  [default: l_out-*]")
@option("-o", "--output", required=True, metavar="FNAME", help="the safetensors file to write")
@option("--no-parse-special", is_flag=True, help="read the texts of control tokens in the prompt as plain text")
@session_options
@json_option
def command(model, prompt, patterns, output, no_parse_special, session, as_json) -> None:
    """Write values from inside the graph to a file.

    The prompt comes from -p, from -f, or from standard input. Values have llama.cpp's names and one row per token; they go to disk ubatch by
    ubatch, so that a long text needs no more memory than a short one. The names there are: `qgraph graph`.
    """
    from ..trace import write_trace

    text = prompt.given_or_piped()
    if text is None:
        raise click.UsageError("no prompt: give one with -p, -f or on standard input")
    with model.load() as loaded, session.open(loaded) as opened:
        tokens = loaded.tokenizer.encode(text, parse_special=not no_parse_special)
        shapes = write_trace(opened, tokens, output, *patterns)
    for line in table((name, list(shape)) for name, shape in shapes.items()):
        emit(line + "\n")
    if as_json:
        emit_json({"path": output, "n_tokens": len(tokens), "shapes": {name: list(shape) for name, shape in shapes.items()}})
