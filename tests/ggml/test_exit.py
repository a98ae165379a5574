"""Leaving the interpreter, in any order and state, is silent."""

import pytest

from tests.kit import run_python

BEGIN = """
import gc, sys, threading, time
import numpy as np
from qwen3next_ggml import ggml

def machine(n=3, width=64):
    backend = ggml.device("CPU").init()
    backend.set_n_threads(2)
    context = ggml.Context(n + 2, graph_size=n + 2)
    g = ggml.Ops(context)
    x = g.set_input(context.new_tensor(ggml.types.F32, width, width))
    y = x
    for _ in range(n):
        y = g.mul_mat(y, x)
    graph = ggml.Graph(context, n + 2)
    graph.expand(g.set_output(y))
    allocator = ggml.GraphAllocator(backend.buffer_type)
    allocator.alloc(graph)
    x.set(np.zeros((width, width), np.float32))
    step = ggml.Step(backend, graph, [x], [y])
    array = np.zeros((width, width), np.float32)
    return backend, context, graph, allocator, step, array

def use(made):
    made[0].compute(made[2])
    made[4].run([made[5]], [made[5].copy()])
"""

ENDINGS = {
    "a global": "made = machine(); use(made)",
    "a cycle": "class Holder: pass\nh = Holder(); h.me = h; h.made = machine(); use(h.made); del h",
    "a cycle collected before": "class Holder: pass\nh = Holder(); h.me = h; h.made = machine(); use(h.made); del h; gc.collect()",
    "a module attribute": "sys.keeps = machine(); use(sys.keeps)",
    "everything closed twice": "made = machine(); use(made)\nfor _ in range(2):\n    for part in (made[0], made[3], made[1]): part.close()",
    "closed the wrong way round": "made = machine(); use(made)\nmade[1].close(); made[3].close(); made[0].close()",
    "a reference from a finalizer": "class Late:\n    def __init__(self, made): self.made = made\n    def __del__(self): self.made[2].n_nodes; self.made[1].close()\nlate = Late(machine())",
    "a thread that ended": "t = threading.Thread(target=lambda: use(machine())); t.start(); t.join()",
    "a thread that is still at work": "t = threading.Thread(target=lambda: [use(machine()) for _ in range(20)]); t.start()",
    "a scheduler": "made = machine(); s = ggml.Scheduler([made[0]], 64); s.alloc(made[2]); s.compute(made[2])",
    "a buffer of mapped memory": "a = np.zeros(8192, np.uint8); b = ggml.device('CPU').buffer_from_host(-(-a.ctypes.data // 64) * 64, 4096, keep=a)",
    "after an error": "made = machine()\ntry: ggml.Ops(made[1]).add(None, None)\nexcept Exception: pass",
}  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_end_is_silent(ending):
    done = run_python(BEGIN + ENDINGS[ending], flags=["-W", "error", "-X", "dev"])
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_after_an_exception_only_its_traceback_is_seen():
    done = run_python(BEGIN + "made = machine(); use(made); raise SystemExit(3)", flags=["-W", "error", "-X", "dev"])
    assert (done.returncode, done.stderr) == (3, "")
    done = run_python(BEGIN + "made = machine(); use(made); raise ValueError('mine')", flags=["-W", "error", "-X", "dev"])
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "ValueError: mine"


def test_a_daemon_thread_in_a_long_computation_is_stopped():
    code = """
made = machine(n=400, width=1024)
threading.Thread(target=lambda: made[0].compute(made[2]), daemon=True).start()
time.sleep(0.3)
start = time.monotonic()
import atexit
atexit.register(lambda: print("leaving"))
"""
    done = run_python(BEGIN + code, flags=["-W", "error", "-X", "dev"], timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")
