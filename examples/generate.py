"""Continue a prompt with the embedded model, or with the file given as first argument."""

import sys

import qwen3next_ggml as q

with q.load(*sys.argv[1:2]) as model:
    for step in q.stream_generate(model, "To be, or not to be", n_predict=48, temp=0.8, seed=1):
        print(step.text, end="", flush=True)
    print(f"\n{step.timings.predicted_per_second:.0f} tokens per second, ended by {step.finish_reason}")
