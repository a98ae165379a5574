"""An engine in a process of its own, driven call by call, so that one engine computes at a time while several stay loaded."""

import multiprocessing
import os
import time
import traceback

from benchmarks.engines import ENGINES, EngineConfig
from benchmarks.verbs import VERBS


def _serve(pipe, side, config):
    try:
        start = time.perf_counter()
        engine = ENGINES[side](config)
        pipe.send((None, (engine.name, time.perf_counter() - start)))
        while (request := pipe.recv()) is not None:
            verb, args = request
            pipe.send((None, VERBS[verb](engine, *args)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
        raise SystemExit(1) from None


class Worker:
    """A process that holds one engine: `side` is "ours" or "llama.cpp". `name` and `load_seconds` are known when it is ready."""

    def __init__(self, side: str, config: EngineConfig):
        context = multiprocessing.get_context("spawn")
        self.side, self.config = side, config
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_pipe, side, config), daemon=True)
        saved = dict(os.environ)
        os.environ.update(config.env)
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(saved)
        child_pipe.close()
        self.name, self.load_seconds = self._receive()

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, verb: str, *args):
        """Run one of the verbs in the process and wait for its result."""
        self._pipe.send((verb, args))
        return self._receive()

    def _receive(self):
        try:
            error, result = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"{self.side} worker ended with status {self._process.exitcode}") from None
        if error is not None:
            raise RuntimeError(f"{self.side} worker failed\n{error}")
        return result

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(timeout=30)
        self._pipe.close()

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.close()
