"""Drafts of the NextN head, checked in one batch: the same greedy text from fewer runs of the trunk."""

import sys

import qwen3next_ggml as q

PROMPT = "ROMEO.\n"

with q.load(*sys.argv[1:2]) as model:
    plain = list(q.stream_generate(model, PROMPT, n_predict=200, temp=0, ignore_eos=True))
    for n in (1, 2, 3, "auto"):
        steps = list(
            q.stream_generate(
                model, PROMPT, n_predict=200, temp=0, ignore_eos=True, spec_type="draft-mtp", spec_draft_n_max=n
            )
        )
        same = [s.token for s in steps] == [s.token for s in plain]
        d, rate = steps[-1].drafts, steps[-1].timings.predicted_per_second
        print(
            f"up to {n} drafted: {d.draft_n_accepted} of {d.draft_n} accepted, {d.n_rounds + d.n_plain} runs for 200 tokens, "
            f"{rate / plain[-1].timings.predicted_per_second:.2f} times the plain speed, {'same text' if same else 'other text'}"
        )
