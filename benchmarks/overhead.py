"""What Python costs beside the computation: a decode step, building a graph, loading a file.

`--check` fails above the limits. The last line of stdout is one JSON document. Looks inside Session on purpose: what a step computed
is known there.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import qwen3next_ggml
from benchmarks.models import model_path
from qwen3next_ggml.graph.inputs import Sizes
from qwen3next_ggml.graph.key import GraphKey

LIMITS = {"step_ms": 0.2, "build_ms": 10.0, "load_s": 1.0}

LOAD = """
import sys, time
import qwen3next_ggml
import qwen3next_ggml.model
start = time.perf_counter()
model = qwen3next_ggml.load(sys.argv[1], ggml=sys.argv[2], mmap=True)
session = model.session(n_ctx=512)
print(time.perf_counter() - start)
"""


def step_overhead(path, *, provider, n_steps):
    """Milliseconds: `decode` beyond its graph's computation, `decode`, the computation; medians over n_steps on one thread.

    The computation is timed in the same step, around the call of ggml and the wait for it; copying inputs in and logits out is not in it.
    """
    with qwen3next_ggml.load(path, ggml=provider, n_threads=1) as model, model.session(n_ctx=n_steps + 16) as session:
        run, steps = session.graphs.executor.run, []

        def remember(built, arrays, outs):
            run(built, arrays, outs)
            steps.append(built.step)

        session.graphs.executor.run = remember
        session.decode([1, 2, 3])
        session.decode([4])
        decode_ms, compute_ms = [], []
        for i in range(n_steps):
            start = time.perf_counter()
            session.decode([i % model.hparams.n_vocab])
            decode_ms.append(1e3 * (time.perf_counter() - start))
            compute_ms.append(1e-6 * steps[-1].compute_ns)
    difference = statistics.median(a - b for a, b in zip(decode_ms, compute_ms))
    return {"step_ms": difference, "decode_ms": statistics.median(decode_ms), "compute_ms": statistics.median(compute_ms)}


def build_time(folder, *, provider, n_repeats=21):
    """CPU milliseconds to build the decode graph of 48 layers, 10 experts a token, and its nodes; tiny sizes, the real count."""
    path = Path(folder, "toy-48-layers.gguf")
    if not path.exists():
        qwen3next_ggml.load(ggml=provider).close()
        qwen3next_ggml.write_toy(path, n_layer=48, metadata={"expert_count": 16, "expert_used_count": 10})
    result = {}
    with qwen3next_ggml.load(path, ggml=provider) as model:
        for graph in ("plain", "lean"):
            with model.session(n_ctx=512, graph=graph) as session:
                milliseconds = []
                for _ in range(n_repeats):
                    start = time.thread_time()
                    built = session.graphs.build(GraphKey(Sizes(1, 1, 1, 256, 0), session.options))
                    milliseconds.append(1e3 * (time.thread_time() - start))
                    result[f"{graph}_nodes"] = built.graph.n_nodes
                    built.close()
                result[f"{graph}_build_ms"] = statistics.median(milliseconds)
    return result | {"build_ms": max(result["plain_build_ms"], result["lean_build_ms"])}


def load_time(path, *, provider, n_repeats=5):
    """Seconds from a path to a session that can decode, mapped, imports not counted, each in a fresh process; the median."""
    command = [sys.executable, "-c", LOAD, str(path), provider]
    seconds = [float(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout) for _ in range(n_repeats)]
    return {"load_s": statistics.median(seconds), "file_gib": Path(path).stat().st_size / 2**30}


def parse_args(argv):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", required=True, help="folder for generated model files, some GiB, kept between runs")
    parser.add_argument("-m", "--model", help="GGUF file (default: 4 layers of real geometry in q4_k, made in --cache)")
    parser.add_argument("-n", "--n-steps", type=int, default=300, help="decode steps (300)")
    parser.add_argument("--provider", default="llama_cpp", help="libggml: llama_cpp or ggml_python")
    parser.add_argument("--check", action="store_true", help="end with status 1 above a limit")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    args = parse_args(argv)
    path = args.model or model_path("four", Path(args.cache))
    figures = load_time(path, provider=args.provider)
    figures |= step_overhead(path, provider=args.provider, n_steps=args.n_steps)
    figures |= build_time(args.cache, provider=args.provider)
    print(f"decode step on one thread: {figures['decode_ms']:.3f} ms, of which compute {figures['compute_ms']:.3f} ms; "
          f"beside it {figures['step_ms']:.3f} ms (limit {LIMITS['step_ms']})")
    for graph in ("plain", "lean"):
        print(f"48-layer decode graph, {graph}: {figures[f'{graph}_nodes']} nodes built in {figures[f'{graph}_build_ms']:.2f} ms "
              f"(limit {LIMITS['build_ms']:.0f})")
    print(f"{figures['file_gib']:.2f} GiB ready to decode in {figures['load_s']:.3f} s (limit {LIMITS['load_s']:.0f})")
    print(json.dumps({"model": str(path), "provider": args.provider, "load": os.getloadavg(), "limits": LIMITS} | figures))
    return int(args.check and any(figures[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
