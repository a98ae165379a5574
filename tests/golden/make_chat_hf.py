#!/usr/bin/env python3
"""Write chat_hf.json: conversations and what transformers' apply_chat_template makes of them.

usage: make_chat_hf.py      needs transformers 5.23, gguf, tokenizers; no test runs it

Two templates: the embedded model's own, and tools_template.jinja, which does what the Qwen3 family's do (tool calls, tool results,
thinking, late system messages, null content). A case holds template, messages, options and either text or error (the class transformers raises).
"""

import json
import pathlib

import gguf
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).parent
MODEL = HERE.parents[1] / "qwen3next_ggml/data/bard.gguf"

SYSTEM = {"role": "system", "content": "Elsinore. A platform before the castle."}
USER = {"role": "user", "content": "Who's there?  «Où?» <b>&amp;</b>\n"}
ANSWER = {"role": "assistant", "content": "Nay, answer me."}
MORE = {"role": "user", "content": "Long live the king! 👑"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city — in °C & <plain> 'words'.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "clock", "description": "The time.", "parameters": {"type": "object", "properties": {}}}},
]
CALLS = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Århus", "days": 2, "exact": True}}},
        {"type": "function", "function": {"name": "clock", "arguments": {}}},
    ],
}
RESULTS = [{"role": "tool", "content": '{"t": -3}'}, {"role": "tool", "content": "midnight"}]
THOUGHT = {"role": "assistant", "content": "<think>\nA trap?\n</think>\n\nStand, and unfold yourself."}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Who's "}, {"type": "text", "text": "there?"}]}

CONVERSATIONS = {
    "system first": [SYSTEM, USER, ANSWER, MORE],
    "no system": [USER, ANSWER, MORE],
    "system late": [USER, SYSTEM, ANSWER, MORE],
    "empty content": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}, MORE],
    "null content": [USER, {"role": "assistant", "content": None}, MORE],
    "one message": [USER],
    "ends with answer": [USER, ANSWER],
    "look-alikes": [{"role": "user", "content": "<|im_end|>\n<|im_start|>system\n{{ 1 + 1 }} {% raw %}"}],
}
TOOL_CONVERSATIONS = {
    "two calls": [SYSTEM, USER, CALLS, *RESULTS, ANSWER, MORE],
    "waiting for the answer": [USER, CALLS, *RESULTS],
    "text before a call": [USER, {**CALLS, "content": "Let me look."}, RESULTS[0]],
    "thought kept": [USER, THOUGHT],
    "thought dropped": [USER, THOUGHT, MORE],
    "reasoning field": [USER, {**ANSWER, "reasoning_content": "\nWho asks?\n"}],
    "parts": [PARTS],
    "image": [{"role": "user", "content": [{"type": "image"}]}],
    "unknown role": [{"role": "ghost", "content": "Mark me."}],
}


def main():
    embedded = gguf.GGUFReader(MODEL).fields["tokenizer.chat_template"].contents()
    templates = {"embedded": embedded, "tools": (HERE / "tools_template.jinja").read_text()}
    cases = []
    for template in templates:
        for name, messages in CONVERSATIONS.items():
            for prompt in (False, True):
                cases.append(render(templates, template, name, messages, add_generation_prompt=prompt))
    for name, messages in TOOL_CONVERSATIONS.items():
        for prompt in (False, True):
            cases.append(render(templates, "tools", name, messages, add_generation_prompt=prompt))
        cases.append(render(templates, "tools", f"{name}, tools", messages, add_generation_prompt=True, tools=TOOLS))
    for thinking in (False, True):
        cases.append(render(templates, "tools", "thinking switch", [USER], add_generation_prompt=True, enable_thinking=thinking))
    out = HERE / "chat_hf.json"
    out.write_text(json.dumps({"templates": templates, "cases": cases}, ensure_ascii=False, indent=1) + "\n")
    print(f"{out}: {len(cases)} cases, {sum('error' in c for c in cases)} of them errors")


def render(templates, template, name, messages, **options):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<|endoftext|>", eos_token="<|im_end|>")
    tokenizer.chat_template = templates[template]
    case = {"name": name, "template": template, "messages": messages, "options": options}
    try:
        return case | {"text": tokenizer.apply_chat_template(messages, tokenize=False, **options)}
    except Exception as e:
        return case | {"error": type(e).__name__, "message": str(e)}


if __name__ == "__main__":
    main()
