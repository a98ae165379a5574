"""The benchmark prints speeds where both sides agree, and none where they do not; it pairs neighbours and keeps to its rows."""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import best, measure, options, report, vs_llama
from benchmarks.engines import EngineConfig
from benchmarks.equivalence import compare, limit_between
from benchmarks.measure import Comparison, Side, compared, in_turns
from benchmarks.models import EMBEDDED, model_path
from benchmarks.rows import ROWS, TABLE, Row
from qwen3next_ggml.graph.options import FAST_OPTIONS

ROOT = Path(__file__).parents[1]
PROVIDER = os.environ.get("QGRAPH_GGML") or "ggml_python"


def run(program, *args):
    done = subprocess.run([sys.executable, "-m", program, *map(str, args)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_against_llama_on_the_embedded_model():
    status, lines, _ = run("benchmarks.vs_llama", "-p", 9, "-n", 3, "-d", 5, "-r", 1, "-t", 1, "--provider", PROVIDER)
    rows = json.loads(lines[-1])["rows"]
    assert status == 0 and [row["row"] for row in rows] == ["pp9", "tg3 @ d5"]
    for row in rows:
        (one,), (ours, theirs) = row["comparisons"], row["sides"]
        assert one["equivalence"]["nmse"] <= one["equivalence"]["limit"] == 1e-3
        assert len(one["ratios"]) == len(ours["seconds_each"]) == len(theirs["seconds_each"]) == 2 and one["ratio_median"] > 0
        assert ours["peak_mib"] >= ours["resident_mib"] > 20 and theirs["load_seconds"] > 0
    assert rows[1]["step"]["nbytes"] > 5 << 20 and rows[1]["read_bandwidth"] > 1e8


def test_plain_graph_must_give_llamas_numbers():
    """Over the same libggml the limit is 1e-6; the logits of the two processes are equal far below it."""
    status, lines, _ = run("benchmarks.vs_llama", "-p", 9, "-n", 0, "-r", 1, "-t", 1, "--graph", "plain", "--repack", 0)
    equivalence = json.loads(lines[-1])["rows"][0]["comparisons"][0]["equivalence"]
    assert status == 0 and equivalence["limit"] == 1e-6 and equivalence["nmse"] <= 1e-9


@pytest.mark.parametrize("kind", ["batch", "deep", "start"])
def test_every_kind_of_row_runs(kind, tmp_path, monkeypatch):
    """Many sequences, a depth that is filled once and kept in a file, and a start from nothing."""
    row = Row(name=kind, what=kind, kind=kind, n=3, model="embedded", provider=PROVIDER, n_seq=3 if kind == "batch" else 1,
              depth=40 if kind == "deep" else 0, targets={"default": 1.0})  # fmt: skip
    monkeypatch.setattr(vs_llama, "wanted_rows", lambda args: [row])
    args = vs_llama.parse_args(["-r", "1", "-t", "1", "--cache", str(tmp_path)])
    first = vs_llama.run_row(row, args)
    assert not first["refused"] and first["comparisons"][0]["equivalence"]["nmse"] < 1e-3
    assert [len(side["seconds_each"]) for side in first["sides"]] == [2, 2]
    if kind == "deep":
        kept = sorted(path.stat().st_mtime_ns for path in tmp_path.glob("*-d40-*.state"))
        again = vs_llama.run_row(row, args)
        assert len(kept) == 2 and kept == sorted(path.stat().st_mtime_ns for path in tmp_path.glob("*-d40-*.state"))
        nmse = [result["comparisons"][0]["equivalence"]["nmse"] for result in (first, again)]
        assert np.isclose(*nmse, rtol=0.5), "a restored context gives what a filled one gave"


def test_nothing_is_measured_where_logits_differ(monkeypatch, capsys):
    """A graph that forgets its state computes something else, and no speed of it is told."""
    monkeypatch.setattr(measure, "compare", lambda a, b, limit: compare(a, np.roll(b, 1, axis=0), limit))
    assert vs_llama.main(["-p", "9", "-n", "0", "-r", "1", "-t", "1", "--provider", PROVIDER]) == 1
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])["rows"][0]
    assert result["refused"] and "sides" not in result and "comparisons" not in result
    assert "no speed is measured" in lines[2]


