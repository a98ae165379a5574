"""The options that commands share, spelled as llama.cpp spells them (level 12).

A decorator adds one group of options and hands the command one frozen value for all of them. Most options fall back on
$QGRAPH_<NAME>, then $LLAMA_ARG_<NAME>. Importing this file loads neither numpy nor ggml.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import click

from .output import note

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
GRAPHS = ("auto", "plain", "lean")
DELTA_NETS = ("auto", "fused", "chunked", "autoregressive")


def option(*spelling: str, env: str | None = None, **settings) -> Callable:
    """Return a click option that shows its default and falls back on the variables of `env`; a number's place is N."""
    kind = settings.get("type", type(settings.get("default")))
    defaults = {"show_default": settings.get("default") is not None and not any("/" in name for name in spelling)}
    if kind in (int, float) or isinstance(kind, click.IntRange):
        defaults["metavar"] = "N"
    variables = [f"QGRAPH_{env}", f"LLAMA_ARG_{env}"] if env else None
    return click.option(*spelling, envvar=variables, **defaults | settings)


def grouped(name: str, make: Callable, *parameters: Callable) -> Callable:
    """Return a decorator that adds `parameters` and passes `make(**their values)` to the command as `name`."""

    def decorate(command: Callable) -> Callable:
        @functools.wraps(command)
        def call(**given):
            values = {key: given.pop(key) for key in keys}
            return command(**{name: make(**values)}, **given)

        n_before = len(getattr(command, "__click_params__", ()))
        for parameter in reversed(parameters):
            call = parameter(call)
        keys = [parameter.name for parameter in call.__click_params__[n_before:]]
        return call

    return decorate


def given(name: str) -> bool:
    """Say whether a parameter of the command that runs has its value from outside: the command line or a variable."""
    source = click.get_current_context().get_parameter_source(name)
    return source in (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT)


class Switch(click.ParamType):
    """on, off or auto, with llama.cpp's other words for them."""

    name = "switch"
    words = {"on": "on", "1": "on", "true": "on", "off": "off", "0": "off", "false": "off", "auto": "auto"}

    def convert(self, value, param, ctx):
        return self.words.get(value.lower()) or self.fail(f"{value!r} is not one of on, off, auto", param, ctx)


class Listed(click.ParamType):
    """A comma-separated list of another type, as a tuple."""

    name = "list"

    def __init__(self, of: click.ParamType):
        self.of = of

    def get_metavar(self, param, ctx=None):
        return "N,…" if isinstance(self.of, click.IntRange) else "NAME,…"

    def convert(self, value, param, ctx):
        return value if isinstance(value, tuple) else tuple(self.of.convert(one, param, ctx) for one in value.split(","))


json_option = click.option("--json", "as_json", is_flag=True, help="put one JSON document on the last line of stdout")
provider_option = click.option(
    "--ggml", metavar="NAME|DIR",
    help="where libggml comes from: ggml_python, llama_cpp, libggml or a folder  [default: $QGRAPH_GGML or ggml_python]",
)  # fmt: skip


# the file


def _path(model: str | None, model_option: str | None) -> str | None:
    source = click.get_current_context().get_parameter_source("model_option")
    if model and model_option and source is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError(f"the model was given twice: {model} and -m {model_option}")
    return model or model_option


path_parameters = (
    click.argument("model", required=False),
    option("-m", "--model", "model_option", metavar="FNAME", env="MODEL",
           help="the same as MODEL: a GGUF file, or any file of a split set  [default: the embedded model]"),
)  # fmt: skip

path_options = grouped("path", _path, *path_parameters)


def opened(path: str | None):
    """Return the open GgufFile, the embedded model's without a path."""
    from ..gguf_file import GgufFile

    if path is None:
        from ..model import embedded_model

        path = embedded_model()
    return GgufFile.open(path)


# the model, and where it runs


LAYER_LIST = Listed(click.IntRange(min=0))
layer_parameters = (
    option("--layers", "layer_list", type=LAYER_LIST, metavar="N,…",
           help="the file's layers to run, in this order; one given twice has a state for each  [default: all]"),
    option("--skip", type=LAYER_LIST, metavar="N,…", help="the file's layers to leave out"),
)  # fmt: skip


@dataclass(frozen=True)
class ModelOptions:
    """Which file with which of its layers, on which devices of which libggml."""

    path: str | None
    device: str
    layer_list: tuple[int, ...] | None
    skip: tuple[int, ...] | None
    ggml: str | None
    repack: bool | None = None
    mmap: bool | None = None

    def load(self, **changes):
        """Return the loaded Model; `changes` are options of `load` that a command sets itself."""
        from .. import ggml
        from ..model import load

        ggml.provider(self.ggml)
        names = _device_names(self.device)
        if self.device == "auto":
            note(f"device: {', '.join(names)}")
        where = dict(device=names, layers=self.layer_list, skip=self.skip or ())
        how = {name: "auto" if value is None else value for name, value in (("repack", self.repack), ("mmap", self.mmap))}
        return load(self.path, **where | how | changes)


