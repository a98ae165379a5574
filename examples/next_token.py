"""What the model expects next: logits of every position of a text, no sampler in between."""

import numpy as np

import qwen3next_ggml as q

TEXT = "Now is the winter of our"

with q.load() as model, model.session(n_ctx=256) as session:
    tokens = model.tokenizer.encode(TEXT)
    logits = session.decode(tokens, logits="all")  # [n_tokens, n_vocab]
    probabilities = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    for token, row in zip(tokens, probabilities):
        best = row.argsort()[::-1][:3]
        expected = ", ".join(f"{model.tokenizer.decode([i])!r} {row[i]:.2f}" for i in best)
        print(f"{model.tokenizer.decode([token])!r:>12}  then {expected}")
