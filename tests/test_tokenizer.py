"""The tokenizer against llama.cpp itself, running in a child process on the same vocabularies."""

import json
import random
import subprocess
import sys
import time
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3next_ggml.errors import GgufError, OptionError, UnsupportedModelError
from qwen3next_ggml.tokenizer import _CHARS, Tokenizer, TokenType

from .kit import read_metadata, write_gguf
from .kit.process import ROOT

BARD = ROOT / "qwen3next_ggml" / "data" / "bard.gguf"

CHILD = """
import ctypes, json, sys
from tests.kit.llama_child import Llama, LlamaOptions
llama = Llama(sys.argv[1], LlamaOptions(), vocab_only=True)
api, buffer = llama.api, ctypes.create_string_buffer(4096)

def tokenize(data, add_special, parse_special):
    ids = (api.llama_token * (len(data) + 8))()
    n_ids = api.llama_tokenize(llama.vocab, data, len(data), ids, len(ids), add_special, parse_special)
    return ids[:n_ids]

def piece(token, special):
    n_bytes = api.llama_token_to_piece(llama.vocab, token, buffer, len(buffer), 0, special)
    return buffer.raw[:n_bytes].hex()

for line in sys.stdin:
    job = json.loads(line)
    if "texts" in job:
        answer = [tokenize(bytes.fromhex(text), job["add_special"], job["parse_special"]) for text in job["texts"]]
    else:
        ids = range(llama.n_vocab)
        answer = {"n_vocab": llama.n_vocab, "eog": [i for i in ids if api.llama_vocab_is_eog(llama.vocab, i)],
                  "eot": api.llama_vocab_eot(llama.vocab), "eos": api.llama_vocab_eos(llama.vocab),
                  "shown": [piece(i, False) for i in ids], "special": [piece(i, True) for i in ids]}
    print(json.dumps(answer), flush=True)
"""


class LlamaVocab:
    """One vocabulary loaded by llama.cpp in a child that answers until closed."""

    def __init__(self, path):
        self.child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], cwd=ROOT, text=True,
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def ask(self, **job):
        print(json.dumps(job), file=self.child.stdin, flush=True)
        return json.loads(self.child.stdout.readline())

    def encode(self, texts, *, add_special=True, parse_special=False):
        hexed = [(text if isinstance(text, bytes) else text.encode()).hex() for text in texts]
        return self.ask(texts=hexed, add_special=add_special, parse_special=parse_special)

    def close(self):
        self.child.stdin.close()
        self.child.wait(timeout=60)


def metadata_of(tokens, types, merges, **keys):
    metadata = {"general.architecture": "qwen3next", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
                "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [int(t) for t in types],
                "tokenizer.ggml.merges": merges, "tokenizer.ggml.eos_token_id": len(tokens) - 1}
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


SPECIALS = {
    "<|im_start|>": TokenType.CONTROL, "<|im_end|>": TokenType.CONTROL, "<|im": TokenType.CONTROL, "end|><": TokenType.USER_DEFINED,
    "<think>": TokenType.USER_DEFINED, "</think>": TokenType.USER_DEFINED, "ink></th": TokenType.USER_DEFINED,
    "<|fim_pad|>": TokenType.USER_DEFINED, "<|fim_prefix|>": TokenType.NORMAL, "<|file_sep|>": TokenType.CONTROL,
    "<unk>": TokenType.UNKNOWN, "[PAD1]": TokenType.UNUSED, "[PAD2]": TokenType.UNDEFINED, "<0x0A>": TokenType.BYTE,
    "  ": TokenType.USER_DEFINED, "日本": TokenType.USER_DEFINED, "<|endoftext|>": TokenType.CONTROL,
}


