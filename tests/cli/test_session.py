"""`qgraph run --session` and `qgraph session inspect`: a text goes on tomorrow as if it had never stopped."""

import json
import signal
import time

import pytest

from qwen3next_ggml.session_file import open_session_file

from .test_process import start, wait_for

OPENING = "ROMEO.\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "play.qstate"


@pytest.fixture
def run(qgraph):
    """Run `qgraph run` and return the document of --json."""

    def run(*args, **how):
        result = qgraph("run", "--no-display-prompt", "--json", *args, **how)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1])

    return run


SETTINGS = [
    ("--temp", 0),
    ("-s", 5),
    ("-s", 6, "--repeat-penalty", 1.3, "--repeat-last-n", 200, "--xtc-probability", 0.4),
    ("-s", 7, "-fa", "off", "-ctk", "f32", "-ctv", "f32"),
    ("--temp", 0, "--spec-type", "draft-mtp", "--spec-draft-n-max", 2),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: " ".join(map(str, s)))
def test_in_three_parts_as_in_one(run, path, settings):
    """Settings of the session are kept, those of sampling are given again; draws go on where they were."""
    whole = run("-p", OPENING, "-n", 36, "--ignore-eos", *settings)
    again = [x for x in settings if x not in ("-s", 5, 6, 7)]
    first = run("-p", OPENING, "-n", 12, "--ignore-eos", "--session", path, *settings)
    rest = [run("-n", 12, "--ignore-eos", "--session", path, *again) for _ in range(2)]
    assert [token for part in (first, *rest) for token in part["tokens"]] == whole["tokens"]
    assert first["text"] + "".join(part["text"] for part in rest) == whole["text"]
    assert [part["timings"]["prompt_n"] for part in rest] == [0, 0] and all(part["seed"] == whole["seed"] for part in rest if "-s" in settings)


def test_another_seed_draws_anew(run, path):
    run("-p", OPENING, "-n", 12, "-s", 5, "--session", path)
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    texts = [run("-n", 12, "-s", seed, "--session", where)["text"] for seed, where in ((1, path), (2, copy))]
    assert texts[0] != texts[1]


def test_a_prompt_is_all_of_the_text(run, qgraph, path):
    """What the session holds of it is not read again: neither for the same prompt, nor for a longer one."""
    system = "HAMLET.\nTo be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n"
    fresh = run("-p", system, "-n", 8, "-s", 3)
    n = fresh["timings"]["prompt_n"]
    assert run("-p", system, "-n", 8, "-s", 3, "--session", path)["tokens"] == fresh["tokens"]
    again = run("-p", system, "-n", 8, "-s", 3, "--session", path)
    assert again["tokens"] == fresh["tokens"] and again["timings"]["prompt_n"] == 0
    longer = system + "The slings and arrows"
    want = run("-p", longer, "-n", 8, "-s", 3)
    got = run("-p", longer, "-n", 8, "-s", 3, "--session", path)
    assert got["tokens"] == want["tokens"] and got["timings"]["prompt_n"] == want["timings"]["prompt_n"] - n
    other = run("-p", "OPHELIA.\n", "-n", 8, "-s", 3, "--session", path)
    assert other["tokens"] == run("-p", "OPHELIA.\n", "-n", 8, "-s", 3)["tokens"]


def test_turns_of_a_chat(run, path):
    want = run("-cnv", "-p", "Who is there?", "-n", 8, "--temp", 0)
    assert run("-cnv", "-p", "Who is there?", "-n", 8, "--temp", 0, "--session", path)["text"] == want["text"]
    again = run("-cnv", "-p", "Who is there?", "-n", 8, "--temp", 0, "--session", path)
    assert again["text"] == want["text"] and again["timings"]["prompt_n"] == 0


