"""Which part of the model a node belongs to, told by llama.cpp's names (level 7).

A node without a name of its own goes with whatever reads it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

ATTN, DELTA_NET, ROUTER, EXPERTS, SHARED, FFN, MTP, HEAD, EMBD = (
    "attn", "delta-net", "router", "experts", "shared", "ffn", "mtp", "head", "embd",
)  # fmt: skip
SCOPES = (EMBD, ATTN, DELTA_NET, ROUTER, EXPERTS, SHARED, FFN, MTP, HEAD)

OUTSIDE_LAYERS = {"model.embed_tokens": EMBD, "h_nextn": HEAD, "result_norm": HEAD, "result_output": HEAD}
ROUTING = ("logits", "probs", "argsort", "topk", "weights")
SHARED_NAMES = ("ffn_up", "ffn_gate", "ffn_swiglu", "ffn_shexp", "shared_expert_gate")
FFN_NAMES = frozenset({"attn_post_norm", "ffn_out", "post_moe", "l_out"})
# what ggml adds to the name of a tensor it derives another one from, and a patch to what it replaces
DERIVED = re.compile(r" \((before patch|view|reshaped|permuted|transposed|cont|copy|copy of .*)(\)|$)")
NAMED = re.compile(r"(?P<base>.+?)-(?P<layer>\d+)")
CACHE = re.compile(r"cache_(?P<kind>[krsv])_l(?P<layer>\d+)")

Place = tuple[int | None, str]


def place(name: str, recurrent: Sequence[bool], mtp: bool) -> Place | None:
    """Return layer and scope of a node called `name`, None when the name does not say; `recurrent[il]` is the layer's kind."""
    name = DERIVED.sub("", name)
    if cache := CACHE.fullmatch(name):
        return int(cache["layer"]), MTP if mtp else ATTN if cache["kind"] in "kv" else DELTA_NET
    if name in OUTSIDE_LAYERS:
        return (None, OUTSIDE_LAYERS[name])
    named = NAMED.fullmatch(name)
    # several values of a layer are called norm; which one it is shows in what reads it
    if not named or named["base"] == "norm":
        return None
    il = int(named["layer"])
    return il, MTP if mtp else _in_layer(named["base"], recurrent[il])


def _in_layer(base: str, recurrent: bool) -> str:
    if base.startswith("ffn_moe_"):
        return ROUTER if base.removeprefix("ffn_moe_").startswith(ROUTING) else EXPERTS
    if base in FFN_NAMES:
        return FFN
    if base.startswith(SHARED_NAMES):
        return SHARED
    return DELTA_NET if recurrent else ATTN


def places(names: Sequence[str], sources: Sequence[Sequence[int | str]], recurrent: Sequence[bool], mtp: bool) -> list[Place]:
    """Return layer and scope of every node; sources are places in the list, or names of leaves.

    An unnamed node takes after its first reader, a write that nobody reads after what it writes or writes to.
    """
    found = [place(name, recurrent, mtp) for name in names]
    first_reader: dict[int, int] = {}
    for i, mine in enumerate(sources):
        for source in mine:
            if isinstance(source, int):
                first_reader.setdefault(source, i)
    for i in reversed(range(len(names))):
        if found[i] is None and i in first_reader:
            found[i] = found[first_reader[i]]
    for i, mine in enumerate(sources):
        if found[i] is None:
            written = (found[s] if isinstance(s, int) else place(s, recurrent, mtp) for s in mine)
            found[i] = next((p for p in written if p), None)
    # a chain that ends in such a write
    for i in reversed(range(len(names))):
        if found[i] is None:
            found[i] = found[first_reader[i]] if i in first_reader else (None, HEAD)
    return found
