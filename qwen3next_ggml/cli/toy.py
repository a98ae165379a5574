"""`qgraph toy`: write a random file of an architecture, tiny or in the published model's shape (level 12)."""

from __future__ import annotations

from pathlib import Path

import click

from .options import provider_option
from .output import note, size


@click.command(name="toy")
@click.argument("out")
@click.option("--arch", default="qwen3next", show_default=True, help="architecture")
@click.option("--geometry", metavar="NAME", help="tiny, tiny-q (rows that fit K-quants) or qwen3-next-80b  [default: tiny, or tiny-q where the type needs it]")
@click.option("--layers", "n_layer", type=click.IntRange(min=1), metavar="N", help="blocks of the trunk  [default: 4]")
@click.option("--type", "type_", default="f32", show_default=True, help="type of the matrices, as ggml names it: q8_0, q4_k …")
@click.option("--mtp", is_flag=True, help="add a NextN block")
@click.option("--legacy", is_flag=True, help="write `ssm_in` instead of `attn_qkv` and `attn_gate`")
@click.option("-s", "--seed", default=0, show_default=True, help="seed of the weights")
@provider_option
def command(out, arch, geometry, n_layer, type_, mtp, legacy, seed, ggml) -> None:
    """Write a GGUF file with random weights to OUT.

    For tests, and for measuring speed without a download. The same options give the same file on every machine.
    """
    from ..ggml import provider
    from ..toy import write_toy

    provider(ggml)
    path = write_toy(out, arch=arch, geometry=geometry, type=type_, n_layer=n_layer, mtp=mtp, legacy=legacy, seed=seed)
    note(f"wrote {path}, {size(Path(path).stat().st_size)}")