def test_what_is_said_and_shown(qgraph, path):
    first = qgraph("run", "-p", OPENING, "-n", 3, "--temp", 0, "--session", path)
    assert first.stdout.startswith(OPENING) and first.stderr.endswith(f"session: {len(open_session_file(path).arrays['tokens.0'])} tokens in {path}\n")
    second = qgraph("run", "-n", 3, "--temp", 0, "--session", path)
    assert not second.stdout.startswith(OPENING) and "prompt eval time = " in second.stderr
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_options_that_are_given_change_the_session(run, path):
    run("-p", OPENING, "-n", 3, "-c", 512, "-ctk", "f32", "--session", path)
    run("-n", 3, "--session", path)
    assert open_session_file(path).options["n_ctx"] == 512 and open_session_file(path).options["type_k"] == "f32"
    run("-n", 3, "--session", path, "-c", 1024, "-b", 32)
    changed = open_session_file(path).options
    assert (changed["n_ctx"], changed["type_k"], changed["n_ubatch"]) == (1024, "f32", 32)
    run("-n", 3, "--session", path, env={"QGRAPH_CTX_SIZE": "256"})
    assert open_session_file(path).options["n_ctx"] == 256


def test_a_full_context_is_kept(run, path):
    full = run("-p", OPENING, "-c", 256, "--ignore-eos", "-s", 1, "--session", path)
    held = open_session_file(path).about["sequences"][0]["n_past"]
    assert held == 256 and full["finish_reason"] == "length"
    assert len(run("--ignore-eos", "--session", path)["tokens"]) == 1


def test_refusals_leave_the_file(qgraph, run, path, toys):
    run("-p", OPENING, "-n", 3, "--session", path)
    before = path.read_bytes()

    def refused(*args):
        result = qgraph("run", "--session", path, "-n", 3, *args)
        assert (result.exit_code, result.stdout) == (1, "") and result.stderr.count("\n") == 1
        return result.stderr

    assert "belongs to another model: saved with bard" in refused(toys.t0)
    path.write_bytes(before[:-1])
    assert f"error: {path} was cut short" in refused()
    path.write_bytes(before[:900] + bytes([before[900] ^ 1]) + before[901:])
    assert "is damaged" in refused()
    path.write_bytes(before)
    result = qgraph("run", "--session", path, "-cnv")
    assert result.exit_code == 2 and "a turn of a chat needs one" in result.stderr
    assert path.read_bytes() == before
    # before anything is generated
    nowhere = qgraph("run", "--session", path.parent / "no" / "x", "-p", OPENING, "-n", 3)
    assert (nowhere.exit_code, nowhere.stdout) == (1, "")
    assert nowhere.stderr == f"error: {path.parent / 'no' / 'x'} cannot be written: there is no folder {path.parent / 'no'}\n"


def test_ctrl_c_keeps_the_session(run, path):
    child = start("run", "-p", OPENING, "--ignore-eos", "-c", 8192, "-s", 1, "--session", path, "--no-display-prompt")
    wait_for(child.stdout, b" ")
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130 and b"stopped: Ctrl-C" in err and err.decode().splitlines()[-1].startswith("session: ")
    n_held = len(open_session_file(path).arrays["tokens.0"])
    rest = run("-n", 10, "--ignore-eos", "--session", path)
    n_prompt = run("-p", OPENING, "-n", 1)["timings"]["prompt_n"]
    whole = run("-p", OPENING, "-n", n_held - n_prompt + 10, "--ignore-eos", "-s", 1, "-c", 8192)
    assert whole["tokens"][-10:] == rest["tokens"]


def test_inspect(qgraph, run, path):
    run("-p", OPENING, "-n", 3, "--session", path)
    shown = qgraph("session", "inspect", path)
    assert shown.exit_code == 0 and shown.stderr == ""
    lines = shown.stdout.splitlines()
    assert lines[0].startswith(f"{path}: session of bard") and lines[0].endswith("nothing damaged")
    told = json.loads(qgraph("session", "inspect", path, "--json").stdout)
    [sequence] = told["sequences"]
    assert lines[-1].split()[:2] == ["0", str(sequence["n_past"])] and lines[-1].split()[-1] == "yes"
    assert told["sampler"] is True and told["model"]["fingerprint"] in shown.stdout
    path.write_bytes(path.read_bytes()[:-1])
    broken = qgraph("session", "inspect", path)
    assert (broken.exit_code, broken.stdout) == (1, "") and broken.stderr.startswith(f"error: {path} was cut short: it has ")
    assert qgraph("session", "inspect", path.parent / "no").exit_code == 1
