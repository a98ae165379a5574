"""Stopping a computation, Ctrl-C, other Python threads, and a second caller."""

import signal
import threading
import time

import numpy as np
import pytest

from qwen3next_ggml import ggml
from qwen3next_ggml.errors import Aborted, BackendError
from qwen3next_ggml.ggml import types
from tests.kit import run_python

WIDTH = 512


class Machine:
    """A chain of products on its own backend: long enough to be caught in the middle."""

    def __init__(self, n):
        self.backend = ggml.device("CPU").init()
        self.backend.set_n_threads(1)
        self.context = ggml.Context(n + 2, graph_size=n + 2)
        g = ggml.Ops(self.context)
        x = g.set_input(self.context.new_tensor(types.F32, WIDTH, WIDTH))
        # rows are normalised so that no number becomes a denormal, which would slow everything down
        y = g.scale(x, 1.0)
        for _ in range(n // 2 - 1):
            y = g.rms_norm(g.mul_mat(y, x), 1e-6)
        self.graph = ggml.Graph(self.context, n + 2)
        self.graph.expand(g.set_output(y))
        self.allocator = ggml.GraphAllocator(self.backend.buffer_type)
        self.allocator.alloc(self.graph)
        self.x, self.y = x, y
        x.set(np.random.default_rng(1).standard_normal((WIDTH, WIDTH)).astype(np.float32))

    def compute(self):
        self.backend.compute(self.graph)

    def close(self):
        for part in (self.allocator, self.backend, self.context):
            part.close()


@pytest.fixture
def long():
    machine = Machine(4000)
    yield machine
    machine.close()


@pytest.fixture
def short():
    machine = Machine(40)
    yield machine
    machine.close()


def in_thread(work):
    """Start a thread; returns it and the list its exception lands in."""
    caught = []

    def run():
        try:
            work()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, caught


def wait_until_running(machine):
    deadline = time.monotonic() + 10
    while not machine.backend._stop.running and time.monotonic() < deadline:
        time.sleep(0.001)


def test_a_request_stops_what_is_running_and_only_that(long, short):
    thread, caught = in_thread(long.compute)
    wait_until_running(long)
    start = time.monotonic()
    long.backend.request_abort()
    thread.join()
    assert time.monotonic() - start < 1
    assert isinstance(caught[0], Aborted) and "stopped" in str(caught[0])
    short.backend.request_abort()
    short.compute()
    assert np.isfinite(short.y.get()).all()


def test_a_step_can_be_stopped_and_runs_again(long):
    out = np.empty((WIDTH, WIDTH), np.float32)
    step = ggml.Step(long.backend, long.graph, [], [long.y])
    thread, caught = in_thread(lambda: step.run([], [out]))
    wait_until_running(long)
    long.backend.request_abort()
    thread.join()
    assert isinstance(caught[0], Aborted)


def test_ctrl_c_interrupts_and_the_backend_lives(long, short):
    def deliver():
        wait_until_running(long)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=deliver).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        long.compute()
    assert time.monotonic() - start < 2
    short.compute()


def test_a_handler_that_raises_something_else(long):
    class Enough(Exception):
        pass

    def handler(number, frame):
        raise Enough

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Enough):
            long.compute()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_other_threads_run_meanwhile(long):
    thread, _ = in_thread(long.compute)
    wait_until_running(long)
    ticks = 0
    start = time.monotonic()
    while time.monotonic() - start < 0.2:
        ticks += 1
        time.sleep(0.001)
    assert long.backend._stop.running and ticks > 20
    long.backend.request_abort()
    thread.join()


def test_a_second_caller_is_refused(long):
    thread, caught = in_thread(long.compute)
    wait_until_running(long)
    with pytest.raises(BackendError, match="computing in another thread"):
        long.compute()
    with pytest.raises(BackendError, match="is computing"):
        long.backend.close()
    long.backend.request_abort()
    thread.join()
    assert isinstance(caught[0], Aborted)


def test_two_backends_in_two_threads_are_right(short):
    other = Machine(40)
    short.compute()
    want = short.y.get()
    results = [in_thread(lambda m=m: [m.compute() for _ in range(5)]) for m in (short, other)]
    for thread, caught in results:
        thread.join()
        assert caught == []
    assert np.array_equal(short.y.get(), want) and np.array_equal(other.y.get(), want)
    other.close()


def test_building_does_not_hand_the_interpreter_to_a_busy_thread():
    """Each of 5 000 calls letting go of the GIL would wait 5 ms for it to come back: 25 s."""
    stop = threading.Event()

    def spin():
        while not stop.is_set():
            pass

    context = ggml.Context(5100)
    g = ggml.Ops(context)
    a = context.new_tensor(types.F32, 8)
    thread = threading.Thread(target=spin)
    thread.start()
    start = time.monotonic()
    for _ in range(5000):
        g.neg(a)
    took = time.monotonic() - start
    stop.set()
    thread.join()
    assert took < 3


def test_a_forked_child_is_told_to_be_spawned():
    code = """
import os, sys
from tests.ggml.test_threads import Machine
machine = Machine(4)
machine.compute()
child = os.fork()
if child == 0:
    try:
        machine.compute()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
machine.compute()
"""
    done = run_python(code)
    assert done.returncode == 0 and done.stdout.startswith("BackendError ggml was opened before this process was forked"), done.stderr
