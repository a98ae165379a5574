"""Every option that is accepted acts, every other one is a usage error, and variables stand in for options."""

from dataclasses import replace

import pytest

import qwen3next_ggml.generate
import qwen3next_ggml.model
from qwen3next_ggml.sampler import SamplerParams
from tests.kit import run_python

SAMPLING = {
    "--seed": ("seed", 9), "--temp": ("temp", 0.5), "--top-k": ("top_k", 7), "--top-p": ("top_p", 0.6), "--min-p": ("min_p", 0.2),
    "--typical": ("typ_p", 0.9), "--top-nsigma": ("top_n_sigma", 2.0), "--xtc-probability": ("xtc_probability", 0.3),
    "--xtc-threshold": ("xtc_threshold", 0.2), "--repeat-penalty": ("penalty_repeat", 1.3), "--repeat-last-n": ("penalty_last_n", 5),
    "--presence-penalty": ("penalty_present", 0.1), "--frequency-penalty": ("penalty_freq", 0.4), "--samplers": ("samplers", "top_k;temperature"),
}  # fmt: skip
SESSION = {
    "-c": ("n_ctx", 512), "-ub": ("n_ubatch", 64), "-b": ("n_ubatch", 32), "-t": ("n_threads", 2), "-ctk": ("type_k", "bf16"),
    "-ctv": ("type_v", "f32"), "-fa": ("flash_attn", "off"), "--graph": ("graph", "plain"), "--delta-net": ("delta_net", "chunked"),
}  # fmt: skip


@pytest.fixture
def handed(monkeypatch):
    """What the command hands to `load`, to a session and to `stream_generate`, in one dict; of a sampler its `params`."""
    seen = {}

    def watch(module, name):
        function = getattr(module, name)

        def watched(*args, **options):
            seen.update(options)
            if "sampler" in options:
                seen["params"] = options["sampler"].params
            return function(*args, **options)

        monkeypatch.setattr(module, name, watched)

    watch(qwen3next_ggml.model, "load")
    watch(qwen3next_ggml.model, "Session")
    watch(qwen3next_ggml.generate, "stream_generate")
    return seen


def test_defaults_are_llama_cpps(qgraph, handed):
    qgraph("run", "-n", 1, env={"QGRAPH_THREADS": ""})
    assert replace(handed["params"], seed=-1) == SamplerParams(seed=-1)
    assert {key: handed[key] for key in ("n_ubatch", "type_k", "type_v", "flash_attn", "n_threads", "repack")} == {
        "n_ubatch": None, "type_k": "f16", "type_v": "f16", "flash_attn": "auto", "n_threads": None, "repack": "auto",
    }  # fmt: skip


def test_where_the_state_is_kept(qgraph, handed, tmp_path):
    saved = tmp_path / "s.qstate"
    for flags, device in (((), None), (("-kvo",), None), (("-nkvo",), "CPU"), (("--no-kv-offload", "--session", saved), "CPU")):
        assert qgraph("run", "-n", 1, *flags).exit_code == 0
        assert handed["kv_device"] == device
    # a saved session stays where it was unless told otherwise
    for flags, device in (((), "CPU"), (("-kvo",), None)):
        qgraph("run", "-n", 1, "--session", saved, *flags)
        assert handed["kv_device"] == device


def test_every_sampling_option_acts(qgraph, handed):
    for flag, (name, value) in SAMPLING.items():
        assert qgraph("run", "-n", 1, flag, value).exit_code == 0
        assert getattr(handed["params"], name) == value != getattr(SamplerParams(), name), flag
    qgraph("run", "-n", 1, "--logit-bias", "5+2.5", "-l", "6-inf")
    assert handed["params"].logit_bias == {5: 2.5, 6: -float("inf")}
    qgraph("run", "-n", 1, "-c", 512, "--repeat-last-n", -1)
    assert handed["params"].penalty_last_n == 512


def test_every_session_option_acts(qgraph, handed):
    for flag, (name, value) in SESSION.items():
        assert qgraph("run", "-n", 1, flag, value).exit_code == 0
        assert handed[name] == value, flag


def test_every_model_option_acts(qgraph, handed):
    qgraph("run", "-n", 1, "--repack")
    assert handed["repack"] is True
    for off in ("--no-repack", "-nr"):
        qgraph("run", "-n", 1, "--repack", off)
        assert handed["repack"] is False
    assert handed["mmap"] == "auto"
    qgraph("run", "-n", 1, "--no-mmap")
    assert handed["mmap"] is False
    for device in ("CPU", "none", "auto", "cpu"):
        result = qgraph("run", "-n", 1, "-dev", device)
        assert [name.upper() for name in handed["device"]] == ["CPU"]
        assert ("device: CPU\n" in result.stderr) == (device == "auto")


