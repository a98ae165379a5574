"""Ours against llama.cpp on one file, interleaved A B B A in one run.

Each side is a process that stays loaded; they take turns on the same tokens, with the same threads. llama.cpp is measured as it
comes ("default"), in the best configuration found for the row ("best"), or as ours is loaded ("same"). Speeds are printed only
after both sides gave the same logits in that configuration. The last line of stdout is one JSON document.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks import machine, report
from benchmarks.best import best_config, default_config
from benchmarks.engines import EngineConfig
from benchmarks.measure import OURS, Side, dumps, measure
from benchmarks.models import DEFAULT_CACHE, EMBEDDED, model_path
from benchmarks.rows import ROWS, TABLE, Row


def parse_args(argv):
    def ints(text):
        return [int(part) for part in text.split(",") if int(part)]

    def names(known):
        def convert(text):
            unknown = [name for name in text.split(",") if name not in known]
            if unknown:
                raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected names of {', '.join(known)}")
            return text.split(",")

        return convert

    parser = argparse.ArgumentParser(prog="python -m benchmarks.vs_llama", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("--rows", type=names(ROWS), metavar="NAME,…", help=f"rows of {', '.join(ROWS)} (without -p and -n: all but those of 48 layers)")
    add("--cache", type=Path, default=DEFAULT_CACHE, metavar="DIR", help=f"folder of made files, states and searches ({DEFAULT_CACHE})")
    add("-m", "--model", help="GGUF file for rows of four layers (made in the cache), and for -p and -n (the embedded model)")
    add("-p", "--n-prompt", type=ints, metavar="N,…", help="prompt lengths to measure, 0 for none")
    add("-n", "--n-gen", type=ints, metavar="N,…", help="tokens to decode, 0 for none")
    add("-d", "--depth", type=int, default=0, help="tokens in the context before those of -n (0)")
    add("--n-depth", type=int, metavar="N", help="context of the row `deep` (32768)")
    add("--against", type=names(("best", "default", "same")), metavar="SIDE,…", help="sides to compare with (those of the row; same)")
    add("-r", "--rounds", type=int, default=3, help="rounds of A B B A, two pairs each (3)")
    add("-t", "--threads", type=int, default=os.cpu_count(), help="threads of each side (all CPUs)")
    add("-ub", "--ubatch-size", type=int, default=512, help="tokens computed at once (512)")
    add("-fa", "--flash-attn", type=int, choices=(0, 1), default=1, help="flash attention (1)")
    add("--repack", default="auto", help="our load policy: auto, 0, 1, or kinds such as dense+head (auto)")
    add("--mmap", choices=("auto", "0", "1"), default="auto", help="map weights (1), copy them into huge pages (0), or copy small files")
    add("--provider", help="our libggml: llama_cpp (llama.cpp's own) or ggml_python (the row's; llama_cpp)")
    add("--graph", default="auto", help="our graph: auto, plain (llama.cpp's own), lean, or with changes: lean,prune_last=0 (auto)")
    add("--ours", choices=(OURS, "llama.cpp"), default=OURS, help="llama.cpp: against itself, which shows the noise of the machine")
    add("--cpu-clock", action="store_true", help="count CPU time, on a machine that is not quiet; needs -t 1, and rows other than starts")
    add("--search", action="store_true", help="look for llama.cpp's best configurations anew")
    add("--fresh-pages", action="store_true", help="drop the file from the page cache first, so that it is read into huge pages")
    args = parser.parse_args(argv)
    if args.rounds < 1 or not (args.rows or args.n_prompt or args.n_gen or (args.n_prompt, args.n_gen) == (None, None)):
        parser.error("nothing to measure: expected -r of at least 1 and a length in -p or -n")
    if args.cpu_clock and args.threads > 1:
        parser.error(f"--cpu-clock adds up the time of {args.threads} threads, those that wait included: expected -t 1")
    return args


def wanted_rows(args) -> list[Row]:
    """Return the rows to measure: those named, else those of -p and -n, else the table."""
    if args.n_prompt is None and args.n_gen is None or args.rows:
        rows = [ROWS[name] for name in args.rows or TABLE]
        return [replace(row, depth=args.n_depth) if row.kind == "deep" and args.n_depth else row for row in rows]
    common = {"model": "given", "provider": args.provider or "llama_cpp", "targets": {"same": None}}
    prompts = [Row(name=f"pp{n}", what=f"pp{n}", kind="prompt", n=n, **common) for n in args.n_prompt or ()]
    names = [(n, f"tg{n}" + (f" @ d{args.depth}" if args.depth else "")) for n in args.n_gen or ()]
    return prompts + [Row(name=name, what=name, kind="decode", n=n, depth=args.depth, **common) for n, name in names]


def our_config(row: Row, args, path: Path) -> EngineConfig:
    said = {"0": False, "1": True}
    config = EngineConfig(
        model=str(path), n_ctx=row.n_ctx, n_ubatch=args.ubatch_size, n_seq_max=row.n_seq, n_threads=args.threads,
        flash_attn=bool(args.flash_attn), repack=said.get(args.repack, args.repack), use_mmap=said.get(args.mmap, args.mmap),
        provider=args.provider or row.provider, graph=args.graph, cpu_clock=args.cpu_clock,
    )  # fmt: skip
    return config if args.ours == OURS else as_llama(config)


def as_llama(config: EngineConfig) -> EngineConfig:
    """Return a config of ours as llama.cpp can be loaded: it has no "auto"."""
    return replace(config, repack=config.repack is True, use_mmap=config.use_mmap is not False)


def state_path(cache: Path, row: Row, config: EngineConfig):
    """Return where the state of a deep row's filled context is kept, by what it depends on."""
    def path(worker) -> str:
        cache.mkdir(parents=True, exist_ok=True)
        how = f"{config.n_threads}-{worker.config.flash_attn}-{worker.config.n_ctx}-{Path(worker.config.model).stem}"
        return str(cache / f"{worker.name.replace(', ', '-').replace(' ', '')}-d{row.depth}-{how}.state")

    return path


def run_row(row: Row, args) -> dict:
    path = Path(args.model or EMBEDDED) if row.model == "given" else model_path(row.model, args.cache, args.model)
    if args.fresh_pages:
        machine.evict(path)
    machine.warm(path)
    ours = our_config(row, args, path)
    work = {"state_path": state_path(args.cache, row, ours)} if row.kind == "deep" else {}
    sides, searched = [Side(OURS, ours, args.ours)], {}
    for name in args.against or row.targets:
        if name == "best":
            config, searched[name] = best_config(row, ours, args.cache, again=args.search, say=progress, **work)
        else:
            config = default_config(ours) if name == "default" else as_llama(ours)
        sides.append(Side(name, config))
    return measure(row, sides, rounds=args.rounds, say=progress, work_options=work) | {"searched": searched}


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv=None) -> int:
    args = parse_args(argv)
    results = []
    for row in wanted_rows(args):
        results.append(run_row(row, args))
        progress(report.table(results[-1:]).splitlines()[-1])
    print(report.table(results))
    print()
    print(report.sides(results))
    about = machine.about()
    clock = ", CPU time" if args.cpu_clock else ""
    print(f"{about['cpu']}, {args.threads} threads{clock}, medians of at least {2 * args.rounds} pairs; {report.quiet(results)}")
    print(dumps({"machine": about, "arguments": {k: str(v) for k, v in vars(args).items()}, "rows": results}))
    return int(any(result["refused"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
