"""llama.cpp in a child process: a job in, logits, graph nodes, greedy tokens and token ids out.

One file, two processes: the parent calls `run_llama`, the child runs this module as a program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from tests.kit.llama_api import Llama, LlamaOptions, Node, Recorder

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class LlamaJob:
    """What the child does, in the order of the fields.

    texts: strings to tokenize.
    steps: batches of (token, position, sequence, logits wanted), one `llama_decode` each.
    capture: glob patterns of node names recorded during the steps; ("*",) records every node.
    greedy_prompt, n_greedy: cleared memory, then the prompt on sequence 0, then n tokens by argmax.
    """
    model: str
    texts: tuple[str, ...] = ()
    add_special: bool = True
    parse_special: bool = False
    steps: tuple[tuple[tuple[int, int, int, bool], ...], ...] = ()
    capture: tuple[str, ...] = ()
    greedy_prompt: tuple[int, ...] = ()
    n_greedy: int = 0
    options: LlamaOptions = field(default_factory=LlamaOptions)


@dataclass(frozen=True)
class LlamaResult:
    """ids: one list per text. logits: one [n_wanted, n_vocab] per step. greedy_gaps: top-1 minus top-2 at each greedy token."""
    ids: list[list[int]]
    logits: list[np.ndarray]
    nodes: list[Node]
    greedy: list[int]
    greedy_gaps: np.ndarray


class LlamaChildError(RuntimeError):
    """The child failed or timed out; the message ends with its last lines on stderr."""


def run_llama(job: LlamaJob, *, timeout: float = 120, env: dict[str, str] | None = None) -> LlamaResult:
    """Run one job in a child process and return what it wrote; quantised caches are not rotated. Raises LlamaChildError."""
    with tempfile.TemporaryDirectory(prefix="llama-child-") as folder:
        job_path, out_path = Path(folder, "job.json"), Path(folder, "out.npz")
        job_path.write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [sys.executable, "-m", "tests.kit.llama_child", str(job_path), str(out_path)]
        env = {**os.environ, "LLAMA_ATTN_ROT_DISABLE": "1", **(env or {})}
        try:
            done = subprocess.run(command, cwd=ROOT, env=env, timeout=timeout,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        except subprocess.TimeoutExpired as error:
            raise LlamaChildError(f"llama.cpp child got {timeout} s and did not finish\n{_tail(error.stderr)}") from None
        if done.returncode != 0:
            raise LlamaChildError(f"llama.cpp child ended with status {done.returncode}, expected 0\n{_tail(done.stderr)}")
        return _read_result(out_path)


def _tail(stderr: bytes | None, n_lines: int = 25) -> str:
    return "\n".join((stderr or b"").decode("utf-8", "replace").splitlines()[-n_lines:])


def _read_result(path: Path) -> LlamaResult:
    with np.load(path) as arrays:
        index = json.loads(bytes(arrays["index"]))
        nodes = [Node(*head[:5], tuple(head[5]), arrays[f"node{i}"]) for i, head in enumerate(index["nodes"])]
        logits = [arrays[f"logits{i}"] for i in range(index["n_steps"])]
        return LlamaResult(index["ids"], logits, nodes, index["greedy"], arrays["greedy_gaps"])


def _write_result(path: str, result: LlamaResult) -> None:
    heads = [(n.name, n.occurrence, n.step, n.ubatch, n.op, n.ne) for n in result.nodes]
    index = json.dumps({"ids": result.ids, "n_steps": len(result.logits), "nodes": heads, "greedy": result.greedy})
    arrays = {f"node{i}": node.array for i, node in enumerate(result.nodes)}
    arrays |= {f"logits{i}": rows for i, rows in enumerate(result.logits)}
    np.savez(path, index=np.frombuffer(index.encode(), np.uint8), greedy_gaps=result.greedy_gaps, **arrays)


def _run_job(job: LlamaJob) -> LlamaResult:
    recorder = Recorder(job.capture) if job.capture else None
    llama = Llama(job.model, job.options, recorder=recorder, vocab_only=not job.steps and not job.n_greedy)
    ids = [llama.tokenize(text, add_special=job.add_special, parse_special=job.parse_special) for text in job.texts]
    logits = []
    for i_step, step in enumerate(job.steps):
        if recorder is not None:
            recorder.start_step(i_step)
        logits.append(llama.decode(step))
    nodes = list(recorder.nodes) if recorder is not None else []
    greedy, gaps = _generate_greedy(llama, job.greedy_prompt, job.n_greedy) if job.n_greedy else ([], [])
    llama.close()
    return LlamaResult(ids, logits, nodes, greedy, np.array(gaps, np.float32))


def _generate_greedy(llama: Llama, prompt, n_tokens: int) -> tuple[list[int], list[float]]:
    llama.clear()
    tokens, gaps = [], []
    rows = llama.decode([(token, i, 0, i == len(prompt) - 1) for i, token in enumerate(prompt)])
    for i in range(n_tokens):
        second, first = np.sort(rows[-1])[-2:]
        tokens.append(int(rows[-1].argmax()))
        gaps.append(float(first - second))
        if i + 1 < n_tokens:
            rows = llama.decode([(tokens[-1], len(prompt) + i, 0, True)])
    return tokens, gaps


def main(job_path: str, out_path: str) -> None:
    fields = json.loads(Path(job_path).read_text(encoding="utf-8"))
    options = LlamaOptions(**fields.pop("options"))
    _write_result(out_path, _run_job(LlamaJob(**fields, options=options)))


if __name__ == "__main__":
    main(*sys.argv[1:])
