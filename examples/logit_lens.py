"""What each layer would say next: the head applied to every layer's output (a logit lens)."""

import numpy as np

import qwen3next_ggml as q

TEXT = "ROMEO.\nO, she doth teach the torches to burn br"

with q.load() as model, model.session(n_ctx=256) as session:
    tokens = model.tokenizer.encode(TEXT)
    with session.capture("l_out-*") as t:
        logits = session.decode(tokens)[0]
    norm, head = model.weights.output_norm.get(), model.weights.output.get()  # [n_embd], [n_vocab, n_embd]
    layers = sorted(t, key=lambda name: int(name.split("-")[1]))
    print(f"after {TEXT.splitlines()[-1]!r}")
    for name in layers:
        x = t[name][-1]
        rows = head @ (norm * x / np.sqrt(np.mean(x * x) + model.hparams.f_norm_rms_eps))
        probabilities = np.exp(rows - rows.max())
        probabilities /= probabilities.sum()
        best = probabilities.argsort()[::-1][:5]
        said = "  ".join(f"{model.tokenizer.decode([i])!r} {probabilities[i]:.2f}" for i in best)
        print(f"{name:>8}  {said}")
    print(f"the last layer is the model: largest difference {np.abs(rows - logits).max() / np.abs(logits).max():.0e}")
