"""`qgraph ppl`: figures on stdout, progress on stderr, the file of logits written and read."""

import json

import numpy as np
import pytest

import qwen3next_ggml.model
from qwen3next_ggml.cli.ppl import report
from qwen3next_ggml.cli.prompts import read_text
from qwen3next_ggml.perplexity import LogitsFile, Mean, Windows, evaluate, negative_log_likelihood, perplexity, read_tokens
from tests.kit.process import ROOT

TEXT = ROOT / "tests" / "data" / "cymbeline.txt"
ARGS = ("-f", TEXT, "-c", 128)


def figures(result):
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_the_estimate(qgraph, bard):
    """What is printed is what the library finds, window after window."""
    with qwen3next_ggml.load(bard, n_threads=1) as model, model.session(n_ctx=256, n_seq_max=2) as session:
        windows = Windows.cut(read_tokens(model, TEXT.read_text().removesuffix("\n"))[0], n_ctx=128, n_chunks=3)
        parts = [negative_log_likelihood(rows, windows.targets(i)) for i, rows in enumerate(evaluate(session, windows))]
    want = [perplexity(np.concatenate(parts[: i + 1])) for i in range(3)]
    result = qgraph("ppl", *ARGS, "--chunks", 3, "-b", 256, "--json")
    found = figures(result)
    assert result.stdout.splitlines()[0] == f"Final estimate: PPL = {want[2].value:.4f} +/- {want[2].error:.5f}"
    assert result.stderr == "".join(f"[{i + 1}/3] PPL = {value:.4f}\n" for i, (value, _) in enumerate(want))
    assert found == {"model": str(bard), "n_ctx": 128, "stride": 128, "n_chunks": 3, "n_scored": 189, "ppl": want[2]._asdict()}
    assert 30 < want[2].value < 80


@pytest.mark.parametrize("b, n_seq, n_ubatch", [(2048, 3, None), (300, 2, 300), (64, 1, 64)])
def test_windows_side_by_side(qgraph, monkeypatch, b, n_seq, n_ubatch):
    """-b / -c of them, no more than there are."""
    seen, session = {}, qwen3next_ggml.model.Session

    def watched(model, **options):
        seen.update(options)
        return session(model, **options)

    monkeypatch.setattr(qwen3next_ggml.model, "Session", watched)
    figures(qgraph("ppl", *ARGS, "--chunks", 3, "-b", b, "--json"))
    assert (seen["n_seq_max"], seen["n_ctx"], seen["n_ubatch"]) == (n_seq, 128 * n_seq, n_ubatch)


def test_a_stride(qgraph):
    found = figures(qgraph("ppl", "-f", TEXT, "-c", 256, "--ppl-stride", 100, "--chunks", 2, "--json"))
    assert (found["n_ctx"], found["stride"], found["n_chunks"], found["n_scored"]) == (512, 100, 2, 200)


def test_logits_are_saved_and_compared_with(qgraph, tmp_path, bard):
    path = tmp_path / "logits"
    saved = figures(qgraph("ppl", *ARGS, "--chunks", 3, "--kl-divergence-base", path, "--json"))
    assert LogitsFile.open(path).tokens.shape == (3, 128)
    result = qgraph("ppl", "--kl-divergence", "--kl-divergence-base", path, "-f", TEXT, "--json")
    found = figures(result)
    assert found["ppl"] == pytest.approx(saved["ppl"]) and found["ppl_base"]["value"] == pytest.approx(saved["ppl"]["value"], rel=1e-4)
    assert abs(found["kld"]["value"]) < 5e-6 and found["same_top"] == {"value": 1, "error": 0} and found["n_scored"] == 189
    lines = result.stdout.splitlines()
    assert [lines[0].split("  ")[0], lines[7].split("  ")[0], lines[-2].split("  ")[0]] == ["Mean PPL(Q)", "Mean KLD", "Same top p"]
    assert result.stderr.splitlines()[2].startswith(f"[3/3] PPL = {saved['ppl']['value']:.4f}, KLD = ")
    other = figures(qgraph("ppl", "--kl-divergence", "--kl-divergence-base", path, "-ctk", "q4_0", "-ctv", "q4_0", "--chunks", 2, "--json"))
    assert other["kld"]["value"] > 1e-4 and other["n_chunks"] == 2


