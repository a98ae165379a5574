"""`qgraph chat`: what the model reads each turn, what is evaluated, and the commands of a conversation."""

import json

import pytest

import qwen3next_ggml
from qwen3next_ggml.session import Session

OPTIONS = ("-n", 12, "-s", 1)


@pytest.fixture(scope="module")
def model(bard):
    with qwen3next_ggml.load(bard, n_threads=1) as model:
        yield model


@pytest.fixture
def evaluated(monkeypatch):
    """How many tokens each prompt brought, and how many of them were run."""
    calls, prompt = [], Session.prompt

    def watched(self, tokens, **options):
        logits = prompt(self, tokens, **options)
        calls.append((len(tokens), self.last_evaluated))
        return logits

    monkeypatch.setattr(Session, "prompt", watched)
    return calls


def last_line(result):
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_lines_are_turns(qgraph, model):
    """Answers go to stdout; each is what the whole conversation, rendered anew, gives."""
    document = last_line(qgraph("chat", *OPTIONS, "--json", stdin="Who is there?\n\nSpeak!\n"))
    messages = document["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2
    assert [m["content"] for m in messages[::2]] == ["Who is there?", "Speak!"]
    for n in (1, 3):
        prompt = model.chat_template.render(messages[:n])
        steps = qwen3next_ggml.stream_generate(model, prompt, parse_special=True, n_predict=12, seed=1)
        assert messages[n]["content"] == "".join(step.text for step in steps)
    plain = qgraph("chat", *OPTIONS, stdin="Who is there?\n\nSpeak!\n")
    assert plain.stdout == "".join(m["content"].removesuffix("\n") + "\n" for m in messages[1::2])


def test_the_second_turn_reads_its_new_tokens_only(qgraph, model, evaluated):
    document = last_line(qgraph("chat", *OPTIONS, "--json", stdin="Who is there?\nSpeak!\nAgain?\n"))
    assert len(evaluated) == 3
    for (n_before, _), (n_tokens, n_run), answer in zip(evaluated, evaluated[1:], document["answers"]):
        # all but the last token of the answer had been run
        assert n_run == n_tokens - (n_before + len(answer["tokens"]) - 1) < 20
    whole = model.tokenizer.encode(model.chat_template.render(document["messages"][:5]), parse_special=True)
    assert evaluated[-1][0] == pytest.approx(len(whole), abs=2)


def test_a_template_that_rewrites_the_past_is_honoured(qgraph, tmp_path, evaluated):
    """Here only the last message is shown, so nothing of the first turn may be kept."""
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages | length }} {{ messages[-1].content }}")
    qgraph("chat", *OPTIONS, "--chat-template-file", path, stdin="Who is there?\nWho is there?\n")
    (n_first, _), (n_tokens, n_run) = evaluated
    assert n_run == n_tokens == n_first


def test_commands(qgraph):
    result = qgraph("chat", *OPTIONS, stdin="Who is there?\n/stats\n/clear\n/stats\n/what\n/exit\nnever said\n")
    assert result.exit_code == 0 and len(result.stdout.splitlines()) <= 3
    before, speed, after, _, unknown = result.stderr.splitlines()
    assert before.startswith("2 messages, ") and " of 4096 tokens of context" in before
    assert speed.startswith("last answer: ") and " generated at " in speed
    assert after.startswith("0 messages, 0 of 4096 tokens")
    assert unknown.startswith("no command /what; /clear ")


def test_a_cleared_conversation_starts_over(qgraph, evaluated):
    document = last_line(qgraph("chat", *OPTIONS, "--json", "-sys", "Elsinore", stdin="Who?\n/clear\nWho?\n"))
    assert evaluated[0] == evaluated[1] and evaluated[0][0] == evaluated[0][1]
    assert [m["role"] for m in document["messages"]] == ["system", "user", "assistant"]
    assert document["answers"][0]["text"] == document["answers"][1]["text"]


def test_first_message_and_single_turn(qgraph, model):
    result = qgraph("chat", *OPTIONS, "-p", "Who is there?", "-st", "--show-prompt", stdin="not read\n")
    assert result.stderr == model.chat_template.render([{"role": "user", "content": "Who is there?"}]) + "\n"
    both = last_line(qgraph("chat", *OPTIONS, "-p", "Who is there?", "--json", stdin="Speak!\n"))
    assert [m["content"] for m in both["messages"][::2]] == ["Who is there?", "Speak!"]


def test_nothing_said(qgraph):
    result = qgraph("chat", stdin="")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_a_conversation_that_no_longer_fits(qgraph):
    result = qgraph("chat", "-c", 256, "-n", 4, stdin="Hail!\n" + "word " * 300 + "\n")
    assert result.exit_code == 1 and len(result.stdout.splitlines()) == 1
    assert result.stderr.startswith("error: the prompt has ") and result.stderr.endswith("the context holds 256\n")


def test_no_template(qgraph, toys):
    result = qgraph("chat", toys.t0, stdin="hi\n")
    assert (result.exit_code, result.stdout) == (1, "") and "give one with --chat-template-file" in result.stderr
