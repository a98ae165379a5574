"""`qgraph devices`: what is there, and a reason for everything that is not (C34)."""

import json
import os
import shutil
from pathlib import Path

import pytest

from qwen3next_ggml import ggml
from tests.kit import run_qgraph


def test_every_device_is_described(qgraph):
    report = json.loads(qgraph("devices", "--json").stdout)
    provider = ggml.provider()
    assert report["provider"] == {"name": provider.name, "ggml_version": provider.version, "folder": provider.folder}
    assert [d["name"] for d in report["devices"]] == [d.name for d in ggml.devices()]
    cpu = next(d for d in report["devices"] if d["kind"] == "cpu")
    assert 0 < cpu["memory_free"] <= cpu["memory_total"]
    assert "CPU_REPACK" in cpu["buffer_types"] and "REPACK" in cpu["features"]
    assert Path(cpu["library"]).parent == Path(provider.folder)


def test_what_is_missing_has_a_reason(qgraph):
    report = json.loads(qgraph("devices", "--json").stdout)
    names = [d["name"] for d in report["devices"]]
    for backend in ("CUDA", "Vulkan", "Metal"):
        assert any(name.startswith(backend) for name in names) or len(report["missing_backends"][backend]) > 10
    others = report["other_providers"]
    assert set(others) == {"ggml_python", "llama_cpp", "libggml"} - {report["provider"]["name"]}
    assert others["libggml"] == "no Python package libggml" or "selects it" in others["libggml"]


def test_text_and_list_devices_name_the_same(qgraph):
    text = qgraph("devices").stdout
    listed = qgraph("run", "--list-devices")
    assert listed.exit_code == 0
    for device in ggml.devices():
        assert f"{device.name} ({device.kind}): {device.description}" in text
        assert f"  {device.name}: {device.description} (" in listed.stdout


@pytest.mark.parametrize("command", ["run", "bench"])
def test_an_unknown_device_is_an_error(qgraph, command):
    result = qgraph(command, "-dev", "CUDA7", *(["-p", "hi"] if command == "run" else []))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: no device CUDA7; ggml provider {ggml.provider().name} has: CPU\n"


def test_an_unknown_provider_is_an_error(tmp_path):
    done = run_qgraph("devices", "--ggml", "nonesuch")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: no ggml provider nonesuch:") and done.stderr.count("\n") == 1
    done = run_qgraph("devices", "--ggml", tmp_path)
    assert done.returncode == 1 and "no ggml library there" in done.stderr


def test_a_provider_in_a_folder_with_spaces(tmp_path):
    """Another working directory, a path that is not ASCII, and nothing in LD_LIBRARY_PATH."""
    folder = tmp_path / "gg ml – ü"
    shutil.copytree(ggml.provider().folder, folder, symlinks=True)
    done = run_qgraph("devices", "--json", "--ggml", folder, env={"LD_LIBRARY_PATH": ""})
    assert done.returncode == 0, done.stderr
    assert os.path.samefile(json.loads(done.stdout)["provider"]["folder"], folder)
