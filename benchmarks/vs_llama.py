"""Ours against llama.cpp on one file, interleaved A B B A in one run.

Two processes stay loaded and take turns; the same tokens, threads, ubatch, flash attention and load policy on both sides.
Speeds are printed only after both sides gave the same logits in that configuration. The last line of stdout is one JSON document.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.workers import EngineConfig, Worker

EMBEDDED = Path(__file__).parents[1] / "qwen3next_ggml/data/bard.gguf"
N_FORCED = 32
# OpenMP threads spin for a while after their last step; the other side starts when they sleep
PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class Equivalence:
    """How close two sides are: [1 + N_FORCED, n_vocab] logits after a prompt and along a given continuation."""
    nmse: float
    max_nmse: float
    top1_agreement: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.nmse <= self.limit and self.top1_agreement == 1.0


@dataclass(frozen=True)
class Row:
    """Tokens per second of one test, in the order measured; ours[i] and theirs[i] were measured one after the other."""
    test: str
    ours: list[float]
    theirs: list[float]

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.ours, self.theirs)]

    def summary(self) -> dict:
        return asdict(self) | {
            "ours_median": statistics.median(self.ours), "theirs_median": statistics.median(self.theirs),
            "ratio_median": statistics.median(self.ratios), "ratio_min": min(self.ratios), "ratio_max": max(self.ratios)}


def check_equivalence(ours, theirs, *, n_prompt, n_vocab, limit) -> Equivalence:
    """Feed both sides the same prompt and continuation.

    A top-1 that differs counts as agreeing where their own lead is a near-tie: no more of the logits' spread than the limit
    allows two values to move apart.
    """
    rng = np.random.default_rng(1)
    prompt, continuation = (rng.integers(0, n_vocab, n).tolist() for n in (n_prompt, N_FORCED))
    a = ours.call("forced_logits", prompt, continuation).astype(np.float64)
    b = theirs.call("forced_logits", prompt, continuation).astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return Equivalence(float("inf"), float("inf"), 0.0, limit)
    error, size = ((a - b) ** 2).sum(-1), (b**2).sum(-1)
    lead = b.max(-1) - np.take_along_axis(b, a.argmax(-1)[:, None], -1)[:, 0]
    agree = lead <= (2 * limit) ** 0.5 * b.std()
    return Equivalence(float(error.sum() / size.sum()), float((error / size).max()), float(agree.mean()), limit)


def measure(ours, theirs, test, verb, args, n_tokens, rounds) -> Row:
    """Run a verb in the order A B B A, `rounds` times; each A is paired with the B next to it."""
    seconds = {ours: [], theirs: []}
    for side in (ours, theirs, theirs, ours) * rounds:
        time.sleep(PAUSE_SECONDS)
        seconds[side].append(side.call(verb, *args))
    return Row(test, [n_tokens / s for s in seconds[ours]], [n_tokens / s for s in seconds[theirs]])


def run_rows(ours, theirs, *, prompts, decodes, depth, rounds, n_vocab):
    """Yield a Row per prompt length and per number of decoded tokens."""
    rng = np.random.default_rng(2)
    for n in prompts:
        yield measure(ours, theirs, f"pp{n}", "time_prompt", [rng.integers(0, n_vocab, n).tolist()], n, rounds)
    for n in decodes:
        tokens, deep = (rng.integers(0, n_vocab, k).tolist() for k in (n, depth))
        test = f"tg{n}" + (f" @ d{depth}" if depth else "")
        yield measure(ours, theirs, test, "time_decode", [tokens, deep], n, rounds)


@dataclass(frozen=True)
class MachineClock:
    """CPU time since boot: all of it, spent working, taken by other virtual machines, spent by given processes."""
    total: float
    busy: float
    steal: float
    own: float

    @classmethod
    def read(cls, pids):
        user, nice, system, idle, iowait, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
        busy = user + nice + system + irq + softirq
        return cls(busy + idle + iowait + steal, busy, steal, sum(map(_process_ticks, pids)))

    def share_since(self, start) -> dict:
        total = max(1.0, self.total - start.total)
        others = (self.busy - start.busy) - (self.own - start.own)
        return {"other_processes": max(0.0, others / total), "stolen": (self.steal - start.steal) / total}


def _process_ticks(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def table(rows, ours, theirs) -> str:
    lines = [f"| test | {ours.name} t/s | {theirs.name} t/s | ratio | pairs | lowest | highest |", "| --- " + "| ---: " * 6 + "|"]
    for s in (row.summary() for row in rows):
        lines.append(f"| {s['test']} | {s['ours_median']:.1f} | {s['theirs_median']:.1f} | {s['ratio_median']:.3f} "
                     f"| {len(s['ours'])} | {s['ratio_min']:.3f} | {s['ratio_max']:.3f} |")
    return "\n".join(lines)


def parse_args(argv):
    def ints(text):
        return [int(part) for part in text.split(",") if int(part)]

    parser = argparse.ArgumentParser(prog="python -m benchmarks.vs_llama", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default=str(EMBEDDED), help="GGUF file (default: the embedded model)")
    parser.add_argument("-p", "--n-prompt", type=ints, default=[512], metavar="N[,N]", help="prompt lengths, 0 for none (512)")
    parser.add_argument("-n", "--n-gen", type=ints, default=[128], metavar="N[,N]", help="tokens to decode, 0 for none (128)")
    parser.add_argument("-d", "--depth", type=int, default=0, help="tokens in the context before decoding (0)")
    parser.add_argument("-r", "--rounds", type=int, default=5, help="rounds of A B B A, two pairs each (5)")
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count(), help="threads of each side (all CPUs)")
    parser.add_argument("-ub", "--ubatch-size", type=int, default=512, help="tokens computed at once (512)")
    parser.add_argument("-fa", "--flash-attn", type=int, choices=(0, 1), default=1, help="flash attention (1)")
    parser.add_argument("--repack", type=int, choices=(0, 1), default=0, help="repack weights on both sides (0: as mapped)")
    parser.add_argument("--provider", default="llama_cpp", help="our libggml: llama_cpp (llama.cpp's own) or ggml_python")
    parser.add_argument("--graph", default="auto", help="our graph: auto, plain (llama.cpp's own) or lean (auto)")
    parser.add_argument("--ours", choices=("ours", "llama.cpp"), default="ours",
                        help="llama.cpp: against itself, which shows the noise of the machine")
    args = parser.parse_args(argv)
    if args.rounds < 1 or not (args.n_prompt or args.n_gen):
        parser.error("nothing to measure: expected -r of at least 1 and a length in -p or -n")
    return args


def nmse_limit(args) -> float:
    """llama.cpp's own graph on the same libggml and mapped weights must give its numbers.

    Everything else adds in another order, and quantised products round their activations: a last-bit difference of 1e-13 was seen
    to end as 2e-4 after one rounding fell the other way.
    """
    return 1e-6 if args.graph == "plain" and args.provider == "llama_cpp" and not args.repack else 1e-3


def main(argv=None) -> int:
    args = parse_args(argv)
    n_ctx = -(-(max([*args.n_prompt, *(args.depth + n for n in args.n_gen)]) + N_FORCED) // 256) * 256
    config = EngineConfig(model=args.model, n_ctx=n_ctx, n_ubatch=args.ubatch_size, n_threads=args.threads,
                          flash_attn=bool(args.flash_attn), repack=bool(args.repack), provider=args.provider,
                          graph=args.graph)
    with Worker(args.ours, config) as ours, Worker("llama.cpp", config) as theirs:
        n_vocab = ours.call("forced_logits", [0], []).shape[-1]
        equivalence = check_equivalence(ours, theirs, n_prompt=max([*args.n_prompt, 1]), n_vocab=n_vocab, limit=nmse_limit(args))
        print(f"logits: NMSE {equivalence.nmse:.2e} (limit {equivalence.limit:.0e}), "
              f"top-1 agreement {equivalence.top1_agreement:.1%} over {1 + N_FORCED} tokens")
        document = {"config": asdict(config), "equivalence": asdict(equivalence)}
        if not equivalence.passed:
            print("the two sides do not compute the same thing here, so no speed is measured")
            print(json.dumps(document))
            return 1
        load, clock = os.getloadavg(), MachineClock.read((ours.pid, theirs.pid))
        rows = list(run_rows(ours, theirs, prompts=args.n_prompt, decodes=args.n_gen, depth=args.depth, rounds=args.rounds,
                             n_vocab=n_vocab))
        machine = {"cpu": cpu_name(), "n_cpu": os.cpu_count(), "load_before": load, "load_after": os.getloadavg()}
        machine |= MachineClock.read((ours.pid, theirs.pid)).share_since(clock)
        sides = [{"name": w.name, "load_seconds": w.load_seconds, "peak_mib": w.call("peak_mib")} for w in (ours, theirs)]
        print(table(rows, ours, theirs))
        print(f"machine: {machine['cpu']}, load {load[0]:.2f} before and {machine['load_after'][0]:.2f} after, "
              f"{machine['other_processes']:.0%} of its CPU time went to other processes, {machine['stolen']:.0%} was stolen")
        for side in sides:
            print(f"{side['name']}: ready in {side['load_seconds']:.2f} s, peak {side['peak_mib']:.0f} MiB")
        print(json.dumps(document | {"machine": machine, "sides": sides, "rows": [row.summary() for row in rows]}))
        return 0


if __name__ == "__main__":
    sys.exit(main())
