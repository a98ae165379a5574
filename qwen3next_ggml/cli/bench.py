"""`qgraph bench`: prompt and generation speed in llama-bench's words (level 12).

Times `Session.decode` alone: no tokenizer, no sampler.
"""

from __future__ import annotations

import itertools
import json
import math
import platform
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import click

from .options import CACHE_TYPES, DELTA_NETS, GRAPHS, Listed, Switch, grouped, model_options, option
from .output import count, emit, progress, size


@dataclass(frozen=True)
class Test:
    """`n_prompt` tokens at once, or `n_gen` one by one, after `n_depth` untimed ones."""

    n_prompt: int
    n_gen: int
    n_depth: int

    def __str__(self) -> str:
        name = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        return f"{name} @ d{self.n_depth}" if self.n_depth else name


@dataclass(frozen=True)
class Varied:
    """The options every combination of which is measured."""

    n_threads: tuple[int, ...]
    n_ubatch: tuple[int, ...]
    flash_attn: tuple[str, ...]
    type_k: tuple[str, ...]
    type_v: tuple[str, ...]
    graph: tuple[str, ...]
    delta_net: tuple[str, ...]

    def combinations(self) -> list[dict]:
        values = asdict(self)
        return [dict(zip(values, chosen)) for chosen in itertools.product(*values.values())]

    def columns(self) -> list[str]:
        """Return the options worth a column: threads, and what takes several values."""
        return [name for name, values in asdict(self).items() if name == "n_threads" or len(values) > 1]


COUNT, LENGTH = Listed(click.IntRange(min=1)), Listed(click.IntRange(min=0))
CACHE_TYPE = Listed(click.Choice(CACHE_TYPES))

varied_options = grouped(
    "varied", Varied,
    option("-t", "--threads", "n_threads", type=COUNT, env="THREADS", help="CPU threads  [default: all this process may use]"),
    option("-ub", "--ubatch-size", "n_ubatch", type=COUNT, default="512", env="UBATCH", help="tokens computed at once"),
    option("-fa", "--flash-attn", "flash_attn", type=Listed(Switch()), default="auto", env="FLASH_ATTN", help="on, off or auto"),
    option("-ctk", "--cache-type-k", "type_k", type=CACHE_TYPE, default="f16", env="CACHE_TYPE_K", help="type of the K cache"),
    option("-ctv", "--cache-type-v", "type_v", type=CACHE_TYPE, default="f16", env="CACHE_TYPE_V", help="type of the V cache"),
    option("--graph", type=Listed(click.Choice(GRAPHS)), default="auto", env="GRAPH", help="auto, plain or lean"),
    option("--delta-net", type=Listed(click.Choice(DELTA_NETS)), default="auto", env="DELTA_NET", help="form of the delta rule"),
)  # fmt: skip


@click.command(name="bench")
@model_options
@option("-p", "--n-prompt", type=LENGTH, default="512", help="lengths of prompt; 0: no such test")
@option("-n", "--n-gen", type=LENGTH, default="128", help="lengths of generation; 0: no such test")
@option("-d", "--n-depth", type=LENGTH, default="0", help="tokens that are in the context before")
@option("-r", "--repetitions", type=click.IntRange(min=1), default=5, help="how often each test is timed")
@varied_options
@click.option("--no-warmup", is_flag=True, help="time the first run too")
@click.option("-o", "--output", type=click.Choice(("md", "json")), default="md", show_default=True, help="form of the result")
def command(model, n_prompt, n_gen, n_depth, repetitions, varied, no_warmup, output) -> None:
    """Measure tokens per second, as llama-bench does.

    Prompts (pp) and generation (tg), without tokenizer and sampler.

    Options named in the plural take comma-separated lists, as do -t, -ub, -fa, -ctk, -ctv, --graph and --delta-net; every
    combination is measured.
    """
    tests = [Test(*lengths, d) for d in n_depth for lengths in (*((n, 0) for n in n_prompt), *((0, n) for n in n_gen)) if any(lengths)]
    if not tests:
        raise click.UsageError("nothing to measure: -p and -n are both 0")
    with model.load() as loaded:
        varied = varied if varied.n_threads else replace(varied, n_threads=(loaded.n_threads,))
        rows = measure(loaded, tests, varied.combinations(), repetitions, warmup=not no_warmup)
        if output == "json":
            emit(json.dumps(list(rows), indent=2) + "\n")
        else:
            for line in markdown(rows, varied.columns()):
                emit(line + "\n")


