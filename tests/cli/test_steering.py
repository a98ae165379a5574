"""Control vectors on the command line, under llama.cpp's spelling."""

import json
from contextlib import nullcontext

import pytest

import qwen3next_ggml as q
from tests.test_control_vector import directions, write

RUN = ("run", "-p", "To be, or", "-n", 12, "--temp", 0, "--json")


@pytest.fixture
def files(tmp_path):
    return [write(tmp_path / name, {il: 3 * x for il, x in directions(2, 5, seed=i, n=192).items()}) for i, name in enumerate("ab")]


def document(result):
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def steered(bard, vector=None):
    with q.load(bard, n_threads=1) as model, model.session() as s, vector.on(s) if vector else nullcontext():
        return [x.token for x in q.stream_generate(model, "To be, or", n_predict=12, temp=0, session=s)]


def test_vectors_from_files(qgraph, bard, files):
    a, b = files
    va, vb = q.control_vector(a), q.control_vector(b)
    plain = document(qgraph(*RUN))["tokens"]
    assert plain == steered(bard) != steered(bard, va)
    assert document(qgraph(*RUN, "--control-vector", a))["tokens"] == steered(bard, va)
    assert document(qgraph(*RUN, "--control-vector", f"{a},{b}"))["tokens"] == steered(bard, va + vb)
    assert document(qgraph(*RUN, "--control-vector-scaled", f"{a}:0.5", "--control-vector", b))["tokens"] == steered(bard, va * 0.5 + vb)
    assert document(qgraph(*RUN, "--control-vector", a, "--control-vector-layer-range", 3, 7))["tokens"] == steered(bard, va.within(3, 7))
    assert document(qgraph(*RUN, "--control-vector", a, "--control-vector-layer-range", 0, 0))["tokens"] == steered(bard, va)
    assert document(qgraph(*RUN, "--control-vector-scaled", f"{a}:0"))["tokens"] == plain


def test_a_chat_is_steered(qgraph, files):
    args = ("chat", "-p", "Who is there?", "-st", "-n", 12, "--temp", 0, "--json")
    answers = [document(qgraph(*args, *more))["answers"][0]["tokens"] for more in ((), ("--control-vector", files[0]))]
    assert answers[0] != answers[1]


@pytest.mark.parametrize(
    "args, code, words",
    [
        (("--control-vector-layer-range", 1, 2), 2, "does nothing without --control-vector"),
        (("--control-vector-scaled", "v.gguf"), 2, "expected FNAME:SCALE"),
        (("--control-vector-scaled", "v.gguf:much"), 2, "'much' is not a number"),
        (("--control-vector", "nowhere.gguf"), 1, "error: nowhere.gguf: No such file or directory"),
    ],
)
def test_what_is_refused(qgraph, args, code, words):
    result = qgraph(*RUN, *args)
    assert (result.exit_code, result.stdout) == (code, "") and words in result.stderr
