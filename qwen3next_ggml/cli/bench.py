"""`qgraph bench`: prompt and generation speed in llama-bench's words (level 12).

Times `Session.decode` alone: no tokenizer, no sampler.
"""

from __future__ import annotations

import itertools
import math
import platform
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import click

from .bench_report import ABSENT, FORMS, printed
from .lists import Pair, Ranges, Repack, several
from .options import CACHE_TYPES, DELTA_NETS, GRAPHS, Listed, Switch, grouped, option, placed_model_options
from .output import emit, progress


@dataclass(frozen=True)
class Test:
    """`n_prompt` tokens at once, then `n_gen` one by one, after `n_depth` untimed ones."""

    n_prompt: int
    n_gen: int
    n_depth: int


@dataclass(frozen=True)
class Varied:
    """The options every combination of which is measured; the first two are how the file is loaded."""

    load_mode: tuple[str, ...]
    repack: tuple[bool | str, ...]
    n_threads: tuple[int, ...]
    n_batch: tuple[int, ...]
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


MMAP = {"auto": "auto", "mmap": True, "none": False}
CACHE_TYPE = Listed(click.Choice(CACHE_TYPES))

varied_options = grouped(
    "varied", Varied,
    several("-lm", "--load-mode", "load_mode", type=Listed(click.Choice(tuple(MMAP))), default="auto",
            help="mmap: leave weights in the mapped file; none: copy them, into huge pages where the system has them; "
                 "auto: copy small files, and what every step reads whole"),
    several("--repack", "repack", type=Listed(Repack()), default="auto", metavar="0|1|auto,…",
            help="rewrite matrices for the CPU's own kernels; auto: where it was measured to pay"),
    several("-t", "--threads", "n_threads", type=Ranges(1), env="THREADS", help="CPU threads  [default: physical cores]"),
    several("-b", "--batch-size", "n_batch", type=Ranges(1), default="2048", env="BATCH", help="upper limit of -ub"),
    several("-ub", "--ubatch-size", "n_ubatch", type=Ranges(1), default="512", env="UBATCH", help="tokens computed at once"),
    several("-fa", "--flash-attn", "flash_attn", type=Listed(Switch()), default="auto", env="FLASH_ATTN", help="on, off or auto"),
    several("-ctk", "--cache-type-k", "type_k", type=CACHE_TYPE, default="f16", env="CACHE_TYPE_K", help="type of the K cache"),
    several("-ctv", "--cache-type-v", "type_v", type=CACHE_TYPE, default="f16", env="CACHE_TYPE_V", help="type of the V cache"),
    several("--graph", "graph", type=Listed(click.Choice(GRAPHS)), default="auto", env="GRAPH", help="auto, plain or lean"),
    several("--delta-net", "delta_net", type=Listed(click.Choice(DELTA_NETS)), default="auto", env="DELTA_NET",
            help="form of the delta rule"),
)  # fmt: skip


@click.command(name="bench")
@placed_model_options
@several("-p", "--n-prompt", "n_prompt", type=Ranges(0), default="512", help="lengths of prompt; 0: no such test")
@several("-n", "--n-gen", "n_gen", type=Ranges(0), default="128", help="lengths of generation; 0: no such test")
@click.option("-pg", "n_pg", type=Pair(), multiple=True, metavar="N,N", help="a prompt and a generation after it, timed together")
@several("-d", "--n-depth", "n_depth", type=Ranges(0), default="0", help="tokens that are in the context before")
@option("-r", "--repetitions", type=click.IntRange(min=1), default=5, help="how often each test is timed")
@varied_options
@option("--delay", type=click.IntRange(min=0), default=0, help="seconds of rest before each test")
@click.option("--no-warmup", is_flag=True, help="time the first run too")
@click.option("-o", "--output", type=click.Choice(FORMS), default="md", show_default=True, help="form of the result")
def command(model, n_prompt, n_gen, n_pg, n_depth, repetitions, varied, delay, no_warmup, output) -> None:
    """Measure tokens per second, as llama-bench does.

    Prompts (pp) and generation (tg), without tokenizer and sampler.

    Options shown with an ellipsis take lists, may be given again, and every combination is measured; numbers may be ranges:
    1-4, 64-512+64, 1-64*2.
    """
    lengths = [*((n, 0) for n in n_prompt), *((0, n) for n in n_gen), *n_pg]
    tests = [Test(*both, depth) for depth in n_depth for both in lengths if any(both)]
    if not tests:
        raise click.UsageError("nothing to measure: -p and -n are both 0")
    from ..machine import available_cpus

    varied = varied if varied.n_threads else replace(varied, n_threads=(available_cpus(),))
    rows = measure(model, tests, varied.combinations(), repetitions, delay=delay, warmup=not no_warmup)
    for line in printed(output, rows, varied.columns()):
        emit(line + "\n")


