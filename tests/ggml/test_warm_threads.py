"""Threads wait for the next graph: none is made or lost from one computation to the next, and all go with their backend."""

from tests.kit import run_python

STEPS = """
import os, sys
import qwen3next_ggml
from qwen3next_ggml import ggml

def threads():
    return sorted(os.listdir("/proc/self/task"))

def steps():
    with qwen3next_ggml.load(n_threads=2) as model, model.session(n_ctx=256) as s:
        s.decode([1, 2, 3])
        before = threads()
        for token in range(30):
            s.decode([token])
        assert threads() == before and len(before) >= 2, (before, threads())

steps()
steps()

backend = ggml.device("CPU").init()
for n in (2, 3, 1, 2):
    backend.set_n_threads(n)
assert len(backend._threads) == ("OPENMP" not in backend.device.features)
backend.close()
backend.close()
"""


def test_threads_stay_from_step_to_step():
    # the suite holds OpenMP to one thread; this one wants two
    done = run_python(STEPS, env={"OMP_THREAD_LIMIT": "8"})
    assert done.returncode == 0 and not done.stderr, done.stderr
