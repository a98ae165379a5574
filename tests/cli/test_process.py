"""The command line as a process: Ctrl-C, a reader that leaves, silence at exit, bugs that show themselves."""

import os
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from qwen3next_ggml.cli import cli
from tests.kit import run_qgraph
from tests.kit.process import ROOT

QGRAPH = [sys.executable, "-X", "dev", "-W", "error", "-m", "qwen3next_ggml.cli"]


def start(*args):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen([*QGRAPH, *map(str, args)], env=env, **pipes)


def wait_for(stream, text):
    """Read until `text` has come; returns all that came."""
    seen = b""
    while text not in seen:
        byte = stream.read(1)
        assert byte, seen
        seen += byte
    return seen


def test_ctrl_c_keeps_the_text():
    """C56: exit 130, what was generated printed, no traceback."""
    child = start("run", "-p", "To be", "--ignore-eos", "-c", 8192, "-s", 1)
    seen = wait_for(child.stdout, b"To be") + child.stdout.read(40)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    text = (seen + out).decode()
    assert child.returncode == 130
    assert text.startswith("To be") and len(text) > 40 and text.endswith("\n")
    assert err.decode() == "\nstopped: Ctrl-C, seed: 1\n"


def test_ctrl_c_during_the_prompt():
    child = start("run", "-f", __file__, "-c", 8192, "-ub", 8192, "--delta-net", "autoregressive", "-v")
    wait_for(child.stderr, b"tokens\n")
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (130, b"", b"")
    assert time.monotonic() - began < 5


def test_ctrl_c_in_a_conversation_ends_a_pipe():
    child = start("chat", "-p", "Who is there?", "--ignore-eos", "-c", 8192, "-s", 1)
    seen = child.stdout.read(20)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130 and (seen + out).endswith(b"\n") and err == b""


def test_a_reader_that_leaves_is_no_news():
    child = start("run", "--ignore-eos", "-c", 8192)
    wait_for(child.stdout, b"ROMEO.")
    child.stdout.close()
    assert child.wait(timeout=60) == 141
    assert child.stderr.read() == b""


@pytest.mark.parametrize("args", [("run", "-n", 2), ("inspect",), ("devices",), ("bench", "-p", 4, "-n", 2, "-r", 1)], ids=lambda args: args[0])
def test_silent_exit(args):
    """C55: with every warning an error, nothing but the command's own lines."""
    child = start(*args)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 0
    assert err == b"" or err.decode().splitlines()[1].startswith("stopped: ")


def test_no_terminal_codes_in_a_pipe(toys):
    for args in (("bench", "-p", 4, "-n", 2, "-r", 2), ("chat", "-p", "Hail!", "-n", 4), ("run", "-n", 4)):
        done = run_qgraph(*args)
        assert done.returncode == 0 and "\x1b" not in done.stdout + done.stderr


def test_text_the_terminal_cannot_show():
    done = run_qgraph("run", "-p", "naïve – ü", "-n", 1, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and done.stdout.startswith("na?ve ? ?")


def test_bugs_are_not_hidden(monkeypatch):
    monkeypatch.setattr("qwen3next_ggml.model.load", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        CliRunner().invoke(cli, ["run", "-p", "hi"], catch_exceptions=False)