def measure(model, tests: list[Test], combinations: list[dict], repetitions: int, *, delay: int, warmup: bool) -> Iterator[dict]:
    """Yield one row per combination and test, under the field names of llama-bench's JSON."""
    import numpy as np

    rng = np.random.default_rng(1)
    with progress("bench", len(combinations) * len(tests) * repetitions) as advance:
        for (load_mode, repack), settings in itertools.groupby(combinations, key=lambda c: (c["load_mode"], c["repack"])):
            with model.load(repack=repack, mmap=MMAP[load_mode]) as loaded:
                for setting, test in itertools.product(list(settings), tests):
                    tokens = rng.integers(loaded.hparams.n_vocab, size=test.n_depth + test.n_prompt + test.n_gen)
                    time.sleep(delay)
                    with _session(loaded, len(tokens), setting) as session:
                        if warmup:
                            _time(session, test, tokens)
                        began = datetime.now(timezone.utc)
                        samples = []
                        for _ in range(repetitions):
                            samples.append(_time(session, test, tokens))
                            advance()
                        yield _row(loaded, session, test, setting, began, samples)


def _session(model, n_ctx: int, setting: dict):
    names = ("n_threads", "flash_attn", "type_k", "type_v", "graph", "delta_net")
    return model.session(n_ctx=n_ctx, n_ubatch=min(setting["n_batch"], setting["n_ubatch"]), **{name: setting[name] for name in names})


def _time(session, test: Test, tokens) -> int:
    """Return the nanoseconds of one run of a test from an empty context."""
    session.clear()
    if test.n_depth:
        session.decode(tokens[: test.n_depth], logits="none")
    end = test.n_depth + test.n_prompt
    start = time.perf_counter_ns()
    if test.n_prompt:
        session.decode(tokens[test.n_depth : end])
    for token in tokens[end:]:
        session.decode([token])
    return time.perf_counter_ns() - start


def _row(model, session, test: Test, setting: dict, began: datetime, samples_ns: list[int]) -> dict:
    from importlib.metadata import version

    from ..ggml import provider

    speeds = [1e9 * (test.n_prompt + test.n_gen) / ns for ns in samples_ns]
    spread = statistics.stdev if len(samples_ns) > 1 else lambda _: 0.0
    gpus = [device for device in model.devices if device.kind != "cpu"]
    return ABSENT | {
        "build_commit": f"qwen3next_ggml {version('qwen3next_ggml')}",
        "build_number": 0,
        "cpu_info": _cpu_info(),
        "gpu_info": ", ".join(device.description for device in gpus),
        "backends": ",".join(dict.fromkeys(device.name.rstrip("0123456789") for device in model.devices)),
        "model_filename": str(model.file.path),
        "model_type": f"{model.file.arch} {_main_type(model)}",
        "model_size": sum(info.nbytes for info in model.tensors.values()),
        "model_n_params": sum(math.prod(info.ne) for info in model.tensors.values()),
        "n_batch": setting["n_batch"],
        "n_ubatch": session.n_ubatch,
        "n_threads": setting["n_threads"],
        "type_k": setting["type_k"],
        "type_v": setting["type_v"],
        "n_gpu_layers": sum(device in gpus for device in model.layer_devices),
        "flash_attn": int(session.options.flash_attn),
        "devices": "/".join(device.name for device in model.devices),
        "load_mode": "mmap" if model.weights.planned["mapped"] else "none",
        "repack": bool(model.weights.planned["repacked"]),
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_depth": test.n_depth,
        "test_time": began.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "avg_ns": round(statistics.mean(samples_ns)),
        "stddev_ns": round(spread(samples_ns)),
        "avg_ts": statistics.mean(speeds),
        "stddev_ts": spread(speeds),
        "graph": setting["graph"],
        "load_mode_asked": setting["load_mode"],
        "repack_asked": setting["repack"],
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
