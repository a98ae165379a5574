"""`qgraph session`: look into session files (level 12)."""

from __future__ import annotations

from collections.abc import Iterator

import click

from .options import json_option
from .output import emit, emit_json, size, table


@click.group(name="session")
def command() -> None:
    """Look into the files that `run --session` and `Session.save` write."""


@command.command(name="inspect")
@click.argument("file")
@json_option
def inspect(file: str, as_json: bool) -> None:
    """Show what a session file holds, after checking that no byte of it changed.

    No model is needed for that; whether the session belongs to one is seen when it is loaded.
    """
    from ..session_file import describe, open_session_file

    told = describe(open_session_file(file))
    if as_json:
        emit_json(told)
    else:
        emit("".join(f"{line}\n" for line in lines(told)))


def lines(told: dict) -> Iterator[str]:
    """Yield the description of a session file line by line."""
    model, nbytes = told["model"], told["bytes"]
    yield f"{told['path']}: session of {model['name'] or model['file']}, {size(nbytes['all'])}, nothing damaged"
    yield ""
    parts = {"K and V": "kv", "states": "state", "checkpoints": "checkpoint"}
    yield from table(
        [
            ("model", f"{model['file']} ({model['arch']}), fingerprint {model['fingerprint']}"),
            ("holds", ", ".join(f"{name} {size(nbytes[key])}" for name, key in parts.items())),
            ("cells", f"{told['n_cells']}, K in {told['kv_types'][0]}, V in {told['kv_types'][1]}"),
            ("sampler", "yes" if told["sampler"] else "no"),
            ("options", ", ".join(f"{name}={value}" for name, value in told["options"].items())),
        ]
    )
    if told["sequences"]:
        yield ""
        rows = [(s["seq"], s["n_past"], _span(s["states"]), _listed(s["checkpoints"]), "yes" if s["last_logits"] else "no") for s in told["sequences"]]
        yield from table([("sequence", "tokens", "states after", "checkpoints after", "last logits"), *rows], right=(0, 1))


def _span(counts: list[int]) -> str:
    return f"{counts[0]} … {counts[-1]}" if counts[1:] else str(counts[0]) if counts else "none, stopped in the middle of a step"


def _listed(counts: list[int]) -> str:
    return ", ".join(map(str, counts)) or "none"
