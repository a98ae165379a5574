"""Load a model: file, architecture and weights on devices (level 9). Makes sessions; evaluates nothing."""

import os
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

from . import ggml as ggml_layer
from . import models
from .errors import OptionError, StateError, check_count
from .gguf_file import GgufFile, fingerprint
from .hparams import Metadata
from .machine import available_cpus
from .session import Session
from .session_file import SessionFile, check_model, open_session_file, restore, restore_sampler
from .surgery import RelayeredWeights, chosen_layers, relayered
from .tensors import TensorTable, load_weights

if TYPE_CHECKING:
    from .chat import ChatTemplate
    from .tokenizer import Tokenizer


def embedded_model() -> Path:
    """Return the path of the model that ships with the package."""
    return Path(str(resources.files(__package__) / "data" / "bard.gguf"))


def load(
    path: str | os.PathLike | None = None, *, device: str | Sequence[str] = "CPU", n_threads: int | None = None,
    ggml: str | None = None, load_mtp: bool = True, weights: bool = True, repack: bool | str = "auto", mmap: bool | str = "auto",
    layers: Sequence[int] | None = None, skip: Sequence[int] = (),
) -> "Model":  # fmt: skip
    """Load a GGUF file (any shard of a set; no path: the embedded model).

    `device` is a ggml device name or a list over which layers are spread evenly; `ggml` selects the provider;
    `repack` rewrites matrices for the CPU's own kernels, which costs time and a copy: True, False, "auto" (where it was measured
    to pay) or kinds such as "dense+head"; `mmap=False` copies the others into memory, in huge pages where the system has
    them, "auto" does so for small files, and for what every step reads whole; `weights=False` reads metadata only.
    `layers` lists the layers to run in order, `skip` those to leave out, both by their numbers in the file: the model's layers
    are then numbered anew, a repeated one has a state of its own, and there is no NextN block.
    Raises GgufError, UnsupportedModelError, TensorError, BackendError, OptionError.
    """
    if n_threads is not None:
        check_count("n_threads", n_threads, 1)
    ggml_layer.provider(ggml)
    names = [device] if isinstance(device, str) else list(device)
    if not names:
        raise OptionError("device: the list is empty")
    devices = [ggml_layer.device(name) for name in names]
    file = GgufFile.open(path or embedded_model())
    try:
        arch = models.find(file.arch)
        hp = arch.load_arch_hparams(Metadata(file.metadata, file.arch))
        table = TensorTable()
        chosen = chosen_layers(hp, layers, skip)
        arch.load_arch_tensors(table, hp, load_mtp=load_mtp and chosen is None)
        n_threads, repack = n_threads or available_cpus(), repack if weights else False
        loaded = load_weights(file, table, devices, repack=repack, mmap=mmap, data=weights, n_threads=n_threads)
    except BaseException:
        file.close()
        raise
    if chosen is not None:
        hp, loaded = relayered(hp, chosen), RelayeredWeights(loaded, chosen)
    return Model(file, arch, hp, loaded, devices, n_threads, computes=weights, layers=chosen)


class Model:
    """A loaded model: `hparams`, `weights`, `tokenizer`, `chat_template`, and `session()`.

    `layers` are the file's layers in the order they run, None for the file's own order.
    """

    def __init__(self, file, arch, hparams, weights, devices, n_threads, *, computes: bool = True, layers: tuple[int, ...] | None = None):
        self.file = file
        self.arch = arch
        self.hparams = hparams
        self.weights = weights
        self.devices = devices
        self.layer_devices = [weights.device_of(il) for il in range(hparams.n_layer_all)]
        self.n_threads = n_threads
        self.layers = layers
        self._computes = computes
        self._closed = False
        self._sessions: WeakSet[Session] = WeakSet()

    @property
    def tensors(self) -> dict:
        """Name → what the file says of a tensor: type, shape, place."""
        return self.file.tensors

    # text is brought in on first use: whoever decodes token ids does not wait for it
    @cached_property
    def tokenizer(self) -> "Tokenizer":
        from .tokenizer import Tokenizer

        return Tokenizer.from_metadata(self.file.metadata)

    @cached_property
    def chat_template(self) -> "ChatTemplate":
        from .chat import ChatTemplate

        return ChatTemplate.from_metadata(self.file.metadata)

    @cached_property
    def fingerprint(self) -> str:
        """What tells this model from others in a session file."""
        whole = fingerprint(self.file)
        return whole if self.layers is None else sha256(f"{whole} {self.layers}".encode()).hexdigest()

    @cached_property
    def tiles_experts(self) -> bool:
        """Say whether ggml multiplies the experts by tiles of many tokens."""
        experts, weights = self.weights.blk[0].ffn_down_exps, self.weights
        stored = experts.type.name in weights.policy.tiled and weights.placed[experts.name] != "repacked"
        return stored and all(device.kind == "cpu" for device in self.devices)

    def device_index(self, il: int) -> int:
        """Return which of `devices` layer `il` lives on."""
        return self.devices.index(self.layer_devices[il])

    def session(self, **options) -> Session:
        """Return a new Session; options as there. Raises OptionError for a model loaded with weights=False, StateError for a closed one."""
        if self._closed:
            raise StateError(f"the model {self.file.path} is closed")
        if not self._computes:
            raise OptionError("the model was loaded with weights=False; load it with its weights to compute")
        session = Session(self, **options)
        self._sessions.add(session)
        return session

    def load_session(self, path: str | os.PathLike | SessionFile, *, sampler=None, **changes) -> Session:
        """Return a session that goes on where the saved one was; `changes` are options that shall differ from its own.

        K and V are converted where their type differs; `sampler` goes on where the one was that was saved with it. Raises
        StateError for a damaged file, another model's session, or one that does not fit; else what `session` raises.
        """
        saved = path if isinstance(path, SessionFile) else open_session_file(path)
        check_model(saved, self)
        session = self.session(**saved.options | changes)
        try:
            restore(saved, session)
            if sampler is not None:
                restore_sampler(saved, sampler)
        except BaseException:
            session.close()
            raise
        return session

    def close(self) -> None:
        """Close the sessions that are open, free the weights and unmap the file; a second call does nothing."""
        self._closed = True
        for session in list(self._sessions):
            session.close()
        self.weights.close()
        self.file.close()

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_) -> None:
        self.close()
