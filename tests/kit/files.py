"""GGUF files through gguf-py: plain metadata, float64 arrays, crafted copies."""

import gguf
import numpy as np

from qwen3next_ggml.reference import ReferenceModel, hparams_from_metadata


def read_metadata(path):
    """Return key to plain Python value, every key of the file."""
    fields = gguf.GGUFReader(path).fields
    return {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}


def read_arrays(path):
    """Return tensor name to dequantised float64 array in numpy order."""
    tensors = gguf.GGUFReader(path).tensors
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64) for t in tensors}


def reference_of(path, **options):
    """Return the float64 model of a file; options go to `ReferenceModel`."""
    return ReferenceModel(hparams_from_metadata(read_metadata(path)), read_arrays(path), **options)


def write_gguf(path, metadata, arrays):
    """Write float32 tensors and metadata to a new file; integers become uint32, lists take gguf-py's own types."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        if key != "general.architecture":
            (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)
    for name, array in arrays.items():
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
