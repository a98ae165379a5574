"""What a worker can be asked to do with its engine: give logits, take time, tell what it uses.

Each verb is a function of an engine and plain values; what it returns can be pickled.
"""

import os
from pathlib import Path

import numpy as np


def forced_logits(engine, prompt, continuation):
    """Logits [1 + n, n_vocab] after a prompt and after each of n given tokens."""
    engine.clear()
    return np.stack([engine.decode(prompt)[0].copy()] + [engine.decode([token])[0].copy() for token in continuation])


def forced_on(engine, tokens):
    """Logits [n, n_vocab] after each of n given tokens on top of what the context holds."""
    return np.stack([engine.decode([token])[0].copy() for token in tokens])


def forced_batch(engine, prompts, steps):
    """Logits [n_seq * (1 + n), n_vocab] of all sequences after their prompts and after each step of one token for each."""
    engine.clear()
    return np.concatenate([engine.decode_batch(tokens)[0].copy() for tokens in (prompts, *steps)])


def time_prompt(engine, tokens):
    """Seconds for a prompt from an empty context."""
    engine.clear()
    return engine.decode(tokens)[1]


def time_decode(engine, tokens, depth_tokens):
    """Seconds for single-token steps, after `depth_tokens` that are not timed."""
    engine.clear()
    if depth_tokens:
        engine.decode(depth_tokens)
    return time_on(engine, tokens)


def time_on(engine, tokens):
    """Seconds for single-token steps on top of what the context holds."""
    return sum(engine.decode([token])[1] for token in tokens)


def time_batch(engine, prompts, steps):
    """Seconds for steps that give every sequence one token, after prompts that are not timed."""
    engine.clear()
    engine.decode_batch(prompts)
    return sum(engine.decode_batch(tokens)[1] for tokens in steps)


def fill(engine, tokens, path):
    """Bring the context to `tokens`: from the file at `path` where there is one, else by decoding, which is then saved there."""
    engine.clear()
    if path and Path(path).exists():
        engine.restore(path, len(tokens))
        return
    engine.decode(tokens)
    if path:
        part = f"{path}.part"
        engine.save(part)
        os.replace(part, path)


def n_vocab(engine):
    return engine.n_vocab


def memory(_engine):
    """MiB of this process: the most it held, what it holds, and how much of that lies in huge pages."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    rollup = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    huge = sum(_kib(rollup.get(name, "0 kB")) for name in ("AnonHugePages", "FilePmdMapped"))
    return {"peak_mib": _kib(status["VmHWM"]) / 1024, "resident_mib": _kib(status["VmRSS"]) / 1024, "huge_mib": huge / 1024}


def _kib(text: str) -> int:
    return int(text.split()[0])


def step_cost(engine):
    """Bytes the graph of one more token reads and writes, its nodes, and how often threads wait in it; ours alone."""
    nodes = engine.session.graph(1).nodes
    return {
        "nbytes": sum(node.bytes_read + node.bytes_written for node in nodes), "n_nodes": len(nodes),
        "n_barriers": sum(node.barriers for node in nodes),
    }  # fmt: skip


def read_bandwidth(engine):
    """Bytes per second that all threads together read from memory; ours alone."""
    from qwen3next_ggml.profile import read_bandwidth

    return read_bandwidth(engine.session.graphs.executor.backend)


VERBS = {
    verb.__name__: verb
    for verb in (forced_logits, forced_on, forced_batch, time_prompt, time_decode, time_on, time_batch, fill, n_vocab, memory, step_cost,
                 read_bandwidth)
}  # fmt: skip
