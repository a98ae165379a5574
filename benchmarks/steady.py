"""What should not change the speed, or not by more than it must: larger micro-batches, longer prompts, which sequences are busy, what
Python does between steps, cells that are far back.

On a random file with n_embd 512 and 12 layers, in turns, medians. `--check` fails above the limits. The last line of stdout is one
JSON document.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

import qwen3next_ggml
from qwen3next_ggml.sampler import Sampler, SamplerParams

UBATCHES = (64, 128, 256, 512)
PAIRS = ((0, 1), (1, 2), (0, 2))
DEPTHS = (8192, 32768, 131072)
# slowest against fastest; a prompt twice as long; Python against computation; four times the cells against four times the step
LIMITS = {"ubatches": 1.2, "pairs": 1.25, "twice_as_long": 2.3, "beside": 0.1, "four_times_as_deep": 4.0}


def in_turns(runs: Mapping[object, Callable[[], None]], n_rounds: int) -> dict[object, float]:
    """Return the median seconds of each run, after one that does not count."""
    seconds: dict[object, list[float]] = {name: [] for name in runs}
    for i in range(n_rounds + 1):
        # every other round backwards, so that nobody always comes first
        for name in list(runs)[:: 1 if i % 2 else -1]:
            start = time.perf_counter()
            runs[name]()
            if i:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in seconds.items()}


def prompts(model, tokens, n_rounds: int) -> dict[str, object]:
    """Tokens a second of a prompt of 512 by micro-batch, and how much longer a prompt of 2048 takes than one of 1024."""
    sessions = {n: model.session(n_ctx=1024, n_ubatch=n) for n in UBATCHES}
    long = model.session(n_ctx=4096)
    try:
        seconds = in_turns({n: lambda s=s: again(s, tokens[:512]) for n, s in sessions.items()}, n_rounds)
        lengths = in_turns({n: lambda n=n: again(long, tokens[:n]) for n in (1024, 2048)}, n_rounds)
    finally:
        for session in (*sessions.values(), long):
            session.close()
    speeds = {n: 512 / t for n, t in seconds.items()}
    return {"prompt_512_tokens_per_second": speeds, "ubatches": max(seconds.values()) / min(seconds.values()),
            "twice_as_long": lengths[2048] / lengths[1024]}  # fmt: skip


def again(session, tokens) -> None:
    """Decode tokens into an emptied sequence."""
    session.clear()
    session.decode(tokens)


def pairs(model, tokens, n_rounds: int) -> dict[str, object]:
    """Milliseconds of a step of two sequences out of three, by which two."""
    with model.session(n_ctx=4096, n_seq_max=3) as session:
        session.decode_batch({seq: tokens[:64] for seq in range(3)})
        seconds = in_turns({pair: lambda pair=pair: session.decode_batch(dict.fromkeys(pair, [5])) for pair in PAIRS}, 10 * n_rounds)
    return {"pair_ms": {str(pair): 1e3 * t for pair, t in seconds.items()}, "pairs": max(seconds.values()) / min(seconds.values())}


def beside(model, tokens, n_steps: int) -> dict[str, object]:
    """The share of a step that is not its computation, a token drawn from its logits included, and graphs built after the first steps."""
    sampler = Sampler(SamplerParams(seed=1))
    with model.session(n_ctx=n_steps + 512) as session:
        run, steps = session.graphs.executor.run, []
        session.graphs.executor.run = lambda built, *more: (steps.append(built.step), run(built, *more))
        token = sampler.sample(session.decode(tokens[:300])[-1])
        session.decode([token])
        shares, n_builds = [], session.n_builds
        for _ in range(n_steps):
            start = time.perf_counter()
            token = sampler.sample(session.decode([token])[-1])
            whole = time.perf_counter() - start
            shares.append(whole / (1e-9 * steps[-1].compute_ns) - 1)
        return {"beside": statistics.median(shares), "n_builds": session.n_builds - n_builds}


def depths(model, n_rounds: int) -> dict[str, object]:
    """Milliseconds of a step behind so many cells, of zeros: what they hold does not matter to the clock."""
    sessions = {}
    for n in DEPTHS:
        sessions[n] = s = model.session(n_ctx=n + 1024)
        cells = np.arange(n)
        s.memory.kv.occupy(cells, cells, [0], np.ones((1, n), bool), np.zeros(n, bool))
        s.memory.resume(0, n, {n: {at: np.zeros(state.spec.n_embd, np.float32) for at, state in s.memory.recurrent.states.items()}})
    try:
        seconds = in_turns({n: lambda s=s: s.decode([5]) for n, s in sessions.items()}, 10 * n_rounds)
    finally:
        for s in sessions.values():
            s.close()
    return {"step_ms": {n: 1e3 * t for n, t in seconds.items()}, "four_times_as_deep": seconds[DEPTHS[2]] / seconds[DEPTHS[1]]}


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steady", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", default="ggml_python", help="libggml: llama_cpp or ggml_python")
    parser.add_argument("-t", "--threads", type=int, help="threads (cores)")
    parser.add_argument("-r", "--rounds", type=int, default=5, help="rounds (5)")
    parser.add_argument("--check", action="store_true", help="end with status 1 above a limit")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "wide.gguf")
        qwen3next_ggml.load(ggml=args.provider).close()
        qwen3next_ggml.write_toy(path, n_layer=12, metadata={"embedding_length": 512})
        with qwen3next_ggml.load(path, ggml=args.provider, n_threads=args.threads) as model:
            tokens = np.random.default_rng(1).integers(0, model.hparams.n_vocab, 2048).tolist()
            found = prompts(model, tokens, args.rounds) | pairs(model, tokens, args.rounds) | beside(model, tokens, 200) | depths(model, args.rounds)
    print("prompt of 512: " + ", ".join(f"{speed:.0f} t/s by {n}" for n, speed in found["prompt_512_tokens_per_second"].items()))
    print("two of three sequences: " + ", ".join(f"{ms:.2f} ms for {pair}" for pair, ms in found["pair_ms"].items()))
    print("a step behind cells: " + ", ".join(f"{ms:.2f} ms for {n}" for n, ms in found["step_ms"].items()))
    for name, limit in LIMITS.items():
        print(f"{name}: {found[name]:.3f} (limit {limit})")
    print(f"graphs built in 200 steps: {found['n_builds']}")
    print(json.dumps({"provider": args.provider, "load": os.getloadavg(), "limits": LIMITS} | found))
    return int(args.check and (found["n_builds"] > 1 or any(found[name] > limit for name, limit in LIMITS.items())))


if __name__ == "__main__":
    sys.exit(main())
