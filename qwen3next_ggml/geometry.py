"""A model of a published shape without any file: hyperparameters and tensors from declarations (level 10).

Its tensors have no data, so graphs can be built of it and nothing can be decoded.
"""

from __future__ import annotations

from math import prod
from types import MappingProxyType

from . import ggml as ggml_layer
from . import models
from .errors import OptionError
from .ggml import GgmlType, types
from .gguf_file import TensorInfo
from .hparams import Metadata
from .machine import available_cpus
from .model import Model
from .tensors import Decl, TensorTable, load_weights


class Declared:
    """What `load_weights` reads of a file, made from declarations: metadata and tensor infos."""

    def __init__(self, name: str, arch: str, values: dict, decls: list[Decl], type: GgmlType):
        self.path, self.arch, self.metadata, self.notes, self.shards = name, arch, MappingProxyType(values), [], []
        infos = ((decl, stored_type(decl, type)) for decl in decls)
        self.tensors = {
            decl.name: TensorInfo(decl.name, t.id, t.name, decl.ne, 0, prod(decl.ne[1:]) * t.row_size(decl.ne[0]), 0) for decl, t in infos
        }

    def close(self) -> None:
        """Do nothing: there is no file."""


def stored_type(decl: Decl, type: GgmlType) -> GgmlType:
    """Return the type a tensor is stored in when matrices are of `type`, as llama.cpp's quantiser does.

    Vectors, convolutions and routers stay F32; rows that do not fill whole blocks become F16.
    """
    if decl.op is None or len(decl.ne) == 1 or "ffn_gate_inp" in decl.name:
        return types.F32
    return types.F16 if decl.ne[0] % type.block_size else type


def model_of(
    geometry: str, *, arch: str = "qwen3next", type: str = "bf16", n_layer: int | None = None, mtp: bool = False,
    device: str = "CPU", ggml: str | None = None,
) -> Model:  # fmt: skip
    """Return a model in the shape `geometry` (a name of the architecture's GEOMETRY) with matrices of `type`.

    `n_layer` blocks instead of the published number, and a NextN block with `mtp`. Raises OptionError for a name that does not exist.
    """
    module = models.find(arch)
    if geometry not in module.GEOMETRY:
        raise OptionError(f"geometry {geometry!r}, expected one of {', '.join(module.GEOMETRY)}")
    ggml_layer.provider(ggml)
    md = Metadata(dict(module.TINY), module.ARCH)
    md.values.update({md.key(name): value for name, value in module.GEOMETRY[geometry].items()})
    md.values[md.key("block_count")] = (n_layer or md.values[md.key("block_count")]) + mtp
    md.values[md.key("nextn_predict_layers")] = int(mtp)
    hp = module.load_arch_hparams(md)
    table = TensorTable()
    module.load_arch_tensors(table, hp)
    decls = [decl for decl in table.layout() if decl.required or decl.attribute == "output"]
    file = Declared(geometry, module.ARCH, md.values, decls, GgmlType.of(type))
    devices = [ggml_layer.device(device)]
    weights = load_weights(file, table, devices, mmap="auto", data=False)
    return Model(file, module, hp, weights, devices, available_cpus(), computes=False)