def sharp_vocabulary(pre):
    """Every pair of bytes merges, so an id sequence shows where words were cut; ranks are shuffled."""
    pairs = [(a, b) for a in _CHARS for b in _CHARS]
    random.Random(7).shuffle(pairs)
    tokens = _CHARS + [a + b for a, b in pairs if a + b not in SPECIALS] + list(SPECIALS)
    types = [TokenType.NORMAL] * (len(tokens) - len(SPECIALS)) + list(SPECIALS.values())
    return metadata_of(tokens, types, [f"{a} {b}" for a, b in pairs], pre=pre)


def tiny_vocabulary():
    """Few bytes, merges over texts that are no tokens, a merge given twice, bos and eos asked for."""
    tokens = ["a", "b", "c", "Ġ", "Ċ", "ab", "Ġa", "bca", "xy", "<s>", "</s>"]
    merges = ["a b", "b c", "bc a", "x y", "c a", "a b", "Ġ a", "a a", "é z", "Ġa b", "Ġ b"]
    return metadata_of(tokens, [1] * 9 + [3, 3], merges, bos_token_id=9, add_bos_token=True, add_eos_token=True)


@pytest.fixture(scope="module", params=["bard", "qwen2", "qwen35", "tiny"])
def both(request, tmp_path_factory):
    if request.param == "bard":
        metadata, path = read_metadata(BARD), BARD
    else:
        metadata = tiny_vocabulary() if request.param == "tiny" else sharp_vocabulary(request.param)
        path = tmp_path_factory.mktemp("vocabulary") / "vocabulary.gguf"
        write_gguf(path, metadata, {})
    llama = LlamaVocab(path)
    yield Tokenizer.from_metadata(metadata), llama
    llama.close()


SCRIPTS = [
    "To be, or not to be: that is the question", "Größe, naïve Œuvre, ﬀ ligature", "Ελληνικά και ὀξεῖα", "Съешь же ещё", "עברית עִם נִקּוּד",
    "العَرَبِيَّة‎ ١٢٣", "हिन्दी में क्षि", "বাংলা ৪৫", "தமிழ்", "ไทยไม่มีช่องว่าง", "한국어 각", "日本語テキスト、カナ", "简体中文。繁體",
    "𠜎𠜱 𝔘𝔫𝔦 𝟘𝟙", "ǅ ǆ ſs 'ſ K", "e\u0301 a\u0308\u0301 \u0301x", "\u200bzero\u200dwidth\u2060", "½ ² Ⅷ ㊿ ٣",
]
EMOJI = ["👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪🇫🇷", "1️⃣", "❤️‍🔥", "🤷🏿‍♀️", "☺︎"]
SPACES = [" ", "  ", "\t", "\n", "\r\n", "\r", "\u00a0", "\u3000", "\u2028", "\u0085", "\x0b", "\x0c", "\u2003", "\ufeff", "\x00"]
WORDS = ["don't", "I'VE", "we'Re", "'s", "'S", "''ll", "x'd", "1234567", "3.14", "0x1F", "a1b2", "!!!", "=>", "...\n\n", "—", "_a_b", "'", "\"q\""]
LOOKALIKES = [*SPECIALS, "<|im_end|", "<|im_start|><|im_end|>", "<<|im_end|>>", "<|im_end|><think>x</think><|im", "<|IM_END|>", "< |im_end|>",
              "<|im_start|>user\nhi<|im_end|>\n", "ink></think>", "<think></think>", "<s>a</s>", "abcabca bca xy", "aab b", " b  b ab bc"]


def varied_texts(n_random=600):
    """Return fixed strings of every kind, then random mixtures of them."""
    rng = random.Random(20)
    atoms = SCRIPTS + EMOJI + SPACES + WORDS + LOOKALIKES
    texts = ["", *atoms, "a" * 5000, " " * 3001, "\n" * 999, " \n" * 500, "ab" * 3000 + " ", "🤔" * 400, "9" * 300, "é" * 700]
    texts += [space * n + tail for space in SPACES for n in (1, 2, 3) for tail in ("", "x", "7", "!", "\n", "é")]
    for _ in range(n_random):
        parts = [rng.choice(atoms) if rng.random() < 0.7 else rng.choice(SPACES) * rng.randint(1, 4)
                 for _ in range(rng.randint(1, 9))]
        texts.append("".join(parts))
    return texts