def _device_names(wanted: str) -> list[str]:
    from .. import ggml

    if wanted == "auto":
        return [device.name for device in ggml.devices() if device.kind in ("gpu", "igpu")] or ["CPU"]
    return ["CPU"] if wanted == "none" else [name.strip() for name in wanted.split(",")]


def _model(model, model_option, list_devices, **values) -> ModelOptions:
    if list_devices:
        from .devices import list_devices

        list_devices(values["ggml"])
        raise click.exceptions.Exit(0)
    return ModelOptions(path=_path(model, model_option), **values)


device_parameters = (
    option("-dev", "--device", default="CPU", metavar="DEV,…", env="DEVICE",
           help="devices the layers are spread over; auto: all GPUs, or the CPU; none: the CPU"),
    option("--list-devices", is_flag=True, help="list the devices and exit"),
)  # fmt: skip

# for a command that varies how the file is loaded
placed_model_options = grouped("model", _model, *path_parameters, *device_parameters, *layer_parameters, provider_option)

model_options = grouped(
    "model", _model, *path_parameters, *device_parameters, *layer_parameters,
    option("--repack/--no-repack", " /-nr", default=None, env="REPACK",
           help="rewrite matrices for the CPU's own kernels at load, which takes time and a copy  [default: where it was measured to pay]"),
    option("--mmap/--no-mmap", default=None, env="MMAP",
           help="leave weights in the mapped file, or copy them into memory, in huge pages where the system has them  "
                "[default: copy small files, and what every step reads whole]"),
    provider_option,
)  # fmt: skip


# the session


@dataclass(frozen=True)
class SessionOptions:
    """The size of a session's state and the graph it computes with."""

    n_ctx: int
    n_batch: int
    n_ubatch: int | None
    n_threads: int | None
    type_k: str
    type_v: str
    flash_attn: str
    kv_offload: bool
    graph: str
    delta_net: str

    def open(self, model, **more):
        """Return a new Session of `model`; `more` are options a command sets itself."""
        return model.session(**self.settings(), **more)

    def resume(self, model, saved, **more):
        """Return the Session of a SessionFile, with the options it had but for those that were given."""
        said_as = {"n_ubatch": ("n_ubatch", "n_batch"), "kv_device": ("kv_offload",)}
        changes = {name: value for name, value in self.settings().items() if any(map(given, said_as.get(name, (name,))))}
        return model.load_session(saved, **changes | more)

    def settings(self) -> dict:
        """Return these options as `Model.session` spells them."""
        from ..batch import MAX_UBATCH, N_UBATCH

        left_to_it = self.n_ubatch is None and self.n_batch >= MAX_UBATCH
        return dict(
            n_ctx=self.n_ctx, n_ubatch=None if left_to_it else min(self.n_batch, self.n_ubatch or N_UBATCH), n_threads=self.n_threads,
            type_k=self.type_k, type_v=self.type_v, flash_attn=self.flash_attn, kv_device=None if self.kv_offload else "CPU", graph=self.graph,
            delta_net=self.delta_net,
        )  # fmt: skip


graph_parameters = (
    option("--graph", type=click.Choice(GRAPHS), default="auto", env="GRAPH",
           help="plain: llama.cpp's own graph; lean: the same result from fewer nodes"),
    option("--delta-net", type=click.Choice(DELTA_NETS), default="auto", env="DELTA_NET", help="form of the delta rule"),
)  # fmt: skip


def sized_session_options(*, n_ctx: int) -> Callable:
    """Return the decorator for a command whose context holds `n_ctx` tokens unless -c says otherwise."""
    return grouped(
        "session", SessionOptions,
        option("-c", "--ctx-size", "n_ctx", type=click.IntRange(min=0), default=n_ctx, env="CTX_SIZE",
               help="tokens the context holds; 0: as many as the model was trained on"),
        option("-b", "--batch-size", "n_batch", type=click.IntRange(min=1), default=2048, env="BATCH", help="upper limit of -ub"),
        option("-ub", "--ubatch-size", "n_ubatch", type=click.IntRange(min=1), env="UBATCH",
               help="tokens computed at once  [default: 512, or up to 2048 where ggml's kernels for many experts need them]"),
        option("-t", "--threads", "n_threads", type=click.IntRange(min=1), env="THREADS",
               help="CPU threads  [default: all this process may use]"),
        option("-ctk", "--cache-type-k", "type_k", type=click.Choice(CACHE_TYPES), default="f16", env="CACHE_TYPE_K",
               help="type of the K cache"),
        option("-ctv", "--cache-type-v", "type_v", type=click.Choice(CACHE_TYPES), default="f16", env="CACHE_TYPE_V",
               help="type of the V cache"),
        option("-fa", "--flash-attn", "flash_attn", type=Switch(), default="auto", metavar="on|off|auto", env="FLASH_ATTN",
               help="flash attention"),
        option("--kv-offload/--no-kv-offload", "-kvo/-nkvo", default=True, env="KV_OFFLOAD",
               help="keep K, V and recurrent states with their layers, or on the CPU, which then computes what reads and writes them"
                    "  [default: with the layers]"),
        *graph_parameters,
    )  # fmt: skip


session_options = sized_session_options(n_ctx=4096)
