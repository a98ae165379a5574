"""The benchmark prints speeds where both sides agree, and none where they do not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.vs_llama import N_FORCED, Row, check_equivalence, measure

ROOT = Path(__file__).parents[1]


def run(program, *args):
    done = subprocess.run([sys.executable, "-m", program, *args], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stderr == "", done.stderr
    return done.returncode, done.stdout.splitlines()


def test_against_llama_on_the_embedded_model():
    provider = os.environ.get("QGRAPH_GGML") or "ggml_python"
    status, lines = run("benchmarks.vs_llama", "-p", "9", "-n", "3", "-d", "5", "-r", "1", "-t", "1", "--provider", provider)
    document = json.loads(lines[-1])
    assert status == 0
    assert document["equivalence"]["nmse"] <= document["equivalence"]["limit"]
    assert [row["test"] for row in document["rows"]] == ["pp9", "tg3 @ d5"]
    assert all(len(row["ours"]) == len(row["theirs"]) == 2 and row["ratio_median"] > 0 for row in document["rows"])


def test_plain_graph_must_give_llamas_numbers():
    """Over the same libggml the limit is 1e-6; the logits of the two processes are equal far below it."""
    status, lines = run("benchmarks.vs_llama", "-p", "9", "-n", "0", "-r", "1", "-t", "1", "--graph", "plain")
    equivalence = json.loads(lines[-1])["equivalence"]
    assert status == 0 and equivalence["limit"] == 1e-6 and equivalence["nmse"] <= 1e-9


class FakeWorker:
    """Answers with given logits, and with seconds from a list."""

    def __init__(self, logits=None, seconds=()):
        self.logits, self.seconds, self.log = logits, list(seconds), []

    def call(self, verb, *args):
        self.log.append(verb)
        return self.logits if verb == "forced_logits" else self.seconds.pop(0)


@pytest.mark.parametrize("change, passes", [
    (lambda x: x, True),
    (lambda x: x * (1 + 1e-5), True),
    (lambda x: np.roll(x, 1, axis=0), False),
    (lambda x: np.where(np.arange(x.shape[1]) == 7, np.nan, x), False),
    (lambda x: x + 0.1 * x[::-1], False),
], ids=["same", "rounding", "one token late", "nan", "another state"])  # fmt: skip
def test_logits_that_differ_are_refused(change, passes):
    logits = np.random.default_rng(3).normal(size=(1 + N_FORCED, 50)).astype(np.float32)
    result = check_equivalence(FakeWorker(change(logits)), FakeWorker(logits), n_prompt=4, n_vocab=50, limit=1e-3)
    assert result.passed is passes


def test_a_confident_choice_must_not_change():
    """Few logits far off leave the mean error small; the first choice shows them."""
    theirs = np.random.default_rng(3).normal(size=(1 + N_FORCED, 5000)).astype(np.float32)
    ours = theirs.copy()
    theirs[4, 10], ours[4, 10], ours[4, 11] = 5, 0, 5
    result = check_equivalence(FakeWorker(ours), FakeWorker(theirs), n_prompt=4, n_vocab=5000, limit=1e-3)
    assert result.nmse < 1e-3 and not result.passed


def test_each_measure_is_paired_with_its_neighbour():
    ours, theirs = FakeWorker(seconds=[1, 4, 1, 4]), FakeWorker(seconds=[2, 8, 2, 8])
    row = measure(ours, theirs, "tg8", "time_decode", [], 8, 2)
    assert row == Row("tg8", [8, 2, 8, 2], [4, 1, 4, 1])
    assert row.summary()["ratio_median"] == row.summary()["ratio_min"] == 2