@pytest.mark.parametrize("parse_special", [False, True])
@pytest.mark.parametrize("add_special", [False, True])
def test_ids_equal_llama_cpp(both, parse_special, add_special):
    tokenizer, llama = both
    texts = varied_texts()
    assert len(texts) > 500
    options = {"add_special": add_special, "parse_special": parse_special}
    for text, expected in zip(texts, llama.encode(texts, **options), strict=True):
        assert tokenizer.encode(text, **options) == expected, repr(text)


# every Python knows Unicode 3.2 under this name; both tables agree on what was assigned then
OLD_CHARACTERS = [chr(c) for c in range(0x110000) if unicodedata.ucd_3_2_0.category(chr(c)) not in ("Cn", "Cs", "Co")]
CHARACTERS = st.one_of(st.sampled_from(OLD_CHARACTERS), st.sampled_from(SPACES), st.sampled_from("aZ'stlvemrd019.,!<|>"))


@settings(max_examples=300, deadline=None)
@given(text=st.lists(st.one_of(CHARACTERS, st.sampled_from(LOOKALIKES + EMOJI)), max_size=30).map("".join),
       parse_special=st.booleans())
def test_random_text_gives_llama_cpps_ids(both, text, parse_special):
    tokenizer, llama = both
    assert [tokenizer.encode(text, parse_special=parse_special)] == llama.encode([text], parse_special=parse_special)


def test_undecodable_bytes_count_as_replacement_characters(both):
    tokenizer, llama = both
    for data in (b"a\xff b", b"\x80\x80x", b"caf\xe9", b"\xe2\x82", b"ok \xf0\x9f\x98 ok"):
        text = data.decode("utf-8", "surrogateescape")
        assert [tokenizer.encode(text)] == llama.encode([data]), data
    assert tokenizer.encode("a\ud800b\udfff") == tokenizer.encode("a\ufffdb\ufffd")


def test_pieces_and_endings_equal_llama_cpp(both):
    tokenizer, llama = both
    facts = llama.ask()
    assert tokenizer.n_vocab == facts["n_vocab"]
    assert sorted(tokenizer.eog) == facts["eog"]
    assert tokenizer.eos == facts["eos"]
    assert tokenizer.is_eog(tokenizer.eos) and not tokenizer.is_eog(0)
    assert tokenizer.eot in (facts["eot"], None) or tokenizer.is_eog(facts["eot"])
    for special, pieces in ((False, facts["shown"]), (True, facts["special"])):
        ours = [tokenizer._shown_bytes(i, special).hex() for i in range(tokenizer.n_vocab)]
        assert ours == pieces


def test_lossless_where_every_byte_is_a_token():
    tokenizer = bard()
    for text in varied_texts(100):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def bard(**changes):
    return Tokenizer.from_metadata(read_metadata(BARD) | changes)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2047), max_size=40), st.booleans())
def test_stream_shows_whole_characters_only(ids, special):
    tokenizer = BARD_TOKENIZER
    stream = tokenizer.stream(special=special)
    shown, given_bytes = "", b""
    for token in ids:
        shown += stream.push(token)
        given_bytes += tokenizer._shown_bytes(token, special)
        # what shows is what an incremental reader can be sure of: never more, and at most three bytes less
        assert given_bytes.decode("utf-8", "replace").startswith(shown)
        assert len(given_bytes) - len(shown.encode()) <= 3 or "\ufffd" in shown
    assert shown + stream.flush() == tokenizer.decode(ids, special=special)


BARD_TOKENIZER = bard()


def test_stream_holds_back_half_characters():
    tokenizer = BARD_TOKENIZER
    stream = tokenizer.stream()
    ids = tokenizer.encode("🤔é", add_special=False)
    assert [stream.push(i) for i in ids] == [""] * 3 + ["🤔"] + [""] * (len(ids) - 5) + ["é"]
    assert stream.flush() == ""
    assert stream.push(ids[0]) == "" and stream.flush() == "\ufffd"
    assert stream.push(ids[1]) == "\ufffd"


