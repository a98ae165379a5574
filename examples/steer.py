"""Steer what is written: the difference between two ways of speaking, added to what some layers put out."""

import numpy as np

import qwen3next_ggml as q

THOU = ["I love thee", "thou art a fool", "what hast thou", "I tell thee", "give me thy hand", "thou shalt not", "wilt thou", "for thy sake"]
YOU = ["I love you", "you are a fool", "what have you", "I tell you", "give me your hand", "you shall not", "will you", "for your sake"]
PROMPT = "ROMEO.\nI do beseech"
LAYERS = (3, 4, 5, 6)


def mean_outputs(session, texts):
    """Return layer → mean output [n_embd] over the tokens of the texts."""
    names, rows = {il: f"l_out-{il}" for il in LAYERS}, {il: [] for il in LAYERS}
    for text in texts:
        session.clear()
        with session.capture(*names.values()) as t:
            session.decode(session.model.tokenizer.encode(text))
        for il, name in names.items():
            rows[il].append(t[name].mean(0))
    return {il: np.mean(x, axis=0) for il, x in rows.items()}


with q.load() as model, model.session(n_ctx=512) as session:
    thou, you = mean_outputs(session, THOU), mean_outputs(session, YOU)
    vector = q.ControlVector({il: thou[il] - you[il] for il in LAYERS})
    words = {word: model.tokenizer.encode(word)[0] for word in (" thee", " you")}
    for scale in (-1.0, -0.5, 0.0, 0.5, 1.0):
        session.clear()
        with (vector * scale).on(session):
            logits = session.decode(model.tokenizer.encode(PROMPT))[0].astype(float)
            steps = q.stream_generate(model, PROMPT, n_predict=24, temp=0, session=session)
            text = "".join(step.text for step in steps)
        p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        said = ", ".join(f"{word!r} {p[token]:.2f}" for word, token in words.items())
        print(f"{scale:+.1f}  {said}  …{text!r}")
