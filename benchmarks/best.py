"""llama.cpp's best configuration for a row: every candidate is tried on this machine, the fastest is kept in the cache folder.

What is tried: weights mapped, copied or repacked, flash attention, ggml's tiled kernels, huge pages for what malloc gives, smaller
ubatches for prompts, one KV cache or one per sequence. Each candidate runs alone, then the first few in turns; the search is long
and done once.
"""

import json
import os
import statistics
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path

from benchmarks.engines import EngineConfig
from benchmarks.measure import Side, in_turns
from benchmarks.rows import Row, Work
from benchmarks.workers import Worker

N_RUNS = 5
N_FINAL, FINAL_ROUNDS = 3, 2


def default_config(base: EngineConfig) -> EngineConfig:
    """llama.cpp as it comes: everything repacked that can be, the rest mapped, flash attention, ubatches of 512."""
    return replace(base, repack=True, use_mmap=True, flash_attn=True, tiled=True, huge_malloc=False, n_ubatch=512, kv_unified=True)


def fits(configs) -> bool:
    """Say whether engines can be loaded together, with the file in the page cache, without a copy for those that map it."""
    size = Path(configs[0].model).stat().st_size
    n_copies = sum(bool(config.repack) or not config.use_mmap for config in configs)
    return (1 + n_copies) * size + (3 << 30) < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def candidates(row: Row, base: EngineConfig) -> list[EngineConfig]:
    """Return the configurations worth trying; those that copy the weights only where the copy and the file fit in memory."""
    default = default_config(base)
    copies = fits([replace(default, repack=True)])
    loads = [dict(repack=False)]
    loads += [dict(repack=False, use_mmap=False, huge_malloc=True), dict(), dict(huge_malloc=True)] if copies else []
    if row.kind == "deep":
        # each context takes minutes to fill, and at this depth it hardly matters where weights lie
        return [replace(default, repack=False, flash_attn=flash) for flash in (True, False)]
    # many sequences try how KV is laid out instead of flash attention; repacked weights never meet the tiled kernels
    second = ("kv_unified" if row.n_seq > 1 else "flash_attn", (True, False))
    tried = [
        replace(default, **load, tiled=tiled, **{second[0]: choice})
        for load, choice, tiled in product(loads, second[1], (True, False)) if tiled or "repack" in load
    ]  # fmt: skip
    if row.kind == "prompt":
        tried += [replace(config, n_ubatch=256) for config in (default, replace(default, repack=False)) if copies or not config.repack]
    return tried


def best_config(row: Row, base: EngineConfig, cache: Path, *, again: bool = False, say=print, **work) -> tuple[EngineConfig, list[dict]]:
    """Return the fastest candidate of a row, and what each gave; read from the cache folder where it was found before."""
    path = cache / f"best-{row.kind}-{row.n_seq}-{row.depth}-{Path(base.model).stem}-t{base.n_threads}-{version('llama-cpp-python')}.json"
    if again or not path.exists():
        found = sorted((_try(row, config, work, say) for config in candidates(row, base)), key=lambda one: -one["tokens_per_second"])
        found = with_default(found, default_config(base).policy)
        configs = [EngineConfig(**one["config"]) for one in found]
        n = max(n for n in range(1, N_FINAL + 1) if n == 1 or fits(configs[:n]))
        found = run_off(row, found[:n], work, say) + found[n:]
        cache.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1))
    found = json.loads(path.read_text())
    # the file may lie elsewhere today, and another row of this kind may need more room
    return replace(EngineConfig(**found[0]["config"]), model=base.model, n_ctx=base.n_ctx, provider=base.provider), found


def with_default(found: list[dict], default: str) -> list[dict]:
    """Return `found`, fastest first, with the default among the first N_FINAL, whatever it gave alone."""
    late = [one for one in found[N_FINAL:] if one["policy"] == default]
    first = found[: N_FINAL - len(late)]
    return [*first, *late, *(one for one in found[len(first) :] if one not in late)]


def _try(row: Row, config: EngineConfig, work: dict, say) -> dict:
    with Worker("llama.cpp", config) as worker:
        job = Work(row, worker.call("n_vocab"), **work)
        job.prepare(worker)
        job.run(worker)
        speeds = [row.n_tokens / job.run(worker) for _ in range(N_RUNS)]
    speed = statistics.median(speeds)
    say(f"  {row.name}: llama.cpp with {config.policy}: {speed:.1f} t/s")
    return {"tokens_per_second": speed, "speeds": speeds, "policy": config.policy, "config": asdict(config)}


def run_off(row: Row, found: list[dict], work: dict, say) -> list[dict]:
    """Let the first ones run in turns and return them in the order of that: alone, each met a machine in another mood."""
    sides = [Side(one["policy"], EngineConfig(**one["config"])) for one in found]
    with ExitStack() as stack:
        workers = {side.against: stack.enter_context(Worker("llama.cpp", side.config)) for side in sides}
        job = Work(row, workers[sides[0].against].call("n_vocab"), **work)
        for worker in workers.values():
            job.prepare(worker)
            job.run(worker)
        in_turns(sides, lambda side: job.run(workers[side.against]), FINAL_ROUNDS)
    speeds = {side.against: row.n_tokens / statistics.median(side.seconds) for side in sides}
    for policy, speed in speeds.items():
        say(f"  {row.name}, in turns: llama.cpp with {policy}: {speed:.1f} t/s")
    ranked = [one | {"in_turns": speeds[one["policy"]]} for one in found]
    return sorted(ranked, key=lambda one: -one["in_turns"])
