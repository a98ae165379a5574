"""Chat prompts, byte for byte those of transformers (stored in golden/chat_hf.json), and what a broken template says."""

import json

import pytest

from qwen3next_ggml.chat import ChatTemplate
from qwen3next_ggml.errors import GgufError, OptionError

from .kit import read_metadata
from .kit.process import ROOT

GOLDEN = json.loads((ROOT / "tests" / "golden" / "chat_hf.json").read_text(encoding="utf-8"))
SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def metadata(bard):
    return read_metadata(bard)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{case['template']}, {case['name']}")
def test_prompt_equals_transformers(case):
    template = ChatTemplate(GOLDEN["templates"][case["template"]], special_tokens=SPECIAL)
    if "error" in case:
        with pytest.raises(OptionError, match=r"chat template: .+ \(line \d+: "):
            template.render(case["messages"], **case["options"])
    else:
        assert template.render(case["messages"], **case["options"]) == case["text"]


def test_embedded_template_is_the_files(metadata):
    template = ChatTemplate.from_metadata(metadata)
    assert template.source == GOLDEN["templates"]["embedded"]
    assert template.render([USER]) == "<|im_start|>Horatio\nhi<|im_end|>\n<|im_start|>Hamlet\n"
    assert template.render([USER], add_generation_prompt=False) == "<|im_start|>Horatio\nhi<|im_end|>\n"


def test_no_template_asks_for_one(metadata):
    without = {key: value for key, value in metadata.items() if key != "tokenizer.chat_template"}
    with pytest.raises(OptionError, match="the file has no tokenizer.chat_template: name a template of your own"):
        ChatTemplate.from_metadata(without)
    assert ChatTemplate.from_metadata(without, source="{{ messages[0].content }}{{ eos_token }}").render([USER]) == "hi<|im_end|>"


def test_tools_choose_the_tool_template(metadata):
    both = metadata | {"tokenizer.chat_template.tool_use": "tools: {{ tools | tojson }}"}
    template = ChatTemplate.from_metadata(both)
    assert template.render([USER], tools=[{"name": "f"}]) == 'tools: [{"name": "f"}]'
    assert template.render([USER]).startswith("<|im_start|>Horatio")
    assert ChatTemplate.from_metadata(both, source="mine").render([USER], tools=[{"name": "f"}]) == "mine"


@pytest.mark.parametrize("source, expected", [
    ("{{ {'b': '<é>', 'a': [1, none, true]} | tojson }}", '{"b": "<é>", "a": [1, null, true]}'),
    ("{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}", '{\n  "a": 2,\n  "b": 1\n}'),
    ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
    ("{% for x in range(5) %}{% if x == 1 %}{% continue %}{% endif %}{% if x == 3 %}{% break %}{% endif %}{{ x }}{% endfor %}",
     "02"),
    ("  {% if true %}\nkept\n  {% endif %}\nend", "kept\nend"),
    ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
    ("{{ strftime_now('%%') }}{{ bos_token }}{{ eos_token }}", "%<|endoftext|><|im_end|>"),
    ("{% set ns = namespace(n=1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
    ("{{ tools is none }} {{ documents is none }} {{ unk_token is defined }}", "True True False"),
])
def test_language_is_that_of_transformers(metadata, source, expected):
    assert ChatTemplate.from_metadata(metadata, source=source).render([USER]) == expected


def test_null_content_is_no_content():
    template = ChatTemplate("{% for m in messages %}{{ m.content | default('-') }}{{ m.tool_calls is defined }}{% endfor %}")
    assert template.render([{"content": None, "tool_calls": []}, {"content": "", "tool_calls": None}]) == "-TrueFalse"


@pytest.mark.parametrize("source, message", [
    ("one\n{{ messages[0].none_such.x }}", "has no attribute 'none_such' .line 2: {{ messages"),
    ("one\ntwo\n{{ raise_exception('system must\ncome first') }}", "system must come first .line 3: "),
    ("one\n{% if %}", "Expected an expression.* .line 2: {% if %}"),
    ("{% for m in messages %}\n{{ 'x' + 1 }}\n{% endfor %}", "TypeError: .*int.* .line 2: {{ 'x'"),
    ("{{ ''.__class__.__mro__ }}", "'__class__' of 'str' object is unsafe"),
    ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
    ("{% set ns = namespace() %}{% set ns._x = 1 %}", "'_x' begins with an underscore"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ("{{ unknown_filter | frobnicate }}", "No filter named 'frobnicate'"),
])
def test_template_error_names_the_line_and_is_one_sentence(source, message):
    with pytest.raises(OptionError, match=message) as caught:
        ChatTemplate(source).render([USER])
    assert "\n" not in str(caught.value) and str(caught.value).startswith("chat template: ")


def test_template_sees_plain_data_only():
    class Secret:
        def __str__(self):
            return "leak"

    class Loud(str):
        def shout(self):
            return "leak"

    template = ChatTemplate("{{ messages[0].content }} {{ messages[0].text }} {{ messages[0].text.shout is defined }}")
    assert template.render([{"content": Secret(), "text": Loud("soft")}]) == "<Secret> soft False"
    messages = [{"content": ["a", {"b": (1, 2)}]}]
    assert ChatTemplate("{{ messages[0].content | tojson }}").render(messages) == '["a", {"b": [1, 2]}]'


def test_special_tokens_come_from_the_vocabulary(metadata):
    bad = metadata | {"tokenizer.ggml.eos_token_id": 9999}
    with pytest.raises(GgufError, match="eos_token_id is 9999, the vocabulary has 2048 tokens"):
        ChatTemplate.from_metadata(bad, source="{{ eos_token }}")
    # a template that names no special token does not need the vocabulary
    assert ChatTemplate.from_metadata({"tokenizer.chat_template": "x", "tokenizer.ggml.eos_token_id": 1}).render([]) == "x"