def test_layers_are_chosen_wherever_a_model_is_loaded(qgraph, handed, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 40)
    for args in (("run", "-n", 1), ("trace", "-p", "hi", "-o", tmp_path / "t"), ("bench", "-p", 2, "-n", 0, "-r", 1), ("graph",),
                 ("ppl", "-f", text, "-c", 256, "--chunks", 1)):  # fmt: skip
        handed.clear()
        assert qgraph(*args, "--layers", "0,1,2,2,3", "--skip", "1").exit_code == 0
        assert (handed["layers"], handed["skip"]) == ((0, 1, 2, 2, 3), (1,)), args


@pytest.mark.parametrize(
    "args, code, said",
    [
        (("run", "-n", 1, "--skip", 8), 1, "error: skip: there is no layer 8; the model has 0 to 7\n"),
        (("graph", "--layers", 0, "--skip", 0), 1, "error: layers=(0,) and skip=[0] leave no layer of 8\n"),
        (("run", "--layers", "0,x"), 2, "'x' is not a valid integer"),
        (("graph", "--geometry", "qwen3-next-80b", "--layers", 0), 2, "--geometry has none"),
    ],
)
def test_layers_that_cannot_be(qgraph, args, code, said):
    result = qgraph(*args)
    assert result.exit_code == code and said in result.stderr and result.stdout == ""


@pytest.mark.parametrize("word, meaning", [("on", "on"), ("1", "on"), ("TRUE", "on"), ("off", "off"), ("0", "off"), ("auto", "auto")])
def test_words_for_flash_attention(qgraph, handed, word, meaning):
    qgraph("run", "-n", 1, "-fa", word)
    assert handed["flash_attn"] == meaning


def test_variables_stand_in_for_options(qgraph, handed):
    env = {"LLAMA_ARG_CTX_SIZE": "512", "LLAMA_ARG_TOP_K": "3", "LLAMA_ARG_FLASH_ATTN": "off", "QGRAPH_SEED": "4", "LLAMA_ARG_N_PREDICT": "2"}
    qgraph("run", env=env)
    assert (handed["n_ctx"], handed["params"].top_k, handed["flash_attn"], handed["params"].seed, handed["n_predict"]) == (512, 3, "off", 4, 2)
    qgraph("run", env=env | {"QGRAPH_CTX_SIZE": "768"})
    assert handed["n_ctx"] == 768
    qgraph("run", "-c", 256, env=env | {"QGRAPH_CTX_SIZE": "768"})
    assert handed["n_ctx"] == 256


def test_where_the_model_is_named(qgraph, toys, bard):
    def path(*args, env=None):
        result = qgraph("run", *args, "-p", "hi", "-n", 1, "-v", env=env)
        assert result.exit_code == 0
        return result.stderr.split(":")[0]

    assert path() == str(bard)
    assert path(toys.t0) == path("-m", toys.t0) == path("--model", toys.t0) == path(env={"LLAMA_ARG_MODEL": str(toys.t0)}) == str(toys.t0)
    assert path(toys.mtp, env={"LLAMA_ARG_MODEL": str(toys.t0)}) == str(toys.mtp)
    twice = qgraph("run", toys.t0, "-m", toys.mtp)
    assert twice.exit_code == 2 and "the model was given twice" in twice.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("-ngl", 99), ("--mlock",), ("-n", "many"), ("-fa", "perhaps"), ("-ctk", "q9"), ("--logit-bias", "5"), ("--logit-bias", "x+1"),
        ("-c", -1), ("-t", 0), ("--chat-template-kwargs", "[1]"), ("--chat-template-kwargs", "{"), ("--graph", "fat"), ("--chat-template", "chatml"),
    ],
)  # fmt: skip
def test_what_is_not_understood_exits_2(qgraph, args):
    result = qgraph("run", "-p", "hi", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: " in result.stderr and "Traceback" not in result.stderr


def test_unknown_commands_exit_2(qgraph):
    assert qgraph("fly").exit_code == 2
    for args in ((), ("run",), ("chat",), ("inspect",), ("validate",), ("devices",), ("toy",), ("bench",)):
        assert qgraph(*args, "--help").exit_code == qgraph(*args, "-h").exit_code == 0


def test_help_loads_nothing_heavy():
    done = run_python(
        "import sys\nfrom qwen3next_ggml.cli import cli\ncli(['run', '--help'], standalone_mode=False)\n"
        "print([m for m in ('numpy', 'tokenizers', 'jinja2', 'rich', 'qwen3next_ggml.ggml') if m in sys.modules])"
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_the_version_is_the_packages(qgraph):
    assert qgraph("--version").stdout == f"qgraph, version {qwen3next_ggml.__version__}\n"
