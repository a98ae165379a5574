"""What each of our own options is worth: ours against ours, in turns, one option away from a base at a time.

`--graph` takes each named option of the graph from the lean graph, and gives each to the plain one; `--load` compares load policies.
`--sides` compares any settings of a side, such as "graph=lean,prune_last=0" or "repack=dense+head use_mmap=0". As everywhere, first
the logits, then the clock. The last line of stdout is one JSON document.
"""

import argparse
import os
import sys
from dataclasses import fields, replace
from pathlib import Path

from benchmarks import machine, report
from benchmarks.engines import EngineConfig
from benchmarks.measure import OURS, Side, dumps, measure
from benchmarks.models import DEFAULT_CACHE, model_path
from benchmarks.rows import Row

LOADS = {
    "mapped": {"repack": False, "use_mmap": True}, "copied": {"repack": False, "use_mmap": False}, "dense": {"repack": "dense"},
    "dense+head": {"repack": "dense+head"}, "all": {"repack": True}, "auto": {"repack": "auto"},
}  # fmt: skip


def parsed(text: str) -> dict:
    """Read settings of a side: words of field=value."""
    kinds, settings = {f.name: f.type for f in fields(EngineConfig)}, {}
    for word in text.split():
        name, _, value = word.partition("=")
        if name not in kinds:
            raise argparse.ArgumentTypeError(f"{name!r}: expected one of {', '.join(kinds)}")
        number = int(value) if value.isdecimal() else None
        settings[name] = value if number is None else number if kinds[name] is int else bool(number)
    return settings


def graph_sides() -> dict[str, dict]:
    """Return the lean graph without each option, the plain one with each, and both as they are."""
    from qwen3next_ggml.graph.options import FAST_OPTIONS

    without = {f"lean without {name}": {"graph": f"lean,{name}=0"} for name in FAST_OPTIONS}
    return {"lean": {"graph": "lean"}, **without, "plain": {"graph": "plain"},
            **{f"plain with {name}": {"graph": f"plain,{name}=1"} for name in FAST_OPTIONS}}  # fmt: skip


def parse_args(argv):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.options", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--graph", action="store_true", help="every option of the graph, taken away and given")
    what.add_argument("--load", action="store_true", help="load policies")
    what.add_argument("--sides", type=parsed, nargs="+", metavar="SETTINGS", help='the first is the base: "graph=lean" "graph=plain"')
    add("-m", "--model", help="GGUF file (four layers of the published geometry, made in the cache)")
    add("--cache", type=Path, default=DEFAULT_CACHE, metavar="DIR", help=f"folder of made files ({DEFAULT_CACHE})")
    add("-p", "--n-prompt", type=int, default=512, help="tokens of a prompt, 0 for none (512)")
    add("-n", "--n-gen", type=int, default=32, help="tokens to decode, 0 for none (32)")
    add("-r", "--rounds", type=int, default=3, help="rounds there and back, two pairs each (3)")
    add("-t", "--threads", type=int, default=os.cpu_count(), help="threads (all CPUs)")
    add("--provider", default="llama_cpp", help="libggml: llama_cpp or ggml_python (llama_cpp)")
    add("--cpu-clock", action="store_true", help="count CPU time, on a machine that is not quiet; needs -t 1")
    args = parser.parse_args(argv)
    if args.cpu_clock and args.threads > 1 or args.rounds < 1:
        parser.error("--cpu-clock needs -t 1, -r at least 1")
    return args


def main(argv=None) -> int:
    args = parse_args(argv)
    chosen = {" ".join(f"{k}={v}" for k, v in one.items()): one for one in args.sides or ()}
    chosen = chosen or (graph_sides() if args.graph else LOADS)
    path, results = model_path("four", args.cache, args.model), []
    machine.warm(path)
    common = {"provider": args.provider, "targets": {}}
    rows = [Row(name=f"pp{args.n_prompt}", what=f"pp{args.n_prompt}", kind="prompt", n=args.n_prompt, **common)] if args.n_prompt else []
    rows += [Row(name=f"tg{args.n_gen}", what=f"tg{args.n_gen}", kind="decode", n=args.n_gen, **common)] if args.n_gen else []
    for row in rows:
        base = EngineConfig(model=str(path), n_ctx=row.n_ctx, n_threads=args.threads, provider=args.provider, cpu_clock=args.cpu_clock)
        sides = [Side(name, replace(base, **settings), OURS) for name, settings in chosen.items()]
        results.append(measure(row, sides, rounds=args.rounds, say=lambda text: print(text, file=sys.stderr, flush=True)))
    print(f"ours is {next(iter(chosen))}; a ratio above 1 says that the other is slower")
    print(report.table(results))
    print(dumps({"machine": machine.about(), "rows": results}))
    return int(any(result["refused"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
