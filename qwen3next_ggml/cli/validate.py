"""`qgraph validate`: is a file complete, and is there anything suspicious in it (level 12)."""

from __future__ import annotations

import click

from .options import json_option, opened, path_options, provider_option
from .output import emit, emit_json, plural

SUSPICIOUS = 3


@click.command(name="validate")
@path_options
@click.option("--strict", is_flag=True, help=f"exit with {SUSPICIOUS} when there is a warning")
@json_option
@provider_option
def command(path: str | None, strict: bool, as_json: bool, ggml: str | None) -> None:
    """Check a GGUF file, and warn of what looks wrong.

    Errors: tensors that are missing, mis-shaped, of the wrong kind. Warnings: norms that miss their offset, gates of few bits, tensors that are converted at load or not used at all.
    """
    from .. import models
    from ..ggml import provider
    from ..hparams import Metadata
    from ..tensors import TensorTable, warnings

    provider(ggml)
    with opened(path) as file:
        arch = models.find(file.arch)
        table = TensorTable()
        arch.load_arch_tensors(table, arch.load_arch_hparams(Metadata(file.metadata, file.arch)))
        checked = table.check(file)
        found = [*file.notes, *warnings(file, checked)]
    if as_json:
        emit_json({"path": str(file.path), "warnings": found})
    else:
        emit("".join(f"warning: {sentence}\n" for sentence in found))
        emit(f"{file.path}: complete, {plural(len(found), 'warning') if found else 'nothing suspicious'}\n")
    if found and strict:
        raise click.exceptions.Exit(SUSPICIOUS)
