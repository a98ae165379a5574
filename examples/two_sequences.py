"""Two texts in one session: each sequence has its own place in the cache and its own recurrent state."""

import qwen3next_ggml as q

PROMPTS = ("ROMEO.\n", "The king is")

with q.load() as model, model.session(n_ctx=512, n_seq_max=2) as session:
    batch = {seq: model.tokenizer.encode(prompt) for seq, prompt in enumerate(PROMPTS)}
    texts = dict(enumerate(PROMPTS))
    for _ in range(24):
        logits = session.decode_batch(batch)  # sequence → [1, n_vocab]
        batch = {seq: [int(rows[-1].argmax())] for seq, rows in logits.items()}
        for seq, tokens in batch.items():
            texts[seq] += model.tokenizer.decode(tokens)
    for seq, text in texts.items():
        print(f"--- sequence {seq}, {session.n_past(seq)} tokens\n{text}")
    print(f"--- {session.n_builds} graphs built for {24} steps")