def test_what_does_not_belong_to_the_logits(qgraph, tmp_path, toys):
    path = tmp_path / "logits"
    assert qgraph("ppl", *ARGS, "--chunks", 1, "--kl-divergence-base", path).exit_code == 0
    (tmp_path / "other.txt").write_text("To be, or not to be")
    for args, words in [
        (("-f", tmp_path / "other.txt"), f"{path} was made from another text than the one given with -f"),
        (("-c", 256), f"{path} was made with windows of 128 tokens, -c asks for 256"),
        ((toys.t0,), f"{path} was made over a vocabulary of 2048 tokens, the model's has "),
        (("--chunks", 0), "0 chunks: expected 1 or more, or -1 for all"),
    ]:
        result = qgraph("ppl", "--kl-divergence", "--kl-divergence-base", path, *args)
        assert (result.exit_code, result.stdout) == (1, "") and result.stderr.startswith(f"error: {words}")


@pytest.mark.parametrize(
    "args, words",
    [
        ((), "no text: give one with -f"),
        (("--kl-divergence", "-f", TEXT), "--kl-divergence needs the other model's logits"),
        (("--ppl-stride", 8, "--kl-divergence-base", "x", "-f", TEXT), "a file of logits has no stride"),
    ],
)
def test_usage(qgraph, args, words):
    result = qgraph("ppl", *args)
    assert result.exit_code == 2 and words in result.stderr


def test_a_text_that_is_too_short(qgraph, tmp_path):
    (tmp_path / "short.txt").write_text("To be")
    result = qgraph("ppl", "-f", tmp_path / "short.txt", "--kl-divergence-base", tmp_path / "logits")
    assert (result.exit_code, result.stdout) == (1, "") and result.stderr.endswith("windows of 512 tokens need at least 1024\n")
    assert not (tmp_path / "logits").exists()
    assert qgraph("ppl", "-f", "-", stdin="To be").stderr == result.stderr


def test_a_text_keeps_its_line_ends(tmp_path):
    (tmp_path / "dos.txt").write_bytes(b"one\r\ntwo\r")
    assert read_text(str(tmp_path / "dos.txt")) == "one\r\ntwo\r"


def test_the_report():
    """llama.cpp's names and units."""
    mean = Mean(0.5, 0.25)
    names = ("ppl", "ppl_base", "log_ppl_ratio", "ppl_ratio", "ppl_difference", "kld", "delta_p", "delta_p_rms", "same_top")
    percentiles = {100.0: 0.2, 99.9: 0.1, 50.0: -0.01, 0.0: -0.3}
    lines = list(report(dict.fromkeys(names, mean) | {"log_ppl_correlation": 0.99, "kld_percentiles": percentiles, "delta_p_percentiles": percentiles}))
    assert lines == [
        "Mean PPL(Q)                     0.500000  ± 0.250000",
        "Mean PPL(base)                  0.500000  ± 0.250000",
        "Cor(ln(PPL(Q)), ln(PPL(base)))    99.00%",
        "Mean ln(PPL(Q)/PPL(base))       0.500000  ± 0.250000",
        "Mean PPL(Q)/PPL(base)           0.500000  ± 0.250000",
        "Mean PPL(Q)-PPL(base)           0.500000  ± 0.250000",
        "",
        "Mean KLD      0.500000  ± 0.250000",
        "Maximum KLD   0.200000",
        "99.9% KLD     0.100000",
        "Median KLD   -0.010000",
        "Minimum KLD  -0.300000",
        "",
        "Mean Δp      50.000%  ± 25.000%",
        "Maximum Δp   20.000%",
        "99.9% Δp     10.000%",
        "Median Δp    -1.000%",
        "Minimum Δp  -30.000%",
        "RMS Δp       50.000%  ± 25.000%",
        "Same top p   50.000%  ± 25.000%",
    ]
