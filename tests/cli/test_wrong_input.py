"""Wrong input gets one readable line on stderr, nothing on stdout, and exit 1: every kind the README promises."""

import struct

import numpy as np
import pytest

from tests.kit.gguf_bytes import edit_gguf

PROMPT = ("-p", "hi", "-n", 1)


@pytest.fixture
def refused(qgraph):
    """Run and check the form of the refusal; returns the sentence."""

    def run(*args):
        result = qgraph(*args)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and result.stderr.endswith("\n")
        return result.stderr.removeprefix("error: ").rstrip()

    return run


@pytest.mark.parametrize("command", ["run", "chat", "inspect", "validate", "bench"])
def test_missing_file(refused, tmp_path, command):
    path = tmp_path / "nowhere.gguf"
    assert refused(command, path, *(PROMPT[:2] if command in ("run", "chat") else ())) == f"{path}: No such file or directory"


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "not a GGUF file: it is empty"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "not a GGUF file: it starts with b'<!DO', expected b'GGUF'"),
        (b"PK\x03\x04" + bytes(99), "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(99), "GGUF version 1"),
    ],
)
@pytest.mark.parametrize("command", ["run", "inspect"])
def test_not_a_gguf(refused, tmp_path, command, content, words):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert refused(command, path, *(PROMPT if command == "run" else ())).startswith(f"{path}: {words}")


def test_a_folder_is_not_a_file(refused, tmp_path):
    assert refused("run", tmp_path, *PROMPT) == f"{tmp_path}: not a regular file"


@pytest.mark.parametrize("part", [0.001, 0.3, 0.999])
def test_truncated(refused, bard, tmp_path, part):
    path, whole = tmp_path / "cut.gguf", bard.read_bytes()
    path.write_bytes(whole[: int(len(whole) * part)])
    assert "file too short" in refused("run", path, *PROMPT)


@pytest.mark.parametrize("arch", ["qwen35moe", "kimi-linear", "x" * 10_000, "a\nb"])
def test_wrong_architecture(refused, toys, tmp_path, arch):
    """C12: what was found and what is supported, in a line of bearable length."""
    path = tmp_path / "t.gguf"
    edit_gguf(toys.t0, path, metadata={"general.architecture": arch})
    sentence = refused("run", path, *PROMPT)
    assert "no graph for architecture" in sentence and "supported: qwen3next" in sentence and len(sentence) < 200


def test_unknown_tensor_type(refused, toys, tmp_path):
    path, raw, name = tmp_path / "t.gguf", bytearray(toys.t0.read_bytes()), b"blk.1.attn_qkv.weight"
    at = raw.index(name) + len(name) + 4 + 2 * 8
    raw[at : at + 4] = struct.pack("<I", 200)
    path.write_bytes(raw)
    assert refused("run", path, *PROMPT).startswith(f"{path}: tensor 'blk.1.attn_qkv.weight' has type id 200")


def test_missing_and_misshapen_tensors(refused, toys, tmp_path):
    path = tmp_path / "t.gguf"
    edit_gguf(toys.t0, path, drop={"blk.0.attn_norm.weight", "blk.2.ssm_a"})
    assert refused("run", path, *PROMPT) == f"{path}: missing 2 tensors: blk.0.attn_norm.weight [64], blk.2.ssm_a [6]"
    edit_gguf(toys.t0, path, replace={"blk.3.attn_k_norm.weight": ("f32", np.ones(23))})
    assert refused("run", path, *PROMPT) == f"{path}: blk.3.attn_k_norm.weight has shape [23], wanted [24]"


@pytest.mark.parametrize("n_rot", [7, 26])
def test_rope_over_the_wrong_width(refused, toys, tmp_path, n_rot):
    """C08: an odd count, or more than a head is wide."""
    path = tmp_path / "t.gguf"
    edit_gguf(toys.t0, path, metadata={"qwen3next.rope.dimension_count": n_rot})
    assert refused("run", path, *PROMPT) == f"rope.dimension_count is {n_rot}, expected an even number from 2 to the head width 24"


def test_other_tokenizers(refused, toys, tmp_path):
    path = tmp_path / "t.gguf"
    edit_gguf(toys.t0, path, metadata={"tokenizer.ggml.pre": "llama-bpe"})
    assert refused("run", path, *PROMPT).startswith("tokenizer.ggml.pre is 'llama-bpe', built here: qwen2, qwen35")


def test_a_context_no_memory_can_hold(refused):
    sentence = refused("run", "-c", 50_000_000, *PROMPT)
    assert sentence.startswith("n_ctx=50000128 needs 48,829 MiB of state on CPU, ") and sentence.endswith(" MiB are available")


def test_a_prompt_longer_than_the_context(refused):
    sentence = refused("run", "-c", 256, "-p", "word " * 300)
    assert sentence.startswith("the prompt has ") and sentence.endswith(" tokens, the context holds 256")


@pytest.mark.parametrize(
    "flag, value, words",
    [
        ("--temp", -1, "temp is -1.0, expected 0 or more"),
        ("--temp", "nan", "temp is nan"),
        ("--top-p", 1.5, "top_p is 1.5, expected 0 to 1"),
        ("--min-p", -0.1, "min_p is -0.1, expected 0 to 1"),
        ("--repeat-penalty", 0, "penalty_repeat is 0.0, expected a finite number above 0"),
        ("--repeat-last-n", -2, "penalty_last_n is -2"),
        ("--samplers", "top_k;mirostat", "sampler 'mirostat' is not built"),
        ("--logit-bias", "99999+1", "logit_bias names token 99999, the vocabulary has 2048 tokens"),
        ("--seed", -7, "seed is -7"),
        ("--predict", -5, "n_predict is -5"),
        ("--reverse-prompt", "", "a stop string is empty"),
    ],
)
def test_sampler_values(refused, flag, value, words):
    assert refused("run", *PROMPT, flag, value).startswith(words)


@pytest.mark.parametrize(
    "args, words",
    [
        (("-ctv", "q8_0", "-fa", "off"), "type_v=q8_0 needs flash attention"),
        (("-dev", "CUDA0"), "no device CUDA0"),
        (("-dev", "CPU,,CPU"), "no device ;"),
        (("-f", "no/such/prompt"), "no/such/prompt: No such file or directory"),
    ],
)
def test_options_that_cannot_be_honoured(refused, args, words):
    assert refused("run", *PROMPT, *args).startswith(words)


def test_cache_types_a_head_has_no_blocks_for(refused, toys):
    assert refused("run", toys.t0, *PROMPT, "-ctk", "q8_0") == "type_k=q8_0 needs a head width divisible by 32, got 24"


def test_prompts_that_are_not_text(refused, tmp_path):
    path = tmp_path / "prompt"
    path.write_bytes("Hamlet".encode("utf-16"))
    assert refused("run", "-f", path, "-n", 1) == f"{path}: not UTF-8 text, byte 0"
