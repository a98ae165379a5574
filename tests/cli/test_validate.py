"""`qgraph validate`: warnings for what loads and may still be wrong (C07, C10)."""

import json

import gguf
import pytest

from tests.kit import read_arrays
from tests.kit.gguf_bytes import edit_gguf


def test_good_files(qgraph, bard, toys):
    for path in (bard, toys.t0, toys.mtp, toys.legacy):
        result = qgraph("validate", path, "--strict")
        assert (result.exit_code, result.stdout) == (0, f"{path}: complete, nothing suspicious\n")


@pytest.mark.parametrize("name", ["blk.1.attn_norm.weight", "output_norm.weight", "blk.4.nextn.hnorm.weight"])
def test_norms_without_their_offset(qgraph, toys, tmp_path, name):
    path = tmp_path / "t.gguf"
    edit_gguf(toys.mtp, path, replace={name: ("f32", read_arrays(toys.mtp)[name] - 1)})
    result = qgraph("validate", path)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"warning: norm weights centred at 0 instead of 1: {name};")
    assert qgraph("validate", path, "--strict").exit_code == 3


def test_coarse_gates_converted_and_unused_tensors(qgraph, toys, tmp_path):
    source, path = toys.file(type="q4_k"), tmp_path / "t.gguf"
    arrays = read_arrays(source)
    replace = {
        "blk.0.ssm_ba.weight": ("q4_0", arrays["blk.0.ssm_ba.weight"]),
        "blk.1.ssm_a": ("f16", arrays["blk.1.ssm_a"]),
    }
    edit_gguf(source, path, replace=replace, rename={"output.weight": "surprise"})
    result = qgraph("validate", path, "--json", "--strict")
    assert result.exit_code == 3
    gates, converted, unused = json.loads(result.stdout)["warnings"]
    assert "blk.0.ssm_ba.weight (q4_0)" in gates and "blk.1.ssm_a" not in gates
    assert converted == "converted to f32 at load: blk.1.ssm_a (f16)"
    assert unused == "not used by this architecture: surprise"


def test_what_cannot_be_used_is_an_error(qgraph, toys, tmp_path):
    path = tmp_path / "t.gguf"
    edit_gguf(toys.t0, path, drop={"blk.0.ssm_a"})
    result = qgraph("validate", path)
    assert (result.exit_code, result.stdout) == (1, "") and "missing 1 tensor: blk.0.ssm_a [6]" in result.stderr
    assert "blk.0.ssm_a" not in [t.name for t in gguf.GGUFReader(path).tensors]
