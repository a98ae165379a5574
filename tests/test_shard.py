"""Reading a file of a set into memory of the caller's."""

import os

import pytest

from qwen3next_ggml.errors import GgufError
from qwen3next_ggml.gguf_file import Shard


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "some.gguf"
    path.write_bytes(bytes(range(200)))
    return path


def test_it_reads_what_the_map_holds(path):
    shard, memory = Shard.open(path), bytearray(90)
    shard.read_into([memoryview(memory)[:30], memoryview(memory)[30:]], 110)
    assert memory == path.read_bytes()[110:] == shard.bytes[110:].tobytes()


def test_short_reads_are_continued(path, monkeypatch):
    """One call of the system gives 2 GiB at most."""
    import qwen3next_ggml.gguf_file.shard as module

    class Slow(module.io.FileIO):
        def readinto(self, memory):
            return super().readinto(memory[:7])

    monkeypatch.setattr(module, "open", lambda path, mode, buffering: Slow(path), raising=False)
    shard, memory = Shard.open(path), bytearray(200)
    shard.read_into([memoryview(memory)], 0)
    assert memory == path.read_bytes()


def test_a_file_that_took_the_name_is_not_read(path, tmp_path):
    shard = Shard.open(path)
    (tmp_path / "other").write_bytes(bytes(200))
    os.replace(tmp_path / "other", path)
    with pytest.raises(GgufError, match=r"some\.gguf: was replaced while it was being read"):
        shard.read_into([memoryview(bytearray(10))], 0)


def test_a_file_cut_short_is_told(path):
    shard = Shard.open(path)
    os.truncate(path, 100)
    with pytest.raises(GgufError, match=r"some\.gguf: became shorter while it was being read"):
        shard.read_into([memoryview(bytearray(60))], 50)


def test_a_file_that_went_is_told(path):
    shard = Shard.open(path)
    path.unlink()
    with pytest.raises(GgufError, match=r"some\.gguf: No such file"):
        shard.read_into([memoryview(bytearray(1))], 0)
