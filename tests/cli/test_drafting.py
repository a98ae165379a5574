"""Drafting on the command line: the same text, statistics on stderr and in the document, refusals in one line."""

import json

import pytest

from tests.kit import run_qgraph

GREEDY = ("-p", "ROMEO.\n", "-n", "60", "--temp", "0", "-t", "1")
DRAFT = ("--spec-type", "draft-mtp")


def test_run_says_the_same_and_counts():
    plain, drafted = run_qgraph("run", *GREEDY), run_qgraph("run", *GREEDY, *DRAFT, "--spec-draft-n-max", "2", "-v", "--json")
    text, document = drafted.stdout.rstrip("\n").rsplit("\n", 1)
    assert text == plain.stdout.rstrip("\n")
    d = json.loads(document)["drafts"]
    assert 0 < d["draft_n_accepted"] <= d["draft_n"] and len(d["by_position"]) == 2
    assert "drafting up to 2 tokens by the NextN head, with the trunk's embedding, head" in drafted.stderr
    assert f"({d['draft_n_accepted']} of {d['draft_n']}; by place " in drafted.stderr
    assert "draft" not in plain.stderr


def test_chat_drafts():
    done = run_qgraph("chat", "-p", "My lord, the ghost is here.", "-s", "5", *DRAFT, "--spec-draft-n-max", "auto", stdin="/stats\n")
    assert done.returncode == 0
    assert "draft acceptance = " in done.stderr


@pytest.mark.parametrize(
    "args, code, said",
    [
        (("--spec-draft-n-max", "2"), 2, "--spec-draft-n-max does nothing without --spec-type draft-mtp"),
        ((*DRAFT, "--spec-draft-n-max", "0"), 2, "0 is not in the range x>=1"),
        ((*DRAFT, "--spec-draft-p-min", "2"), 2, "2.0 is not in the range 0<=x<=1"),
        (("--spec-type", "draft"), 2, "'draft' is not one of 'none', 'draft-mtp'"),
    ],
)
def test_refusals(args, code, said):
    done = run_qgraph("run", *GREEDY, *args)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr


def test_a_file_without_the_head_is_an_error(toys):
    done = run_qgraph("run", toys.t0, "-p", "hi", "-n", "4", *DRAFT)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ") and "NextN" in done.stderr