# --- equivalence


@pytest.mark.parametrize("change, passes", [
    (lambda x: x, True),
    (lambda x: x * (1 + 1e-5), True),
    (lambda x: np.roll(x, 1, axis=0), False),
    (lambda x: np.where(np.arange(x.shape[1]) == 7, np.nan, x), False),
    (lambda x: x + 0.1 * x[::-1], False),
], ids=["same", "rounding", "one token late", "nan", "another state"])  # fmt: skip
def test_logits_that_differ_are_refused(change, passes):
    logits = np.random.default_rng(3).normal(size=(33, 50)).astype(np.float32)
    assert compare(change(logits), logits, 1e-3).passed is passes


def test_a_confident_choice_must_not_change():
    """Few logits far off leave the mean error small; the first choice shows them."""
    theirs = np.random.default_rng(3).normal(size=(33, 5000)).astype(np.float32)
    ours = theirs.copy()
    theirs[4, 10], ours[4, 10], ours[4, 11] = 6, 2, 4.5
    result = compare(ours, theirs, 1e-3)
    assert result.nmse < 1e-3 and result.max_nmse < 1e-2 and not result.passed


@pytest.mark.parametrize("lead, agrees", [(0.0, True), (0.05, True), (0.5, False)])
def test_a_near_tie_may_go_either_way(lead, agrees):
    """Errors of 0.03 a value move two values 0.04 apart; a lead of half is no tie."""
    rng = np.random.default_rng(3)
    theirs = rng.normal(size=(33, 5000))
    theirs[7, :2] = 6 + lead, 6
    ours = theirs + 0.03 * rng.normal(size=theirs.shape)
    ours[7, :2] = 6, 6.001
    result = compare(ours, theirs, 1e-3)
    assert (result.top1_agreement == 1) is agrees is result.passed


def test_one_row_that_is_far_off_is_refused():
    theirs = np.random.default_rng(3).normal(size=(100, 5000))
    ours = theirs.copy()
    ours[4] *= 1.2
    result = compare(ours, theirs, 1e-3)
    assert result.nmse < 1e-3 and result.top1_agreement == 1 and not result.passed


@pytest.mark.parametrize("ours, theirs, limit", [
    ({}, {}, 1e-6),
    ({"graph": "lean"}, {}, 1e-3),
    ({"provider": "ggml_python"}, {}, 1e-3),
    ({}, {"repack": True}, 1e-3),
    ({}, {"tiled": False}, 1e-3),
    ({}, {"flash_attn": False}, 1e-3),
])  # fmt: skip
def test_only_the_same_kernels_must_give_the_same_numbers(ours, theirs, limit):
    plain = EngineConfig(model="m", graph="plain", repack=False)
    assert limit_between(replace(plain, **ours), replace(plain, **theirs), 1e-3) == limit


# --- turns, pairs, targets


def test_each_run_is_paired_with_its_neighbour():
    """Three sides in the order A B C C B A: a machine that slows down slows all of them alike."""
    clock = iter(range(1, 100))
    sides = [Side(name, EngineConfig(model="m")) for name in ("ours", "best", "default")]
    order = []

    def timed(side):
        order.append(side.against)
        return float(next(clock)) * {"ours": 1, "best": 2, "default": 4}[side.against]

    in_turns(sides, timed, 2)
    assert order == ["ours", "best", "default", "default", "best", "ours"] * 2
    assert sides[0].seconds == [1, 6, 7, 12]
    row = Row(name="r", what="r", kind="decode", n=8, targets={"best": 1.5})
    same = compare(np.eye(3), np.eye(3), 1e-3)
    against_best, against_default = compared(row, sides, {"best": same, "default": same})
    assert against_best.ratios == [4 / 1, 10 / 6, 16 / 7, 22 / 12] and against_best.reached is True
    assert against_default.target is None and against_default.reached is None


