"""Take tokens back: one text, three endings, and a session that goes on after the process that made it."""

import tempfile
from pathlib import Path

import qwen3next_ggml as q

PROMPT, N = "HAMLET.\nTo be, or not to be", 12


def greedy(model, session, logits, n, first=0):
    """Decode n tokens from these logits [1, n_vocab], beginning with the `first`-best → their text."""
    tokens = []
    for i in range(n):
        tokens.append(int(logits[-1].argsort()[-1 - (first if i == 0 else 0)]))
        logits = session.decode(tokens[-1:])
    return model.tokenizer.decode(tokens)


with q.load() as model, tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "hamlet.qstate"
    with model.session(n_ctx=256, n_rollback=N) as session:
        logits = session.decode(model.tokenizer.encode(PROMPT))
        session.save(path)
        endings = []
        for first in range(3):
            endings.append(greedy(model, session, logits, N, first))
            session.rewind(n=N)  # an index moves: nothing is computed, nothing is copied
        for ending in endings:
            print(f"{PROMPT}|{ending!r}")

    with model.load_session(path) as session:
        logits = session.prompt(model.tokenizer.encode(PROMPT))
        print(f"loaded {session.n_past()} tokens, evaluated {session.last_evaluated}")
        print("the same ending:", greedy(model, session, logits, N) == endings[0])
