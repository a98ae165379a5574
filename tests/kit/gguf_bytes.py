"""GGUF files byte by byte, so that each can lie in exactly one place; and edited copies of good ones, through gguf-py."""

import struct

import gguf
import numpy as np

U8, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 5, 6, 7, 8, 9, 10


def u32(n):
    return struct.pack("<I", n)


def u64(n):
    return struct.pack("<Q", n)


def string(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return u64(len(raw)) + raw


def kv(key, kind, payload):
    """Return one metadata entry; payload is the value's bytes."""
    return string(key) + u32(kind) + payload


def array(kind, n, payload=b""):
    return u32(kind) + u64(n) + payload


def tensor(name, ne, type_id=0, offset=0, n_dims=None):
    """Return one entry of the tensor table."""
    dims = b"".join(map(u64, ne))
    return string(name) + u32(len(ne) if n_dims is None else n_dims) + dims + u32(type_id) + u64(offset)


def gguf_bytes(*, magic=b"GGUF", version=3, kvs=(), tensors=(), n_kv=None, n_tensors=None, alignment=32, data=b""):
    """Return a whole file; the counts may be made to differ from what follows."""
    head = magic + u32(version) + u64(len(tensors) if n_tensors is None else n_tensors)
    head += u64(len(kvs) if n_kv is None else n_kv) + b"".join(kvs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def edit_gguf(source, target, *, metadata=None, drop=(), replace=None, rename=None, add=None, split=0):
    """Copy a file with changes.

    metadata: key to value, None drops it; drop: tensor names; replace: name to (type name, array of float32 in numpy order);
    rename: old to new name; add: new tensors, name to float32 array; split: tensors a file of a split set named after `target`. Returns the files written.
    """
    reader = gguf.GGUFReader(source)
    fields = {k: (f.contents(), f.types) for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    metadata = metadata or {}
    arch = metadata.get("general.architecture") or fields.get("general.architecture", ["none"])[0]
    writer = gguf.GGUFWriter(target, arch, split_max_tensors=split)
    setters = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, (value, types) in fields.items():
        if key not in metadata and key != "general.architecture":
            writer.add_key_value(key, value, types[0], types[-1] if len(types) > 1 else None)
    for key, value in metadata.items():
        if value is not None and key != "general.architecture":
            setters[type(value)](key, value)
    for t in reader.tensors:
        if t.name in drop:
            continue
        name = (rename or {}).get(t.name, t.name)
        if t.name in (replace or {}):
            type_name, values = replace[t.name]
            kind = gguf.GGMLQuantizationType[type_name.upper()]
            raw = gguf.quants.quantize(np.ascontiguousarray(values, np.float32), kind)
            writer.add_tensor(name, raw, raw_dtype=kind)
        else:
            writer.add_tensor(name, np.array(t.data), raw_dtype=t.tensor_type)
    for name, values in (add or {}).items():
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [target] if not split else sorted(target.parent.glob(f"{target.stem}-*.gguf"))