def measure(model, tests: list[Test], combinations: list[dict], repetitions: int, *, warmup: bool) -> Iterator[dict]:
    """Yield one row per combination and test, under the field names of llama-bench's JSON."""
    import numpy as np

    rng = np.random.default_rng(1)
    with progress("bench", len(combinations) * len(tests) * repetitions) as advance:
        for settings, test in itertools.product(combinations, tests):
            n_ctx = test.n_depth + test.n_prompt + test.n_gen
            tokens = rng.integers(model.hparams.n_vocab, size=n_ctx)
            with model.session(n_ctx=n_ctx, **settings) as session:
                if warmup:
                    _time(session, test, tokens)
                began = datetime.now(timezone.utc)
                samples = []
                for _ in range(repetitions):
                    samples.append(_time(session, test, tokens))
                    advance()
                yield _row(model, session, test, settings, began, samples)


def _time(session, test: Test, tokens) -> int:
    """Return the nanoseconds of one run of a test from an empty context."""
    session.clear()
    if test.n_depth:
        session.decode(tokens[: test.n_depth], logits="none")
    start = time.perf_counter_ns()
    if test.n_prompt:
        session.decode(tokens[test.n_depth :])
    else:
        for token in tokens[test.n_depth :]:
            session.decode([token])
    return time.perf_counter_ns() - start


def _row(model, session, test: Test, settings: dict, began: datetime, samples_ns: list[int]) -> dict:
    from importlib.metadata import version

    from ..ggml import provider

    speeds = [1e9 * (test.n_prompt + test.n_gen) / ns for ns in samples_ns]
    spread = statistics.stdev if len(samples_ns) > 1 else lambda _: 0.0
    gpus = [device for device in model.devices if device.kind != "cpu"]
    return {
        "build_commit": f"qwen3next_ggml {version('qwen3next_ggml')}",
        "build_number": 0,
        "cpu_info": _cpu_info(),
        "gpu_info": ", ".join(device.description for device in gpus),
        "backends": ",".join(dict.fromkeys(device.name.rstrip("0123456789") for device in model.devices)),
        "model_filename": str(model.file.path),
        "model_type": f"{model.file.arch} {_main_type(model)}",
        "model_size": sum(info.nbytes for info in model.tensors.values()),
        "model_n_params": sum(math.prod(info.ne) for info in model.tensors.values()),
        "n_batch": session.n_ubatch,
        "n_ubatch": session.n_ubatch,
        "n_threads": settings["n_threads"],
        "type_k": settings["type_k"],
        "type_v": settings["type_v"],
        "n_gpu_layers": sum(device in gpus for device in model.layer_devices),
        "flash_attn": int(session.options.flash_attn),
        "devices": "/".join(device.name for device in model.devices),
        "load_mode": "mmap" if model.weights.mapped_nbytes else "none",
        "repack": bool(model.weights.repacked_nbytes),
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_depth": test.n_depth,
        "test_time": began.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "avg_ns": round(statistics.mean(samples_ns)),
        "stddev_ns": round(spread(samples_ns)),
        "avg_ts": statistics.mean(speeds),
        "stddev_ts": spread(speeds),
        "graph": settings["graph"],
        "delta_net": session.options.delta_net,
        "ggml_version": provider().version,
        "ggml_provider": provider().name,
        "samples_ns": samples_ns,
        "samples_ts": speeds,
    }


def _cpu_info() -> str:
    """Return the processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def _main_type(model) -> str:
    """Return the type that most bytes of the weights have."""
    nbytes = Counter()
    for info in model.tensors.values():
        nbytes[info.type_name] += info.nbytes
    return max(nbytes, key=nbytes.get).upper()


def markdown(rows: Iterator[dict], varied: list[str]) -> Iterator[str]:
    """Yield a table in llama-bench's form, a line as soon as its test is done."""
    titles = {"n_threads": "threads", "flash_attn": "fa"}
    widths = (24, 10, 10, 8, *(8 for _ in varied), 14, 20)
    header = ("model", "size", "params", "backend", *(titles.get(name, name) for name in varied), "test", "t/s")
    yield _line(header, widths)
    yield "|" + "|".join(f" {'-' * (w - 1)}{':' if i in (1, 2) or i >= 4 else '-'} " for i, w in enumerate(widths)) + "|"
    for row in rows:
        test = Test(row["n_prompt"], row["n_gen"], row["n_depth"])
        head = (row["model_type"], size(row["model_size"]), count(row["model_n_params"]), row["backends"])
        yield _line((*head, *(row[name] for name in varied), test, f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}"), widths)


def _line(cells: Sequence[object], widths: Sequence[int]) -> str:
    aligned = (str(c).rjust(w) if i in (1, 2) or i >= 4 else str(c).ljust(w) for i, (c, w) in enumerate(zip(cells, widths)))
    return "| " + " | ".join(aligned) + " |"
