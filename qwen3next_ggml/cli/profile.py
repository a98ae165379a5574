"""`qgraph profile`: where the time of a prompt and of a decode step goes (level 12)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from .options import json_option, model_options, option, sized_session_options
from .output import emit, emit_json, note, size, table, write_text


@click.command(name="profile")
@model_options
@option("-p", "--n-prompt", type=click.IntRange(min=0), default=512, help="tokens of the prompt, computed at once; 0: none")
@option("-n", "--n-gen", type=click.IntRange(min=0), default=32, help="decode steps after it; 0: none")
@option("--chrome-trace", "trace", type=click.Path(path_type=Path), metavar="FNAME", help="write the nodes one after the other, for chrome://tracing or Perfetto")
@sized_session_options(n_ctx=4096)
@json_option
def command(model, n_prompt, n_gen, trace, session, as_json) -> None:
    """Time every node of the graph.

    Nodes are computed one call at a time; what calls cost is measured and taken off, and the time of the whole graph in one call stands
    beside it. Bytes are those the nodes have to touch, so GB/s beyond what memory gives come out of a cache.
    """
    from ..profile import profile

    if not n_prompt + n_gen:
        raise click.UsageError("nothing to time: -p and -n are both 0")
    with model.load() as loaded:
        found = profile(loaded, n_prompt=n_prompt, n_gen=n_gen, **session.settings())
        path = str(loaded.file.path)
    for i, one in enumerate(found.passes):
        emit("\n" * bool(i) + "\n".join(report(one, found)) + "\n")
    if trace is not None:
        write_text(trace, found.chrome_trace())
        note(f"wrote {trace}, {size(trace.stat().st_size)}")
    if as_json:
        emit_json({"model": path, **document(found)})


def report(one, profile) -> Iterator[str]:
    """Yield a pass as text: a line of times, shares by scope and by op, and where memory would be the limit."""
    calls = len(one.nodes) * profile.call
    yield f"{one.what}: {one.title}"
    yield (
        f"{_ms(one.total)} ms in {len(one.nodes)} nodes, {100 * one.total / one.whole:.0f}% of {_ms(one.whole)} ms in one call; "
        f"node by node {_ms(one.apart)} ms, of which calls {_ms(calls)} ms"
    )
    yield ""
    for key in ("scope", "op"):
        rows = [(share.name, share.n_nodes, _ms(share.seconds), f"{100 * share.seconds / one.total:.1f}%", f"{share.nbytes:,}",
                 _rate(share.nbytes, share.seconds), _rate(share.flops, share.seconds))
                for share in (*one.by(key), *([one.all] if key == "scope" else []))]  # fmt: skip
        yield from table([(key, "nodes", "ms", "share", "bytes", "GB/s", "GFLOP/s"), *rows], right=range(1, 7))
        yield ""
    floor = one.all.nbytes / profile.bandwidth
    yield f"roofline: memory gives {profile.bandwidth / 1e9:.2f} GB/s, at which these bytes take {_ms(floor)} ms, {100 * floor / one.total:.0f}% of the time"


def document(profile) -> dict:
    """Return a profile as plain values, times in seconds."""
    passes = [
        {"what": one.what, "title": one.title, "n_tokens": one.n_tokens, "seconds": one.total, "seconds_whole": one.whole, "seconds_apart": one.apart,
         "n_nodes": len(one.nodes), **{f"by_{key}": [asdict(share) | {"bandwidth": share.bandwidth} for share in one.by(key)] for key in ("scope", "op")}}
        for one in profile.passes
    ]  # fmt: skip
    return {"seconds_per_call": profile.call, "read_bandwidth": profile.bandwidth, "passes": passes}


def _rate(n: int, seconds: float) -> str:
    """Return billions of n a second, a dash for a time that is shown as none."""
    return f"{n / seconds / 1e9:.2f}" if seconds >= 5e-7 else "-"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"