@pytest.mark.parametrize("ratios, at_most, reached", [
    ([1.2, 1.0, 1.3], False, True), ([1.2, 1.0, 1.0], False, False), ([0.2, 0.3, 0.1], True, True), ([0.3, 0.4, 0.1], True, False),
])  # fmt: skip
def test_a_target_is_met_by_the_median(ratios, at_most, reached):
    target = 0.25 if at_most else 1.1
    assert Comparison("best", ratios, target, at_most, None).reached is reached


def test_the_table_has_the_rows_that_were_promised():
    at = {(name, against): target for name, row in ROWS.items() for against, target in row.targets.items() if target}
    assert at == {
        ("decode", "best"): 1.10, ("decode-install", "default"): 1.05, ("prompt", "best"): 1.25, ("prompt", "default"): 1.55,
        ("prompt-install", "default"): 1.10, ("start", "default"): 0.25, ("start-install", "default"): 0.25,
        ("bard-decode", "default"): 1.5, ("bard-decode-install", "default"): 1.5, ("bard-prompt", "default"): 1.3,
        ("bard-prompt-install", "default"): 1.3, ("batch8", "best"): 1.15, ("deep", "best"): 1.3,
        ("twelve-decode", "best"): 1.10, ("twelve-prompt", "best"): 1.10,
    }  # fmt: skip
    assert set(TABLE) == {name for name, _ in at}
    assert all(row.n_ctx % 256 == 0 and row.n_ctx >= row.depth + row.n for row in ROWS.values())


def test_the_printed_table_has_a_cell_for_every_column():
    same = compare(np.eye(3), np.eye(3), 1e-3)
    row = ROWS["decode"]
    sides = [Side(name, EngineConfig(model="m"), seconds=[s] * 4, memory={"peak_mib": peak, "resident_mib": 1.0, "huge_mib": 2.0})
             for name, s, peak in (("ours", 1.0, 50.0), ("best", 1.05, 40.0), ("default", 2.0, 60.0))]  # fmt: skip
    result = {"row": "decode", "what": "decode", "refused": False, "read_bandwidth": 20e9, "sides": [s.report(row, 1 << 28) for s in sides],
              "comparisons": [one.report() for one in compared(row, sides, {"best": same, "default": same})]}  # fmt: skip
    lines = report.table([result, {"row": "deep", "what": "deep", "refused": True}]).splitlines()
    assert {line.count("|") for line in lines} == {len(report.COLUMNS) + 1}
    assert "≥ 1.10 missed" in lines[2] and "17.2 (86%)" in lines[2] and "50 / 40 missed" in lines[2] and "missed" not in lines[3]


# --- llama.cpp's best configuration


def test_candidates_differ_and_copies_must_fit(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"")
    base, row = EngineConfig(model=str(path)), ROWS["decode"]
    tried = best.candidates(row, base)
    assert best.default_config(base) in tried and len(set(tried)) == len(tried)
    for values in ({"repack": False}, {"flash_attn": False}, {"tiled": False}, {"huge_malloc": True}, {"use_mmap": False}):
        assert any(values.items() <= vars(config).items() for config in tried)
    assert any(config.n_ubatch == 256 for config in best.candidates(ROWS["prompt"], base))
    assert {config.kv_unified for config in best.candidates(ROWS["batch8"], base)} == {True, False}
    assert best.fits(tried[:3])
    os.truncate(path, 1 << 40)
    assert not best.fits([base])
    assert all(config.use_mmap and not config.repack for config in best.candidates(row, base))


