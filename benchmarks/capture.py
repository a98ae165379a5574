"""What reading values costs a decode step: sessions with and without a capture over the same weights, in turns A B B A.

Each row is one capture; the first captures nothing and shows what the machine does to two equal sides. The last line of stdout is
one JSON document. A value that a fast option hides costs that option too.
"""

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack, nullcontext

import qwen3next_ggml

# nothing, a node, a view (read through a copy), what the choice of experts hides, every layer's output
ROWS = ((), ("l_out-1",), ("state_predelta-1",), ("ffn_moe_probs-1",), ("l_out-*",))
PROMPT = [1, 2, 3]


def seconds_per_step(session, patterns, n_steps, clock):
    """Decode n_steps tokens, after one that builds what has to be built."""
    with session.capture(*patterns) if patterns else nullcontext():
        session.decode([4])
        start = clock()
        for i in range(n_steps):
            session.decode([5 + i % 64])
        return (clock() - start) / n_steps


def ratios(model, patterns, *, n_steps, n_rounds, clock):
    """Return seconds with ÷ seconds without of every pair of neighbours in rounds of A B B A, and the median seconds without."""
    with ExitStack() as stack:
        n_ctx = (n_steps + 1) * 2 * n_rounds + len(PROMPT)
        quiet, read = (stack.enter_context(model.session(n_ctx=n_ctx)) for _ in range(2))
        for session in (quiet, read):
            session.decode(PROMPT)
            seconds_per_step(session, (), 3, clock)
            session.clear()
            session.decode(PROMPT)
        found, without = [], []
        for _ in range(n_rounds):
            a, b, c, d = (seconds_per_step(s, p, n_steps, clock) for s, p in ((quiet, ()), (read, patterns), (read, patterns), (quiet, ())))
            found += [b / a, c / d]
            without += [a, d]
    return found, statistics.median(without)


def parse_args(argv):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capture", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="GGUF file (default: the embedded model)")
    parser.add_argument("-n", "--n-steps", type=int, default=24, help="decode steps of one turn (24)")
    parser.add_argument("-r", "--n-rounds", type=int, default=6, help="rounds of four turns (6)")
    parser.add_argument("-t", "--threads", type=int, help="threads (all)")
    parser.add_argument("--capture", action="append", metavar="GLOB", help="one more row of one glob")
    parser.add_argument("--provider", default="llama_cpp", help="libggml: llama_cpp or ggml_python")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    args = parse_args(argv)
    rows = []
    # one thread's CPU time leaves out what other processes take
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    with qwen3next_ggml.load(args.model, ggml=args.provider, n_threads=args.threads) as model:
        for patterns in (*ROWS, *((glob,) for glob in args.capture or ())):
            pairs, seconds = ratios(model, patterns, n_steps=args.n_steps, n_rounds=args.n_rounds, clock=clock)
            ratio = statistics.median(pairs)
            rows.append({"capture": patterns, "ratio": ratio, "ratios": pairs, "milliseconds_without": 1e3 * seconds})
            print(f"{', '.join(patterns) or 'nothing':24} {100 * (ratio - 1):+6.2f} % of {1e3 * seconds:.3f} ms "
                  f"({100 * (min(pairs) - 1):+.2f} … {100 * (max(pairs) - 1):+.2f})", flush=True)  # fmt: skip
    print(json.dumps({"model": str(args.model or "embedded"), "provider": args.provider, "load": os.getloadavg(), "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
