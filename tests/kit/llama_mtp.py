"""llama.cpp's NextN block in a child process: tokens with their hidden in, logits and graph nodes out."""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.kit.llama_api import Llama, LlamaOptions, Node, Recorder
from tests.kit.process import ROOT


def run_llama_mtp(path, tokens, hidden, first, *, timeout=120):
    """Run tokens [n], each with the final-norm hidden [n, n_embd] before it, from position `first` on → logits of the last [n_vocab], nodes."""
    with tempfile.TemporaryDirectory(prefix="llama-mtp-") as folder:
        job, out = Path(folder, "job.npz"), Path(folder, "out.npz")
        np.savez(job, tokens=np.asarray(tokens, np.int32), hidden=np.asarray(hidden, np.float32), first=first)
        command = [sys.executable, "-m", "tests.kit.llama_mtp", str(path), str(job), str(out)]
        done = subprocess.run(command, cwd=ROOT, env=os.environ, timeout=timeout, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        with np.load(out) as arrays:
            heads = json.loads(bytes(arrays["heads"]))
            nodes = [Node(**head, array=arrays[f"node{i}"]) for i, head in enumerate(heads)]
            return arrays["logits"], nodes


def _run(llama, tokens, hidden, first):
    api, n_embd = llama.api, hidden.shape[1]
    batch = api.llama_batch_ext_init(llama.context)
    for i, (token, row) in enumerate(zip(tokens.tolist(), hidden)):
        at = api.llama_batch_ext_add_token(batch, 0, token)
        assert at == i, at
        data = row.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        assert api.llama_batch_ext_set_embd_token(batch, at, api.llama_embd(data, 1, n_embd))
        assert api.llama_batch_ext_set_pos(batch, at, ctypes.byref(ctypes.c_int32(first + i)))
        assert api.llama_batch_ext_set_output_logits(batch, at, i + 1 == len(tokens))
    status = api.llama_process(llama.context, 1, batch)
    assert status == 0, f"llama_process returned {status}"
    api.llama_synchronize(llama.context)
    logits = np.ctypeslib.as_array(api.llama_get_logits(llama.context), (llama.n_vocab,)).copy()
    api.llama_batch_ext_free(batch)
    return logits


def main(path, job, out):
    recorder = Recorder(("*",))
    llama = Llama(path, LlamaOptions(mtp=True), recorder=recorder)
    with np.load(job) as given:
        logits = _run(llama, given["tokens"], given["hidden"], int(given["first"]))
    llama.close()
    heads = [{name: value for name, value in vars(node).items() if name != "array"} for node in recorder.nodes]
    arrays = {f"node{i}": node.array for i, node in enumerate(recorder.nodes)}
    np.savez(out, logits=logits, heads=np.frombuffer(json.dumps(heads).encode(), np.uint8), **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
