"""The examples run as they stand and show what they promise."""

import re
import sys
import zlib

import numpy as np
import pytest

from tests.kit.process import ROOT, _run

EXPECTED = {
    "generate.py": r"\n\d+ tokens per second, ended by (length|eog)\n$",
    "next_token.py": r" then '.*' 0\.\d\d, ",
    "two_sequences.py": r"--- sequence 1, \d+ tokens\nThe king is[\s\S]*--- [1-4] graphs built for 24 steps\n$",
    "speculative.py": r"^(up to (\d|auto) drafted: .* same text\n){4}$",
    "logit_lens.py": r"^after .*\n( +l_out-[0-7]  ('.+' \d\.\d\d *){5}\n){8}the last layer is the model: largest difference \de-0[3-9]\n$",
    "steer.py": r"^-1\.0  ' thee' 0\.0\d, ' you' 0\.[5-9][\s\S]*\n\+1\.0  ' thee' 0\.[5-9]\d, ' you' 0\.0",
    "expert_map.py": r"^(layer [0-7] ( +\d+){16}\n){8}\d+ picks, the busiest expert has \d+; wrote \S+\.png\n$",
    "rewind.py": r"^(HAMLET\.\nTo be, or not to be\|.*\n){3}loaded 11 tokens, evaluated 0\nthe same ending: True\n$",
    "own_graph.py": r"^largest difference \d\.\de-0[5-9]\n$",
}


def test_every_example_is_here():
    assert {path.name for path in ROOT.glob("examples/*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_example(name):
    done = _run([sys.executable, "-W", "error", str(ROOT / "examples" / name)], None, 120)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(EXPECTED[name], done.stdout), done.stdout


def test_the_expert_map_is_a_picture(tmp_path):
    """Each cell is as bright as its count says, and every token went to the same number of experts in each layer."""
    path = tmp_path / "map.png"
    done = _run([sys.executable, str(ROOT / "examples" / "expert_map.py"), str(path)], None, 120)
    counts = np.array([line.split()[2:] for line in done.stdout.splitlines()[:-1]], int)
    image = pixels(path.read_bytes())
    assert counts.shape == (8, 16) and len(set(counts.sum(1))) == 1 and image.shape == (8 * 24, 16 * 24, 3)
    assert np.abs(image[12::24, 12::24].sum(-1) / 765 - counts / counts.max()).max() < 0.01
    assert np.array_equal(image[::24, ::24], image[23::24, 23::24])


def pixels(png):
    """Decode a PNG of unfiltered RGB rows, checking each chunk's sum → [height, width, 3]."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(png):
        n = int.from_bytes(png[at : at + 4], "big")
        body = png[at + 4 : at + 8 + n]
        assert zlib.crc32(body) == int.from_bytes(png[at + 8 + n : at + 12 + n], "big")
        chunks[body[:4]], at = body[4:], at + 12 + n
    width, height = (int.from_bytes(chunks[b"IHDR"][i : i + 4], "big") for i in (0, 4))
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any() and list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    return rows[:, 1:].reshape(height, width, 3)
