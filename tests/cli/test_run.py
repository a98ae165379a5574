"""`qgraph run` against the Python interface: the same prompt, options and text; what goes where."""

import json

import pytest

import qwen3next_ggml
from tests.kit.gguf_bytes import edit_gguf

GREEDY = ("-n", 12, "--temp", 0)


@pytest.fixture(scope="module")
def model(bard):
    with qwen3next_ggml.load(bard, n_threads=1) as model:
        yield model


def text_of(model, prompt, **settings):
    return "".join(step.text for step in qwen3next_ggml.stream_generate(model, prompt, parse_special=True, **settings))


def last_line(result):
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_prompt_and_continuation_on_stdout(qgraph, model):
    expected = text_of(model, "To be, or not to be", n_predict=12, temp=0)
    result = qgraph("run", "-p", "To be, or not to be", *GREEDY)
    assert (result.exit_code, result.stdout) == (0, f"To be, or not to be{expected}\n")
    assert qgraph("run", "-p", "To be, or not to be", *GREEDY, "--no-display-prompt").stdout == f"{expected}\n"


def test_speeds_and_seed_on_stderr(qgraph):
    ended, prompt, predicted, total = qgraph("run", "-p", "To be", "-n", 3, "-s", 7).stderr.strip().splitlines()
    assert ended == "stopped: as many tokens as wanted, seed: 7"
    assert prompt.startswith("prompt eval time = ") and " ms /     2 tokens (" in prompt and prompt.endswith(" tokens per second)")
    assert predicted.startswith("       eval time = ") and " ms /     3 tokens (" in predicted
    assert total.startswith("      total time = ") and total.endswith(" ms /     5 tokens")


def test_one_seed_gives_one_text(qgraph, model):
    runs = [last_line(qgraph("run", "-p", "The king", "-n", 8, "-s", seed, "--json")) for seed in (5, 5, 6)]
    assert runs[0]["text"] == runs[1]["text"] == text_of(model, "The king", n_predict=8, seed=5) != runs[2]["text"]
    drawn = [last_line(qgraph("run", "-p", "The king", "-n", 8, "--json")) for _ in range(2)]
    assert drawn[0]["seed"] != drawn[1]["seed"]
    again = last_line(qgraph("run", "-p", "The king", "-n", 8, "-s", drawn[0]["seed"], "--json"))
    assert again["text"] == drawn[0]["text"]


def test_json_is_the_last_line(qgraph):
    result = qgraph("run", "-p", "To be", *GREEDY, "--json")
    document = last_line(result)
    assert result.stdout.splitlines()[:-1] == ("To be" + document["text"]).splitlines()
    assert document["prompt"] == "To be" and len(document["tokens"]) == 12
    assert document["finish_reason"] == "length" and document["timings"]["prompt_n"] == 2