def test_nothing_big_is_read_before_use():
    class Watched(dict):
        touched = []

        def get(self, key, default=None):
            self.touched.append(key)
            return super().get(key, default)

    metadata = Watched(read_metadata(BARD))
    tokenizer = Tokenizer.from_metadata(metadata)
    assert metadata.touched == ["tokenizer.ggml.model", "tokenizer.ggml.pre"]
    assert tokenizer.decode([64]) == "a"
    assert "tokenizer.ggml.merges" not in metadata.touched
    tokenizer.encode("a")
    assert "tokenizer.ggml.merges" in metadata.touched


def test_full_size_vocabulary_loads_in_time():
    pairs = [(a, b) for a in _CHARS for b in _CHARS]
    pairs += [(a + b, c) for a, b in pairs for c in ("e", "s")][:151_387 - len(pairs)]
    tokens = [*_CHARS, *(a + b for a, b in pairs)]
    types = [1] * len(tokens) + [3] * (151_936 - len(tokens))
    tokens += [f"<|extra_{i}|>" for i in range(151_936 - len(tokens))]
    metadata = metadata_of(tokens, types, [f"{a} {b}" for a, b in pairs])
    assert len(tokens) == 151_936 and len(pairs) == 151_387
    start = time.perf_counter()
    ids = Tokenizer.from_metadata(metadata).encode("the whole vocabulary<|extra_3|>", parse_special=True)
    assert time.perf_counter() - start < 3
    assert tokens[ids[-1]] == "<|extra_3|>"


def test_refusals_name_what_was_found():
    with pytest.raises(UnsupportedModelError, match="'llama-bpe', built here: qwen2, qwen35"):
        bard(**{"tokenizer.ggml.pre": "llama-bpe"})
    forced = Tokenizer.from_metadata(read_metadata(BARD) | {"tokenizer.ggml.pre": "llama-bpe"}, forced=True)
    assert forced.encode("To be, 1234") == BARD_TOKENIZER.encode("To be, 1234")
    with pytest.raises(UnsupportedModelError, match="is 'llama', expected 'gpt2'"):
        bard(**{"tokenizer.ggml.model": "llama"})
    with pytest.raises(UnsupportedModelError, match="'none'"):
        Tokenizer.from_metadata({})


@pytest.mark.parametrize("changes, message", [
    ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "tokens 0 and 2 have the same text 'a'"),
    ({"tokenizer.ggml.tokens": None}, "key tokenizer.ggml.tokens is missing"),
    ({"tokenizer.ggml.merges": None}, "key tokenizer.ggml.merges is missing"),
    ({"tokenizer.ggml.token_type": [1, 1]}, "has 2 entries, expected 2048"),
    ({"tokenizer.ggml.bos_token_id": 5000, "tokenizer.ggml.add_bos_token": True},
     "bos_token_id is 5000, the vocabulary has 2048 tokens"),
    ({"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.add_eos_token": True}, "key tokenizer.ggml.eos_token_id is missing"),
    ({"tokenizer.ggml.token_type": [6] * 2048}, "token 64 is of type BYTE and its text is 'a'"),
])
def test_a_file_that_lies_is_told_so(changes, message):
    tokenizer = bard(**changes)
    with pytest.raises(GgufError, match=message):
        tokenizer.decode(tokenizer.encode("a"))


@pytest.mark.parametrize("token", [-1, 2048])
def test_ids_outside_the_vocabulary_are_refused(token):
    with pytest.raises(OptionError, match=f"token id {token} is outside the vocabulary of 2048 tokens"):
        BARD_TOKENIZER.decode([token])
    with pytest.raises(OptionError, match="2048 tokens"):
        BARD_TOKENIZER.stream().push(token)