def test_the_best_is_searched_once(tmp_path, monkeypatch):
    """Each candidate alone, the first three once more in turns, whose order counts; then the file is asked."""
    alone = {(True, True): 10.0, (False, True): 30.0, (False, False): 20.0, (True, False): 5.0}
    in_turns = {(True, True): 10.0, (False, True): 20.0, (False, False): 30.0}
    tried = [EngineConfig(model=str(EMBEDDED), repack=repack, flash_attn=flash) for repack, flash in alone]
    calls, finals = [], []

    def fake(row, config, work, say):
        calls.append(config)
        return {"tokens_per_second": alone[config.repack, config.flash_attn], "policy": config.policy, "config": vars(config)}

    def fake_final(row, found, work, say):
        finals.append(len(found))
        return sorted(found, key=lambda one: -in_turns[one["config"]["repack"], one["config"]["flash_attn"]])

    monkeypatch.setattr(best, "candidates", lambda row, base: tried)
    monkeypatch.setattr(best, "_try", fake)
    monkeypatch.setattr(best, "run_off", fake_final)
    for again, n_calls in ((False, 4), (False, 4), (True, 8)):
        config, found = best.best_config(ROWS["decode"], replace(tried[0], n_ctx=2048), tmp_path, again=again)
        assert (config.repack, config.flash_attn, config.n_ctx) == (False, False, 2048)
        assert len(calls) == n_calls and finals == [3] * (n_calls // 4)
        assert [one["tokens_per_second"] for one in found] == [20, 30, 10, 5]


def test_the_default_is_let_in():
    found = [{"policy": name} for name in "abcdef"]
    order = {name: "".join(one["policy"] for one in best.with_default(found, name)) for name in "abcdefg"}
    assert order == {"a": "abcdef", "b": "abcdef", "c": "abcdef", "d": "abdcef", "e": "abecdf", "f": "abfcde", "g": "abcdef"}


def test_finalists_run_in_turns():
    """Two candidates of a tiny row, for real: both are timed in turns and come back ranked."""
    row = Row(name="r", what="r", kind="decode", n=2, model="embedded")
    base = EngineConfig(model=str(EMBEDDED), n_ctx=256, n_threads=1, repack=False, use_mmap=True)
    configs = [base, replace(base, flash_attn=False)]
    found = best.run_off(row, [{"policy": c.policy, "config": vars(c)} for c in configs], {}, lambda text: None)
    assert {one["policy"] for one in found} == {c.policy for c in configs}
    assert found[0]["in_turns"] >= found[1]["in_turns"] > 0


def test_files_are_found(tmp_path):
    assert model_path("embedded", tmp_path) == EMBEDDED and model_path("four", tmp_path, "x.gguf") == Path("x.gguf")
    made = tmp_path / "qwen3-next-80b-12-layers-q4_k.gguf"
    made.write_bytes(b"there")
    assert model_path("twelve", tmp_path, "x.gguf") == made


# --- ours against ours


def test_settings_of_a_side_are_read():
    assert options.parsed("graph=lean,prune_last=0 repack=dense use_mmap=0 n_ubatch=256 flash_attn=1") == {
        "graph": "lean,prune_last=0", "repack": "dense", "use_mmap": False, "n_ubatch": 256, "flash_attn": True,
    }  # fmt: skip
    with pytest.raises(argparse.ArgumentTypeError, match="grahp"):
        options.parsed("grahp=lean")


def test_every_option_of_the_graph_is_left_out_and_given_once():
    sides = list(options.graph_sides().values())
    named = [side["graph"] for side in sides]
    assert named[0] == "lean" and len(set(named)) == len(named) == 2 + 2 * len(FAST_OPTIONS)
    assert {f"lean,{name}=0" for name in FAST_OPTIONS} | {f"plain,{name}=1" for name in FAST_OPTIONS} < set(named)


def test_our_options_are_compared():
    sides = ("graph=lean", "graph=lean,prune_last=0", "graph=plain repack=0 use_mmap=1")
    status, lines, _ = run("benchmarks.options", "--sides", *sides, "-m", EMBEDDED, "-p", 9, "-n", 2, "-r", 1, "-t", 1, "--cpu-clock")
    rows = json.loads(lines[-1])["rows"]
    assert status == 0 and [row["row"] for row in rows] == ["pp9", "tg2"]
    for row in rows:
        assert [side["config"]["graph"] for side in row["sides"]] == ["lean", "lean,prune_last=0", "plain"]
        assert all(side["name"].startswith("ours") for side in row["sides"]) and len(row["comparisons"]) == 2
