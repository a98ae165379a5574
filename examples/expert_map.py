"""Which experts a text is routed to, layer by layer, as a heat map in a PNG file."""

import struct
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np

import qwen3next_ggml as q

TEXT = "HAMLET.\nTo be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\nThe slings and arrows of outrageous fortune,"
CELL = 24


def write_png(path, image):
    """Write uint8 pixels [height, width, 3]."""
    height, width, _ = image.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)  # no filter

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows.tobytes())) + chunk(b"IEND", b""))


def heat(share):
    """Return colours from black over red and yellow to white for values 0 to 1."""
    return (255 * np.clip(3 * share[..., None] - np.arange(3), 0, 1)).astype(np.uint8)


path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir(), "expert_map.png")
with q.load() as model, model.session(n_ctx=256) as session, session.capture("ffn_moe_topk-*") as t:
    session.decode(model.tokenizer.encode(TEXT), logits="none")
    n_layer, n_expert = model.hparams.n_layer, model.hparams.n_expert
    # [n_layer, n_expert]: how many tokens went to each expert
    counts = np.stack([np.bincount(t[f"ffn_moe_topk-{il}"].ravel().astype(int), minlength=n_expert) for il in range(n_layer)])
write_png(path, np.kron(heat(counts / counts.max()), np.ones((CELL, CELL, 1), np.uint8)))
for il, row in enumerate(counts):
    print(f"layer {il}  " + " ".join(f"{n:3}" for n in row))
print(f"{counts.sum()} picks, the busiest expert has {counts.max()}; wrote {path}")
