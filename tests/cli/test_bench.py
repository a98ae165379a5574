"""`qgraph bench`: llama-bench's fields, its arithmetic, and what is timed."""

import csv
import json
import statistics

import pytest

import qwen3next_ggml.model
from qwen3next_ggml.cli.bench_report import CSV_FIELDS
from qwen3next_ggml.cli.lists import Ranges
from qwen3next_ggml.session import Session

FIELDS = [*CSV_FIELDS, "samples_ns", "samples_ts"]


def test_json_has_llama_benchs_fields(qgraph, bard):
    result = qgraph("bench", "-p", 24, "-n", 3, "-r", 3, "-t", 1, "-o", "json")
    assert result.exit_code == 0, result.stderr
    pp, tg = json.loads(result.stdout)
    assert set(FIELDS) <= set(pp)
    assert (pp["n_prompt"], pp["n_gen"], tg["n_prompt"], tg["n_gen"]) == (24, 0, 0, 3)
    assert pp["model_filename"] == str(bard) and pp["n_threads"] == 1 and pp["load_mode"] == "none" and not pp["repack"]
    for row, n in ((pp, 24), (tg, 3)):
        assert len(row["samples_ns"]) == 3
        assert row["samples_ts"] == [1e9 * n / ns for ns in row["samples_ns"]]
        assert row["avg_ns"] == round(statistics.mean(row["samples_ns"]))
        assert row["stddev_ts"] == statistics.stdev(row["samples_ts"])


def test_markdown_is_a_table(qgraph):
    lines = qgraph("bench", "-p", "8,16", "-n", 0, "-r", 1, "-t", 1, "-fa", "on,off").stdout.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["model", "size", "params", "backend", "threads", "fa", "test", "t/s"]
    assert [row[4:7] for row in cells[2:]] == [["1", "1", "pp8"], ["1", "1", "pp16"], ["1", "0", "pp8"], ["1", "0", "pp16"]]
    assert len({len(line) for line in lines}) == 1


def test_what_is_run(qgraph, monkeypatch):
    """One warm-up and the repetitions, each from an empty context; generation goes token by token after the depth."""
    calls, decode = [], Session.decode

    def watched(self, tokens, **options):
        calls.append((self.n_past(), len(tokens)))
        return decode(self, tokens, **options)

    monkeypatch.setattr(Session, "decode", watched)
    qgraph("bench", "-p", 5, "-n", 0, "-r", 2, "-t", 1)
    assert calls == [(0, 5)] * 3
    calls.clear()
    qgraph("bench", "-p", 0, "-n", 2, "-d", 7, "-r", 1, "-t", 1, "--no-warmup")
    assert calls == [(0, 7), (7, 1), (8, 1)]


def test_nothing_to_measure(qgraph):
    result = qgraph("bench", "-p", 0, "-n", 0)
    assert result.exit_code == 2 and "nothing to measure" in result.stderr
    assert qgraph("bench", "-p", "5,x").exit_code == 2


def test_csv_and_json_lines(qgraph):
    """Every form has the same rows; CSV has llama-bench's 42 columns, its header bare and every value quoted."""
    options = ("-p", 4, "-n", 2, "-r", 1, "-t", 1)
    lines = qgraph("bench", *options, "-o", "csv").stdout.splitlines()
    assert len(CSV_FIELDS) == 42 and lines[0].split(",") == CSV_FIELDS and lines[1].startswith('"') and lines[1].endswith('"')
    rows = list(csv.DictReader(lines))
    assert [(row["n_prompt"], row["n_gen"], row["repack"]) for row in rows] == [("4", "0", "0"), ("0", "2", "0")]
    found = [json.loads(line) for line in qgraph("bench", *options, "-o", "jsonl").stdout.splitlines()]
    assert [(row["n_prompt"], row["n_gen"]) for row in found] == [(4, 0), (0, 2)] and set(FIELDS) <= set(found[0])


def test_a_prompt_and_what_follows_it(qgraph, monkeypatch):
    """-pg is one test: both are timed, and its speed counts the tokens of both."""
    calls, decode = [], Session.decode

    def watched(self, tokens, **options):
        calls.append((self.n_past(), len(tokens)))
        return decode(self, tokens, **options)

    monkeypatch.setattr(Session, "decode", watched)
    result = qgraph("bench", "-p", 0, "-n", 0, "-pg", "6,2", "-pg", "3,1", "-d", 4, "-r", 1, "-t", 1, "--no-warmup", "-o", "json")
    assert calls == [(0, 4), (4, 6), (10, 1), (11, 1), (0, 4), (4, 3), (7, 1)]
    row = json.loads(result.stdout)[0]
    assert row["samples_ts"] == [1e9 * 8 / row["samples_ns"][0]]
    table = qgraph("bench", "-p", 0, "-n", 0, "-pg", "6,2", "-d", 4, "-r", 1, "-t", 1).stdout
    assert "pp6+tg2 @ d4" in table
    assert qgraph("bench", "-pg", "6").exit_code == 2


@pytest.mark.parametrize(
    "text, numbers",
    [
        ("5", (5,)),
        ("1-4", (1, 2, 3, 4)),
        ("64-200+64", (64, 128, 192)),
        ("1-64*4", (1, 4, 16, 64)),
        ("8,1-2", (8, 1, 2)),
        ("4-3", ()),
    ],
)  # fmt: skip
def test_ranges(text, numbers):
    assert Ranges(0).convert(text, None, None) == numbers


@pytest.mark.parametrize(
    "text, says", [("4-", "neither a number nor a range"), ("1-4+0", "never ends"), ("0-4*2", "never ends"), ("1-4*1", "never ends")]
)
def test_ranges_that_are_none(qgraph, text, says):
    result = qgraph("bench", "-p", text)
    assert result.exit_code == 2 and says in result.stderr


def test_lists_may_be_given_again(qgraph):
    lines = qgraph("bench", "-p", "4", "-p", "5-6", "-n", 0, "-r", 1, "-t", 1, "-ub", "256", "-ub", "512").stdout.splitlines()
    assert [line.split("|")[-3].strip() for line in lines[2:]] == ["pp4", "pp5", "pp6"] * 2


def test_a_file_is_loaded_once_for_each_policy(qgraph, monkeypatch):
    loads, load = [], qwen3next_ggml.model.load

    def watched(*args, **options):
        loads.append((options["repack"], options["mmap"]))
        return load(*args, **options)

    monkeypatch.setattr(qwen3next_ggml.model, "load", watched)
    result = qgraph("bench", "-p", "4,5", "-n", 0, "-r", 1, "-t", 1, "--repack", "0,auto", "-lm", "mmap,none,auto", "-o", "json")
    assert loads == [(repack, mmap) for mmap in (True, False, "auto") for repack in (False, "auto")]
    assert [row["load_mode"] for row in json.loads(result.stdout)] == ["mmap"] * 4 + ["none"] * 8, "the embedded model is small"
    assert [row["load_mode_asked"] for row in json.loads(result.stdout)] == ["mmap"] * 4 + ["none"] * 4 + ["auto"] * 4
    assert qgraph("bench", "--repack", "2").exit_code == 2
