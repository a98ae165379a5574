"""`qgraph toy` against gguf-py's reading of what it wrote."""

import gguf
import pytest

from tests.kit import read_metadata


def types_of(path):
    return {t.name: t.tensor_type.name.lower() for t in gguf.GGUFReader(path).tensors}


def test_the_plain_toy(qgraph, tmp_path):
    path = tmp_path / "t.gguf"
    result = qgraph("toy", path)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"wrote {path}, {path.stat().st_size / 2**20:.2f} MiB\n"
    assert set(types_of(path).values()) == {"f32"}
    assert read_metadata(path)["qwen3next.block_count"] == 4


def test_every_option_acts(qgraph, tmp_path):
    path, other = tmp_path / "t.gguf", tmp_path / "u.gguf"
    options = ("--layers", 5, "--type", "q4_k", "--mtp", "--legacy", "--geometry", "tiny-q")
    assert qgraph("toy", path, *options, "--seed", 3).exit_code == 0
    types, metadata = types_of(path), read_metadata(path)
    assert metadata["qwen3next.block_count"] == 6 and metadata["qwen3next.nextn_predict_layers"] == 1
    assert types["blk.0.ssm_in.weight"] == types["blk.5.nextn.eh_proj.weight"] == "q4_k"
    assert "blk.0.attn_gate.weight" not in types
    qgraph("toy", other, *options, "--seed", 3)
    assert path.read_bytes() == other.read_bytes()
    qgraph("toy", other, *options, "--seed", 4)
    assert path.read_bytes() != other.read_bytes()


@pytest.mark.parametrize(
    "options, words",
    [
        (("--arch", "qwen9"), "no graph for architecture 'qwen9', supported: qwen3next"),
        (("--type", "q9_9"), "no tensor type 'q9_9'"),
        (("--geometry", "huge"), "geometry 'huge', expected one of tiny, tiny-q, qwen3-next-80b"),
    ],
)
def test_a_refusal_leaves_the_file_that_was_there(qgraph, tmp_path, options, words):
    path = tmp_path / "t.gguf"
    path.write_text("mine")
    result = qgraph("toy", path, *options)
    assert result.exit_code == 1 and words in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["t.gguf"] and path.read_text() == "mine"


def test_a_folder_that_is_not_there(qgraph, tmp_path):
    result = qgraph("toy", tmp_path / "no" / "t.gguf")
    assert result.exit_code == 1 and "No such file or directory" in result.stderr
