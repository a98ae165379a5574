"""Measure one row: check that the sides agree, let them run in turns, and note what each used.

No speed is measured before every side gave our logits, within the limit that its configuration allows.
"""

import json
import os
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

from benchmarks.engines import EngineConfig
from benchmarks.equivalence import Equivalence, compare, limit_between
from benchmarks.machine import MachineClock
from benchmarks.rows import LIMITS, Row, Work
from benchmarks.start import time_start
from benchmarks.workers import Worker

# OpenMP threads spin for a while after their last step; the other side starts when they sleep
PAUSE_SECONDS = 0.1
OURS = "ours"


@dataclass
class Side:
    """One engine, OURS or "llama.cpp", in one configuration; `against` names it, `seconds` are its runs in the order of the rounds."""

    against: str
    config: EngineConfig
    engine: str = "llama.cpp"
    name: str = ""
    seconds: list[float] = field(default_factory=list)
    load_seconds: float = 0.0
    memory: dict = field(default_factory=dict)

    def report(self, row: Row, nbytes: int | None) -> dict:
        seconds = statistics.median(self.seconds)
        rate = {"seconds": seconds} if row.kind == "start" else {"tokens_per_second": row.n_tokens / seconds}
        if nbytes:
            rate["gb_per_second"] = nbytes * row.n / seconds / 1e9
        return {"against": self.against, "name": self.name, "policy": self.config.policy, "config": asdict(self.config),
                "load_seconds": self.load_seconds, **self.memory, **rate, "seconds_each": self.seconds}  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Ours against one side: ratios of speeds, pair by pair, for a start of times; and whether both compute the same."""

    against: str
    ratios: list[float]
    target: float | None
    at_most: bool
    equivalence: Equivalence

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def reached(self) -> bool | None:
        if self.target is None:
            return None
        return self.median <= self.target if self.at_most else self.median >= self.target

    def report(self) -> dict:
        return {"against": self.against, "ratio_median": self.median, "ratio_min": min(self.ratios), "ratio_max": max(self.ratios),
                "ratios": self.ratios, "target": self.target, "reached": self.reached, "equivalence": asdict(self.equivalence)}  # fmt: skip


def in_turns(sides, run, rounds: int) -> None:
    """Run the sides in the order A B B A, `rounds` times; the i-th runs of two sides are neighbours in time."""
    for side in (*sides, *reversed(sides)) * rounds:
        time.sleep(PAUSE_SECONDS)
        side.seconds.append(run(side))


def compared(row: Row, sides, found: dict[str, Equivalence]) -> list[Comparison]:
    """Pair our runs with each side's."""
    ours, at_most = sides[0], row.kind == "start"
    return [
        Comparison(side.against, [a / b if at_most else b / a for a, b in zip(ours.seconds, side.seconds)], row.targets.get(side.against),
                   at_most, found[side.against])
        for side in sides[1:]
    ]  # fmt: skip


def measure(row: Row, sides, *, rounds: int, say=print, work_options=None) -> dict:
    """Measure one row over sides, ours first; without equivalence the result has no speeds. `ratios` pair neighbours."""
    before, options = os.getloadavg(), work_options or {}
    runner = _starts if row.kind == "start" else _steps
    found, details = runner(row, sides, rounds, say, options)
    result = {"row": row.name, "what": row.what, "provider": row.provider, "model": sides[0].config.model, "refused": False, **details}
    failed = [name for name, one in found.items() if not one.passed]
    if failed:
        return result | {"refused": True, "equivalence": {name: asdict(one) for name, one in found.items()}}
    result["sides"] = [side.report(row, details.get("step", {}).get("nbytes")) for side in sides]
    result["comparisons"] = [one.report() for one in compared(row, sides, found)]
    return result | {"load_before": before, "load_after": os.getloadavg()}


def _steps(row: Row, sides, rounds: int, say, options: dict):
    """Keep every side's worker loaded and let them run in turns."""
    with ExitStack() as stack:
        workers = {}
        for side in sides:
            worker = workers[side.against] = stack.enter_context(Worker(side.engine, side.config))
            side.name, side.load_seconds = worker.name, worker.load_seconds
        job = Work(row, workers[sides[0].against].call("n_vocab"), **options)
        for worker in workers.values():
            job.prepare(worker)
        found = _agreement(row, sides, {name: job.logits(worker) for name, worker in workers.items()}, say)
        details = {}
        if all(one.passed for one in found.values()):
            # pages, graphs and caches that only the first run has to bring in
            for worker in workers.values():
                job.run(worker)
            clock = MachineClock.read([worker.pid for worker in workers.values()])
            in_turns(sides, lambda side: job.run(workers[side.against]), rounds * row.more)
            details = MachineClock.read([worker.pid for worker in workers.values()]).share_since(clock)
        for side in sides:
            side.memory = workers[side.against].call("memory")
        ours = workers[sides[0].against]
        if ours.side == OURS and row.kind in ("decode", "deep"):
            details["step"] = ours.call("step_cost")
            if not ours.config.cpu_clock:
                # last, because it takes memory of its own
                details["read_bandwidth"] = ours.call("read_bandwidth")
        return found, details


def _starts(row: Row, sides, rounds: int, say, options: dict):
    """Start every side anew for each run; the first start of each is a rehearsal, and shows whether they agree."""
    n_vocab = options.pop("n_vocab", None)
    job, last = Work(row, n_vocab or _n_vocab(sides[0]), **options), {}

    def run(side) -> float:
        last[side.against] = started = time_start(side.engine, side.config, job.tokens)
        side.name, side.load_seconds, side.memory = started.name, started.load_seconds, started.memory
        return started.seconds

    for side in sides:
        run(side)
    found = _agreement(row, sides, {name: started.logits for name, started in last.items()}, say)
    details = {}
    if all(one.passed for one in found.values()):
        clock = MachineClock.read()
        in_turns(sides, run, rounds)
        details = MachineClock.read().share_since(clock)
    return found, details


def _n_vocab(side) -> int:
    with Worker(side.engine, side.config) as worker:
        return worker.call("n_vocab")


def _agreement(row: Row, sides, logits: dict, say) -> dict[str, Equivalence]:
    ours, found = sides[0], {}
    for side in sides[1:]:
        limit = limit_between(ours.config, side.config, LIMITS.get(row.model, 1e-3))
        found[side.against] = compare(logits[ours.against], logits[side.against], limit)
        say(f"{row.name}: logits against {side.against} ({side.config.policy}): {found[side.against]}")
    return found


def dumps(document) -> str:
    """One line of JSON; infinities, which it has no word for, as null."""
    return json.dumps(json.loads(json.dumps(document), parse_constant=lambda _: None))
