"""docs/parity.md shows what its commands print, and the pictures they draw."""

import re
import runpy

import pytest

from qwen3next_ggml.gguf_file import GgufFile
from qwen3next_ggml.parity.plot import FINE, OFF
from qwen3next_ggml.tokenizer import Tokenizer
from tests.kit.process import ROOT

PAGE = runpy.run_path(str(ROOT / "docs" / "make_parity.py"))
BLOCKS = [block for block in PAGE["BLOCK"].findall(PAGE["PAGE"].read_text()) if not PAGE["needs_vulkan"](block)]
NUMBER = re.compile(r"(?<![\w-])(?:\d[\d.,]*(?:e[+-]\d+)?|inf)(?![\w])")


def words(printed):
    """Leave out what differs between machines: numbers but for zero, and which node of a layer is the worst."""
    masked = NUMBER.sub(lambda found: "0" if found[0] == "0.0e+00" else "#", re.sub(r"\bnode_\d+", "node", printed))
    lines = (re.sub(r"(#  )\S+$", r"\1node", re.sub(r"\.py:#", ".py", line)) for line in masked.splitlines())
    return [" ".join(line.split()) for line in lines if line.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("page")


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split()[1] + "-" + str(BLOCKS.index(block)))
def test_the_page_shows_what_is_printed(block, folder):
    """In order and in one folder: a script is run after the command that wrote it."""
    found = list(PAGE["commands"](block))
    assert found
    for command, shown in found:
        printed = PAGE["run"](command, folder)
        assert words(printed) == words(shown) and len(words(shown)) > 0, command


def test_the_pictures_show_what_the_page_says_of_them(folder):
    """Kept ones and those drawn now: two casts in llama.cpp's attention, none in the lean one; layers 0 to 2 below the tolerance."""
    text = PAGE["PAGE"].read_text()
    for place in (ROOT / "docs", folder):
        for name, n_casts in (("parity-plain.svg", 2), ("parity-lean.svg", 0)):
            lines = re.findall(r"<text[^>]*>([^<]+)", (place / name).read_text())
            assert f"]({name})" in text and sum(line.startswith("CPY f16") for line in lines) == n_casts
            assert "FLASH_ATTN_EXT" in lines and len(lines) > 50
        dots = re.findall(r'fill="(#\w+)"><title>\S+-(\d) #', (place / "parity-nodes.svg").read_text())
        assert {colour for colour, layer in dots if layer in "012"} == {FINE} and sum(colour == OFF for colour, _ in dots) > 150


def test_the_pages_python_shows_the_cause(bard, capsys):
    """With the one option the difference is there; without it, nowhere."""
    [block] = re.findall(r"```python\n(.*?)```", PAGE["PAGE"].read_text(), re.DOTALL)
    with GgufFile.open(bard) as file:
        tokens = tuple(Tokenizer.from_metadata(file.metadata).encode("What is a man, if his chief good and market of his time"))
    for change, name in (("(kv_as_stored=True)", "attn_pregate-3"), ("(kv_as_stored=False)", "None")):
        exec(block.replace("(kv_as_stored=True)", change), {"tokens": tokens})  # noqa: S102
        assert capsys.readouterr().out == f"{name}\n"


@pytest.mark.parametrize("shown, printed, same", [
    ("worst 1.2e-06  l_out-3", "worst 3.2e-05  l_out-4", True), ("worst 0.0e+00  -", "worst 1.0e-05  l_out-3", False),
    ("made by graph/linear.py:12", "made by graph/linear.py:13", True), ("MUL_MAT [192, 23]", "MUL_MAT_ID [192, 23]", False),
    ("difference: attn-3 #0, NMSE 1.0e-06", "difference: attn-4 #0, NMSE 1.0e-06", False),
])  # fmt: skip
def test_what_is_left_out_of_the_comparison(shown, printed, same):
    assert (words(shown) == words(printed)) is same
