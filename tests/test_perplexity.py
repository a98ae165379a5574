"""Perplexity and divergence: llama.cpp's windows, float64 scores, its logits file, its statistics."""

import dataclasses
import math
import struct

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml.errors import OptionError, UnsupportedModelError
from qwen3next_ggml.perplexity import (
    Comparison, LogitsFile, LogitsWriter, Windows, compare, evaluate, negative_log_likelihood, perplexity, read_tokens, statistics,
)  # fmt: skip
from qwen3next_ggml.perplexity.logits_file import pack, unpack
from tests.kit import read_arrays, read_metadata, reference_of, write_gguf
from tests.kit.llama_api import LlamaOptions
from tests.kit.llama_child import LlamaJob, run_llama
from tests.kit.process import ROOT

TEXT = (ROOT / "tests" / "data" / "cymbeline.txt").read_text().removesuffix("\n")


@pytest.fixture(scope="module")
def bard_f32(tmp_path_factory, bard):
    """The embedded model's weights in F32: products in Q8_0 round activations, which no float64 model does."""
    path = tmp_path_factory.mktemp("bard") / "bard.gguf"
    write_gguf(path, read_metadata(bard), read_arrays(bard))
    return path


@pytest.fixture(scope="module")
def model(bard_f32):
    with qwen3next_ggml.load(bard_f32, n_threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def tokens(model):
    ids, bos = read_tokens(model, TEXT)
    assert bos is None and len(ids) > 1300
    return ids


def score(model, windows, *, n_seq=1, **options):
    with model.session(n_ctx=windows.n_ctx * n_seq, n_seq_max=n_seq, **options) as session:
        return np.concatenate([negative_log_likelihood(rows, windows.targets(i)) for i, rows in enumerate(evaluate(session, windows))])


# windows


def spans(windows):
    """Where each window begins and ends in the text, and which tokens of the text are predicted."""
    starts = [int(windows.window(i)[0]) for i in range(windows.count)]
    return [(start, int(windows.window(i)[-1]) + 1, windows.targets(i).tolist()) for i, start in enumerate(starts)]


@pytest.mark.parametrize("n_tokens, n_ctx, n_chunks, count", [(1000, 128, -1, 7), (1000, 128, 3, 3), (256, 128, 9, 2), (30, 7, -1, 4)])
def test_windows_end_to_end(n_tokens, n_ctx, n_chunks, count):
    """The second half of each counts, but for its first token: nothing in that half predicts it."""
    found = spans(Windows.cut(range(n_tokens), n_ctx=n_ctx, n_chunks=n_chunks))
    assert found == [(i * n_ctx, (i + 1) * n_ctx, list(range(i * n_ctx + n_ctx // 2 + 1, (i + 1) * n_ctx))) for i in range(count)]


@pytest.mark.parametrize("n_tokens, n_ctx, stride, size, count", [(1024, 256, 100, 512, 6), (2000, 512, 256, 768, 5), (1537, 512, 3, 768, 257)])
def test_windows_with_a_stride(n_tokens, n_ctx, stride, size, count):
    """A window fills llama.cpp's context, n_ctx + stride / 2 rounded up to 256, and its last `stride` tokens are predicted."""
    windows = Windows.cut(range(n_tokens), n_ctx=n_ctx, stride=stride, bos=7)
    assert spans(windows) == [(s, s + size, list(range(s + size - stride, s + size))) for s in range(0, count * stride, stride)]
    assert windows.bos is None and (count - 1) * stride + size < n_tokens <= count * stride + size


@pytest.mark.parametrize("options", [dict(n_ctx=2), dict(stride=-1), dict(n_chunks=0), dict(n_chunks=-2), dict(n_ctx=8, stride=768)])
def test_windows_that_mean_nothing(options):
    with pytest.raises(OptionError):
        Windows.cut(range(3000), **options)


@pytest.mark.parametrize("stride, size", [(0, 512), (511, 768)])
def test_a_text_holds_two_windows_at_least(stride, size):
    Windows.cut(range(2 * size), n_ctx=512, stride=stride)
    with pytest.raises(OptionError, match=f"the text has {2 * size - 1} tokens; windows of {size} tokens need at least {2 * size}"):
        Windows.cut(range(2 * size - 1), n_ctx=512, stride=stride)


class Recorder:
    """A session of two sequences that notes what it is asked for; its logits say which token each row came from."""

    n_seq_max = 2

    def __init__(self):
        self.calls, self.cleared = [], []

    def clear(self, seq):
        self.cleared.append(seq)

    def decode_batch(self, batch, *, logits):
        self.calls.append((logits, {seq: ids.tolist() for seq, ids in batch.items()}))
        return {seq: ids[:, None] for seq, ids in batch.items()}


def test_what_is_evaluated():
    """Windows side by side from empty sequences, each begun by bos; the text keeps the token that gave way."""
    session, windows = Recorder(), Windows.cut(range(20), n_ctx=6, bos=99)
    rows = [logits.ravel().tolist() for logits in evaluate(session, windows)]
    assert rows == [[3, 4], [9, 10], [15, 16]] and windows.tokens.tolist() == list(range(20))
    assert session.calls == [
        ("none", {0: [99, 1, 2], 1: [99, 7, 8]}), ("all", {0: [3, 4], 1: [9, 10]}),
        ("none", {0: [99, 13, 14]}), ("all", {0: [15, 16]}),
    ]  # fmt: skip
    assert session.cleared == [0, 1, 0, 1]


def test_bos_and_eos_of_the_file(toys):
    with qwen3next_ggml.load(toys.file(metadata={"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 3})) as toy:
        ids, bos = read_tokens(toy, "a")
        assert bos == 3 == ids[0]
    with qwen3next_ggml.load(toys.file(metadata={"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": 3})) as toy:
        with pytest.raises(UnsupportedModelError, match="add_eos_token"):
            read_tokens(toy, "a")


# scores


@pytest.fixture(scope="module")
def reference_scores(bard_f32, tokens):
    """−log p of every token of two windows of 64 but the first, token by token in float64: [2][63]."""
    reference, found = reference_of(bard_f32), []
    for i in range(2):
        ids = tokens[64 * i : 64 * i + 64]
        rows = reference.decode(ids[:-1], seq=i)
        found.append([math.log(sum(math.exp(x - row[token]) for x in row)) for row, token in zip(rows.tolist(), ids[1:])])
    return found


def test_perplexity_is_the_float64_models(model, tokens, reference_scores):
    windows = Windows.cut(tokens, n_ctx=64, n_chunks=2)
    ours = score(model, windows, type_k="f32", type_v="f32")
    want = [nll for window in reference_scores for nll in window[32:]]
    np.testing.assert_allclose(ours, want, atol=2e-5)
    n, value = len(want), sum(want) / len(want)
    spread = math.sqrt(sum((x - value) ** 2 for x in want) / n / (n - 1))
    assert tuple(perplexity(ours)) == pytest.approx((math.exp(value), math.exp(value) * spread), rel=1e-4)


class LateTargets(Windows):
    def targets(self, i):
        return np.roll(super().targets(i), 1)


def test_another_half_or_target_is_noticed(model, tokens, reference_scores):
    windows = Windows.cut(tokens, n_ctx=64, n_chunks=2)
    want = math.exp(np.mean([window[32:] for window in reference_scores]))
    whole = dataclasses.replace(windows, first=0)
    late = LateTargets(**{f.name: getattr(windows, f.name) for f in dataclasses.fields(windows)})
    for changed in (whole, late):
        assert abs(perplexity(score(model, changed)).value / want - 1) > 0.05
    assert perplexity(score(model, whole)).value == pytest.approx(math.exp(np.mean(reference_scores)), rel=1e-3)


def test_windows_side_by_side_give_the_same(model, tokens):
    windows = Windows.cut(tokens, n_ctx=128, n_chunks=5)
    side_by_side, one_by_one = (score(model, windows, n_seq=n_seq, type_k="f32", type_v="f32") for n_seq in (3, 1))
    np.testing.assert_allclose(side_by_side, one_by_one, atol=1e-4)


def test_large_vocabularies_are_scored_in_parts(monkeypatch):
    rng = np.random.default_rng(2)
    logits, targets = rng.normal(size=(7, 50)).astype(np.float32), rng.integers(0, 50, 7)
    whole, packed = negative_log_likelihood(logits, targets), pack(logits)
    monkeypatch.setattr("qwen3next_ggml.perplexity.scores.BLOCK", 120)
    assert np.array_equal(negative_log_likelihood(logits, targets), whole) and np.array_equal(pack(logits), packed)


# the file of logits


def llama_row(logits):
    """One row of llama.cpp's file, number by number in float32, as its perplexity tool describes it."""
    f = np.float32
    top, low = max(logits), min(logits)
    low = max(low, top - f(16))
    log_sum = f(math.log(sum(math.exp(x - top) for x in logits)))
    scale = f(f(top - low) / f(65535))
    steps = [round(float(f(f(1) / scale) * f(x - low))) if scale and x > low else 0 for x in logits]
    return struct.pack("<2f", scale, f(f(low - top) - log_sum)) + struct.pack(f"<{len(steps)}H", *steps) + b"\0\0" * (len(steps) % 2)


def write_llama_file(path, tokens, n_vocab, rows):
    """tokens [n_chunk, n_ctx], rows: logits of every scored position in order."""
    n_chunk, n_ctx = tokens.shape
    words = struct.pack(f"<3i{tokens.size}i", n_ctx, n_vocab, n_chunk, *tokens.ravel().tolist())
    path.write_bytes(b"_logits_" + words + b"".join(map(llama_row, rows)))


def test_rows_are_llama_cpps():
    rng = np.random.default_rng(3)
    for n_vocab in (50, 51):
        logits = (rng.normal(size=(6, n_vocab)) * [[0.1], [1], [3], [9], [40], [0]]).astype(np.float32)
        rows, want = pack(logits), np.frombuffer(b"".join(map(llama_row, logits)), "<u2").reshape(6, -1)
        assert np.array_equal(rows[:, 4:], want[:, 4:])
        np.testing.assert_allclose(rows[:, :4].view("<f4"), want[:, :4].copy().view("<f4"), rtol=3e-7)
        log_p = logits - np.log(np.exp(logits.astype(float)).sum(-1, keepdims=True))
        shown = logits > logits.max(-1, keepdims=True) - 16
        assert np.abs(unpack(rows, n_vocab) - log_p)[shown].max() < 16 / 65535 / 2 + 2e-6 and not shown.all()


@pytest.fixture
def saved(tmp_path):
    """A file of three windows of 8 tokens over 11, and what went into it."""
    rng = np.random.default_rng(4)
    windows, logits = Windows.cut(rng.integers(0, 11, 30), n_ctx=8), rng.normal(size=(3, 3, 11)).astype(np.float32)
    with LogitsWriter(tmp_path / "logits.kld", windows, 11) as writer:
        for rows in logits:
            writer.add(rows)
    return tmp_path / "logits.kld", windows, logits


def test_what_was_written_is_read(saved, tmp_path):
    path, windows, logits = saved
    file = LogitsFile.open(path)
    assert file.n_vocab == 11 and np.array_equal(file.tokens, windows.tokens[:24].reshape(3, 8))
    assert np.array_equal(file.rows, [pack(rows) for rows in logits])
    again = file.windows(bos=2)
    assert (again.n_ctx, again.stride, again.first, again.count, again.bos) == (8, 8, 4, 3, 2) and file.windows(n_chunks=2).count == 2
    write_llama_file(tmp_path / "theirs.kld", file.tokens, 11, logits.reshape(9, 11))
    theirs = LogitsFile.open(tmp_path / "theirs.kld")
    assert np.array_equal(theirs.tokens, file.tokens) and np.array_equal(theirs.rows[..., 4:], file.rows[..., 4:])
    assert path.stat().st_size == (tmp_path / "theirs.kld").stat().st_size


def test_a_file_that_is_not_finished_is_not_there(saved, tmp_path):
    path, windows, logits = saved
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt), LogitsWriter(path, windows, 11) as writer:
        writer.add(logits[0])
        raise KeyboardInterrupt
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["logits.kld"]
    with pytest.raises(OptionError, match="No such file or directory"), LogitsWriter(tmp_path / "no" / "where", windows, 11):
        pass


def test_no_room_on_the_disk(saved):
    path, windows, logits = saved
    writer = LogitsWriter(path, windows, 11)
    writer._part = path.with_name("full")
    writer._part.symlink_to("/dev/full")
    with pytest.raises(OptionError, match=r"logits\.kld: No space left on device"), writer:
        pass
    assert not writer._part.is_symlink()


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda raw: b"", "not a file of log-probabilities: it starts with b''"),
        (lambda raw: b"GGUF" + raw, "not a file of log-probabilities"),
        (lambda raw: raw[:15], "nothing to compare with"),
        (lambda raw: raw[:8] + struct.pack("<3i", 8, 11, -3) + raw[20:], "-3 windows of 8 tokens over a vocabulary of 11"),
        (lambda raw: raw[:8] + struct.pack("<3i", 2**31 - 1, 2**31 - 1, 2**31 - 1) + raw[20:], "file too short"),
        (lambda raw: raw[:-1], "file too short: 403 bytes, its header asks for 404"),
        (lambda raw: raw[:20] + struct.pack("<i", 11) + raw[24:], "to 11, its vocabulary has 11"),
    ],
)  # fmt: skip
def test_files_that_are_refused(saved, edit, words):
    path, *_ = saved
    path.write_bytes(edit(path.read_bytes()))
    with pytest.raises(OptionError) as refusal:
        LogitsFile.open(path)
    assert str(refusal.value).startswith(f"{path}: ") and words in str(refusal.value)


def test_llama_cpps_logits(model, bard_f32, tokens, bard, tmp_path):
    """A file of llama.cpp's logits: the plain graph is at no distance from it, the same weights in Q8_0 are."""
    n_ctx, n_chunk = 128, 4
    ids = np.array(tokens[: n_ctx * n_chunk]).reshape(n_chunk, n_ctx)
    steps = tuple(tuple((int(t), pos, seq, 64 <= pos < 127) for pos, t in enumerate(window)) for seq, window in enumerate(ids))
    options = LlamaOptions(n_ctx=512, n_seq_max=n_chunk, n_threads=1)
    theirs = run_llama(LlamaJob(model=str(bard_f32), steps=steps, options=options)).logits
    write_llama_file(tmp_path / "logits", ids, model.hparams.n_vocab, np.concatenate(theirs))

    file = LogitsFile.open(tmp_path / "logits")
    windows = file.windows()
    found = distance(model, file, windows, graph="plain", flash_attn=False, type_k="f32", type_v="f32")
    assert abs(found["kld"].value) < 5e-6 and found["same_top"] == (1, 0) and found["log_ppl_correlation"] > 0.999999
    llama_ppl = perplexity(np.concatenate([negative_log_likelihood(rows, windows.targets(i)) for i, rows in enumerate(theirs)]))
    assert tuple(found["ppl"]) == pytest.approx(tuple(llama_ppl), rel=1e-5)
    assert tuple(found["ppl_base"]) == pytest.approx(tuple(llama_ppl), rel=1e-5)
    with qwen3next_ggml.load(bard, n_threads=1) as quantised:
        assert distance(quantised, file, windows)["kld"].value > 1e-4
    shifted = dataclasses.replace(windows, tokens=np.roll(windows.tokens, 1))
    assert distance(model, file, shifted)["kld"].value > 0.1


def distance(model, file, windows, **options):
    with model.session(n_ctx=512, **options) as session:
        parts = [compare(rows, file.rows[i], windows.targets(i)) for i, rows in enumerate(evaluate(session, windows))]
    return statistics(Comparison(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(Comparison))))


# statistics


def test_comparison_of_one_row():
    """Divergence, by the definition: over what the base holds for more likely than e^-16."""
    base, logits = np.array([[0.0, 1, 2, -40]], np.float32), np.array([[1.0, 3, 0, -1e6]], np.float32)
    p, q = (np.exp(x[0].astype(float)) / np.exp(x[0].astype(float)).sum() for x in (base, logits))
    found = compare(logits, pack(base), np.array([1]))
    assert found.kld == pytest.approx(sum(p[:3] * np.log(p[:3] / q[:3])), rel=1e-4) and not found.same_top[0]
    assert (found.nll[0], found.nll_base[0]) == pytest.approx((-math.log(q[1]), -math.log(p[1])), rel=1e-4)
    assert compare(base * 2, pack(base), np.array([1])).same_top[0]


def test_statistics_are_llama_cpps():
    """Its sums of products, over numbers drawn at random."""
    rng = np.random.default_rng(6)
    n = 400
    base = rng.exponential(2, n)
    nll, kld, same = base + rng.normal(size=n) * 0.3, rng.exponential(0.1, n), rng.random(n) < 0.9
    found = statistics(Comparison(nll, base, kld, same))

    def uncertain(values):
        value = sum(values) / n
        return value, math.sqrt((sum(x * x for x in values) / n - value * value) / (n - 1))

    (a, da), (b, db) = uncertain(nll), uncertain(base)
    covariance = (sum(nll * base) / n - a * b) / (n - 1)
    log_ratio = math.sqrt(da**2 + db**2 - 2 * covariance)
    p, p_base = math.exp(a), math.exp(b)
    dp = np.exp(-nll) - np.exp(-base)
    square, dsquare = uncertain(dp**2)
    want = {
        "ppl": (p, p * da), "ppl_base": (p_base, p_base * db), "log_ppl_ratio": (a - b, log_ratio),
        "ppl_ratio": (math.exp(a - b), math.exp(a - b) * log_ratio),
        "ppl_difference": (p - p_base, math.sqrt((p * da) ** 2 + (p_base * db) ** 2 - 2 * p * p_base * covariance)),
        "kld": uncertain(kld), "delta_p": uncertain(dp), "delta_p_rms": (math.sqrt(square), 0.5 / math.sqrt(square) * dsquare),
        "same_top": (sum(same) / n, math.sqrt(sum(same) / n * (1 - sum(same) / n) / (n - 1))),
    }  # fmt: skip
    for name, value in want.items():
        assert tuple(found[name]) == pytest.approx(value, rel=1e-9), name
    assert found["log_ppl_correlation"] == pytest.approx(covariance / (da * db))
    for name, values in (("kld", sorted(kld)), ("delta_p", sorted(dp))):
        for percent, value in found[f"{name}_percentiles"].items():
            at = percent / 100 * (n - 1)
            i = min(int(at), n - 2)
            assert value == pytest.approx(values[i] + (at - i) * (values[i + 1] - values[i]), abs=1e-12)
