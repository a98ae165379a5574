"""Files of arrays: whole or not there, and no byte changes unnoticed."""

import json
import os
import signal
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest
from safetensors import safe_open

from qwen3next_ggml import array_file
from qwen3next_ggml.array_file import Lazy, read_arrays, write_arrays
from qwen3next_ggml.errors import StateError
from tests.kit.process import ROOT

ARRAYS = {
    "halves": np.arange(5, dtype=np.float16).reshape(1, 5),
    "bytes": np.arange(7, dtype=np.uint8),
    "a": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 2, 2),
    "empty": np.zeros((0, 4), np.float32),
    "ints": np.array([1 << 40], np.int64),
    "scalar": np.array(7, np.uint32),
}
ABOUT = {"format": "test", "said": 'quotes " and ü'}


@pytest.fixture
def path(tmp_path):
    write_arrays(tmp_path / "x.arrays", ABOUT, ARRAYS)
    return tmp_path / "x.arrays"


def test_what_is_written_is_read(path):
    about, arrays = read_arrays(path)
    assert about == ABOUT and arrays.keys() == ARRAYS.keys()
    for name, x in ARRAYS.items():
        assert (arrays[name].dtype, arrays[name].shape) == (x.dtype, x.shape) and np.array_equal(arrays[name], x)
        assert arrays[name].ctypes.data % x.itemsize == 0
        with pytest.raises(ValueError, match="read-only"):
            arrays[name][...] = 0


def test_safetensors_reads_it(path):
    with safe_open(path, "np") as file:
        assert all(np.array_equal(file.get_tensor(name), x) for name, x in ARRAYS.items())
        assert {name: file.metadata()[name] for name in ABOUT} == ABOUT


def test_the_checksum_is_that_of_all_other_bytes(path):
    data = bytearray(path.read_bytes())
    crc = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["crc32"]
    at = data.index(crc.encode())
    data[at : at + 8] = b"00000000"
    # the eight bytes of the checksum itself are counted as zeros
    assert f"{zlib.crc32(data):08x}" == crc


def test_arrays_are_read_in_their_turn(tmp_path):
    held = []

    def reading(i):
        held.append(i)
        return np.full(3, i, np.float32)

    write_arrays(tmp_path / "x", {}, {f"{i}": Lazy(np.dtype(np.float32), (3,), lambda i=i: reading(i)) for i in range(4)})
    assert held == [0, 1, 2, 3] and read_arrays(tmp_path / "x")[1]["2"].tolist() == [2, 2, 2]


def test_every_byte_counts(path):
    """Every byte of the file, each with another bit of it turned."""
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        with pytest.raises(StateError, match="x.arrays is (damaged|not a session file)|was cut short|is of type"):
            read_arrays(path)


def test_every_length_counts(path):
    data = path.read_bytes()
    for n in range(len(data)):
        path.write_bytes(data[:n])
        with pytest.raises(StateError, match="was cut short: it has|was cut short: its header|is not a session file"):
            read_arrays(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(StateError, match="damaged"):
        read_arrays(path)


def test_a_weak_checksum_is_noticed(path, monkeypatch):
    """One that leaves the header out."""
    monkeypatch.setattr(array_file, "zlib", type("", (), {"crc32": staticmethod(lambda data, crc=0: 0)}))
    write_arrays(path, ABOUT, ARRAYS)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_every_byte_counts(path)


@pytest.mark.parametrize("content", [b"", b"x", b"GGUF" + bytes(200), b"PK\x03\x04" * 30, b"\xff" * 100], ids=repr)
def test_what_is_no_such_file(tmp_path, content):
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(StateError, match="x is not a session file"):
        read_arrays(path)


def test_what_is_no_file(tmp_path):
    with pytest.raises(StateError, match="nowhere: No such file or directory"):
        read_arrays(tmp_path / "nowhere")
    with pytest.raises(StateError, match="directory|regular file"):
        read_arrays(tmp_path)


# writing fails


def left(folder):
    return sorted(p.name for p in folder.iterdir())


def test_where_nothing_can_be_written(tmp_path):
    with pytest.raises(StateError, match="nowhere/x could not be written: No such file or directory"):
        write_arrays(tmp_path / "nowhere" / "x", {}, ARRAYS)
    (tmp_path / "folder").mkdir()
    with pytest.raises(StateError, match="could not be written"):
        write_arrays(tmp_path / "folder", {}, ARRAYS)
    assert left(tmp_path) == ["folder"]


@pytest.mark.parametrize("call", ["posix_fallocate", "fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(path, monkeypatch, call):
    def full(*_):
        raise OSError(28, "No space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(os, call, full)
    with pytest.raises(StateError, match="x.arrays could not be written: No space left on device"):
        write_arrays(path, {}, {"other": ARRAYS["a"]})
    assert path.read_bytes() == before and left(path.parent) == ["x.arrays"]


def test_an_array_that_cannot_be_read_leaves_the_old_file(path):
    def broken():
        raise RuntimeError("the device is lost")

    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="the device is lost"):
        write_arrays(path, {}, {"x": Lazy(np.dtype(np.uint8), (5,), broken)})
    assert path.read_bytes() == before and left(path.parent) == ["x.arrays"]


def test_a_link_stays_a_link(path):
    link = path.with_name("link")
    link.symlink_to(path)
    write_arrays(link, {"said": "new"}, {})
    assert link.is_symlink() and read_arrays(path)[0] == {"said": "new"}


WRITER = """
import os, sys, time
import numpy as np
from qwen3next_ggml.array_file import Lazy, write_arrays

path, stop_in = sys.argv[1:]

def pause(*_):
    print("there", flush=True)
    time.sleep(60)

def in_place(path, about, arrays):
    with open(path, "r+b") as file:
        file.write(bytes(40))
        file.flush()
        pause()

if stop_in == "in place":
    write_arrays = in_place
elif stop_in in ("fsync", "replace"):
    setattr(os, stop_in, pause)
data = np.full((1 << 20) + 3, 9, np.uint8)
i = 0
while True:
    arrays = {f"{n}": data + np.uint8(i) for n in range(4)}
    if stop_in == "data":
        arrays["3"] = Lazy(data.dtype, data.shape, pause)
    write_arrays(path, {"i": str(i)}, arrays)
    i += 1
    if i == 1:
        print("there", flush=True)
"""


def kill(path, stop_in):
    """Start the writer, kill it where it says it is, or some milliseconds later."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen([sys.executable, "-c", WRITER, path, stop_in], env=env, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"there\n"
    if stop_in.endswith("ms"):
        time.sleep(int(stop_in.split()[0]) / 1000)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()


@pytest.mark.parametrize("stop_in", ["data", "fsync", "replace", *(f"{ms} ms" for ms in (1, 5, 9, 16, 30))])
def test_killed_while_writing(path, stop_in):
    """kill -9 at three points of a save and at odd moments of many: what was there is there, or the next one, whole."""
    before = path.read_bytes()
    kill(path, stop_in)
    if not stop_in.endswith("ms"):
        assert path.read_bytes() == before
        return
    about, arrays = read_arrays(path)
    assert all((x == 9 + int(about["i"]) % 256).all() for x in arrays.values())
    # and what was left behind does not disturb the next one
    write_arrays(path, ABOUT, ARRAYS)
    assert read_arrays(path)[0] == ABOUT


def test_writing_in_place_is_noticed(path):
    kill(path, "in place")
    with pytest.raises(StateError):
        read_arrays(path)
