"""The examples run as they stand and show what they promise."""

import re
import sys

import pytest

from tests.kit.process import ROOT, _run

EXPECTED = {
    "generate.py": r"\n\d+ tokens per second, ended by (length|eog)\n$",
    "next_token.py": r" then '.*' 0\.\d\d, ",
    "two_sequences.py": r"--- sequence 1, \d+ tokens\nThe king is[\s\S]*--- [1-4] graphs built for 24 steps\n$",
    "speculative.py": r"^(up to (\d|auto) drafted: .* same text\n){4}$",
    "own_graph.py": r"^largest difference \d\.\de-0[5-9]\n$",
}


def test_every_example_is_here():
    assert {path.name for path in ROOT.glob("examples/*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_example(name):
    done = _run([sys.executable, "-W", "error", str(ROOT / "examples" / name)], None, 120)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(EXPECTED[name], done.stdout), done.stdout
