"""`qgraph profile`: tables on stdout, a trace in a file."""

import json
import re

import pytest

from qwen3next_ggml.cli.profile import _rate

ARGS = ("profile", "-p", 16, "-n", 2, "-c", 256)


def test_tables_and_document(qgraph):
    result = qgraph(*ARGS, "--json")
    assert result.exit_code == 0, result.stderr
    text, last = result.stdout.rsplit("\n", 2)[:2]
    found = json.loads(last)
    assert [(one["what"], one["n_tokens"]) for one in found["passes"]] == [("prompt", 16), ("step", 1)]
    assert found["read_bandwidth"] > 0 and found["seconds_per_call"] > 0
    step = text[text.index("step: ") :]
    assert re.search(r"^\d+\.\d{3} ms in 2\d\d nodes, \d+% of \d+\.\d{3} ms in one call; node by node \d+\.\d{3} ms, of which calls", step, re.MULTILINE)
    rows = dict(re.findall(r"^(\S+) +\d+ +([\d.]+) +[\d.]+% ", step, re.MULTILINE))
    for key in ("by_scope", "by_op"):
        assert {share["name"]: f"{1e3 * share['seconds']:.3f}" for share in found["passes"][1][key]}.items() <= rows.items()
    assert rows["all"] == f"{1e3 * found['passes'][1]['seconds']:.3f}"
    roofs = re.findall(r"^roofline: memory gives ([\d.]+) GB/s, at which these bytes take ([\d.]+) ms, (\d+)% of the time$", text, re.MULTILINE)
    for one, (gb, ms, percent) in zip(found["passes"], roofs, strict=True):
        floor = sum(share["nbytes"] for share in one["by_op"]) / found["read_bandwidth"]
        assert gb == f"{found['read_bandwidth'] / 1e9:.2f}" and ms == f"{1e3 * floor:.3f}" and percent == f"{100 * floor / one['seconds']:.0f}"


def test_a_trace_is_written(qgraph, tmp_path):
    path = tmp_path / "trace.json"
    result = qgraph("profile", "-p", 0, "-n", 2, "-c", 256, "--chrome-trace", path)
    assert result.exit_code == 0 and re.fullmatch(rf"wrote {path}, [\d.]+ KiB\n", result.stderr)
    assert len(json.loads(path.read_text())["traceEvents"]) > 245 and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "args, code, words",
    [
        (("-p", 0, "-n", 0), 2, "nothing to time"),
        (("-p", 64, "-ub", 32), 1, "error: a profile takes the prompt at once: 64 tokens, an ubatch has at most 32"),
        (("--chrome-trace", "/nowhere/t.json", "-p", 1, "-n", 0), 1, "error: /nowhere/t.json: No such file or directory"),
    ],
)
def test_what_is_refused(qgraph, args, code, words):
    result = qgraph("profile", *args)
    assert result.exit_code == code and words in result.stderr


def test_no_rate_of_a_time_that_is_shown_as_none():
    assert [_rate(3000, seconds) for seconds in (1e-6, 4e-7, 0.0)] == ["3.00", "-", "-"]