def test_where_a_prompt_comes_from(qgraph, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("HAMLET.\nTo be\n")
    quoted = tmp_path / "code.c"
    quoted.write_text(r'puts("a\n");')

    def prompt(*args, stdin=""):
        return last_line(qgraph("run", "-n", 1, "--json", *args, stdin=stdin))["prompt"]

    assert prompt() == "ROMEO.\n"
    assert prompt("-p", r"a\tb\n\\n\"\q") == 'a\tb\n\\n"\\q'
    assert prompt("-p", r"\xc3\xa9\\x41\xzz") == r"é\x41\xzz"
    assert prompt("-p", r"a\nb", "--no-escape") == r"a\nb"
    assert prompt("-f", path) == "HAMLET.\nTo be"
    assert prompt("-f", quoted) == r'puts("a\n");'
    assert prompt("-p", "first", "-f", path) == "first\nHAMLET.\nTo be"
    assert prompt(stdin="piped\n") == "piped\n"
    assert prompt("-p", "first", "-f", "-", stdin="piped") == "first\npiped"
    # a prompt that was given is not waited for
    assert prompt("-p", "first", stdin="not read") == "first"


def test_a_file_of_ones_own_needs_a_prompt(qgraph, toys):
    result = qgraph("run", toys.t0)
    assert result.exit_code == 2 and "no prompt: give one with -p, -f or on standard input" in result.stderr
    assert qgraph("run", toys.t0, "-p", "hi", "-n", 16).exit_code == 0


def test_reverse_prompts_end_the_text(qgraph, model):
    text = text_of(model, "ROMEO.\n", n_predict=40, temp=0)
    word = text.split()[4]
    result = qgraph("run", "-n", 40, "--temp", 0, "-r", "never there", "-r", word, "--no-display-prompt", "--json")
    document = last_line(result)
    assert document["text"] == text[: text.index(word)] and document["finish_reason"] == "stop"
    assert "stopped: reverse prompt" in result.stderr
    assert "\n" not in last_line(qgraph("run", "-n", 40, "--temp", 0, "-r", r"\n", "--json"))["text"]


def test_a_full_context_ends_the_text(qgraph):
    result = qgraph("run", "-p", "To be", "-c", 256, "--ignore-eos", "--json")
    document = last_line(result)
    assert len(document["tokens"]) == 255
    assert "stopped: the context is full" in result.stderr


def test_special_tokens_in_and_out(qgraph, model):
    turn = r"<|im_start|>Horatio\nHail to your lordship!<|im_end|>\n<|im_start|>Hamlet\n"

    def n_read(*args):
        return last_line(qgraph("run", "-p", turn, "-n", 1, "--json", *args))["timings"]["prompt_n"]

    text = turn.replace(r"\n", "\n")
    assert n_read() == len(model.tokenizer.encode(text, parse_special=True))
    assert n_read("--no-parse-special") == len(model.tokenizer.encode(text)) > n_read()
    end = ("run", "-p", turn, "-n", 1, "--logit-bias", f"{model.tokenizer.eot}+1000", "--no-display-prompt")
    assert qgraph(*end).stdout == ""
    shown = qgraph(*end, "--special")
    assert shown.stdout == "<|im_end|>\n" and "stopped: end of text" in shown.stderr
    assert last_line(qgraph(*end, "--ignore-eos", "--json"))["finish_reason"] == "length"


def test_one_turn_of_a_chat(qgraph, model):
    says = {"role": "user", "content": "Hail to your lordship!"}
    system = {"role": "system", "content": "Elsinore"}
    for flags, messages in ((("-cnv",), [says]), (("-st",), [says]), (("-sys", "Elsinore"), [system, says])):
        result = qgraph("run", "-p", says["content"], *flags, "--show-prompt", "-s", 3, "--json")
        document = last_line(result)
        assert document["prompt"] == model.chat_template.render(messages)
        assert result.stderr.startswith(document["prompt"])
        assert document["text"] == text_of(model, document["prompt"], seed=3)
        assert result.stdout.splitlines()[:-1] == document["text"].splitlines()
    assert last_line(qgraph("run", "-p", "hi", "-sys", "x", "--raw", "-n", 1, "--json"))["prompt"] == "hi"


def test_templates_of_ones_own(qgraph, toys, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages[-1].content }}{% if loud %}!{% endif %}")

    def run(*args):
        return qgraph("run", toys.t0, "-p", "hi", "-n", 1, "--json", "-cnv", *args)

    result = run()
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr == f"error: {toys.t0} has no chat template: give one with --chat-template-file\n"
    assert qgraph("run", toys.t0, "-p", "hi", "-n", 1, "--raw").exit_code == 0
    assert last_line(run("--chat-template-file", path))["prompt"] == "hi"
    assert last_line(run("--chat-template-file", path, "--chat-template-kwargs", '{"loud": true}'))["prompt"] == "hi!"
    assert last_line(run("--chat-template", "h{{ 1 + 1 }}"))["prompt"] == "h2"
    broken = run("--chat-template", "line one\n{{ messages[0].content + 1 }}")
    assert broken.exit_code == 1 and broken.stderr.count("\n") == 1
    assert broken.stderr.startswith("error: chat template: TypeError") and "line 2: {{ messages[0].content + 1 }}" in broken.stderr


def test_verbose_says_what_runs_where(qgraph, toys):
    result = qgraph("run", toys.legacy, "-p", "hi", "-n", 1, "-v", "-c", 300)
    provider = qwen3next_ggml.ggml.provider()
    assert f"{toys.legacy}: qwen3next, 4 layers, " in result.stderr
    assert f"CPU by ggml {provider.version} from {provider.name}, context of 512 tokens" in result.stderr
    assert "note: blk.0.ssm_in.weight split into attn_qkv and attn_gate" in result.stderr


def test_logits_that_are_no_numbers_are_an_error(qgraph, toys, tmp_path):
    """C59: never token 0 and success."""
    path = tmp_path / "nan.gguf"
    edit_gguf(toys.t0, path, replace={"output_norm.weight": ("f32", [float("nan")] * 64)})
    result = qgraph("run", path, "-p", "hi", "-n", 4)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ") and "not finite" in result.stderr and result.stderr.count("\n") == 1
