"""One colour per scope, the same in every drawing (level 7)."""

FILL = {
    "embd": "#dfe3e8", "attn": "#f9d5a7", "delta-net": "#bfdcf5", "router": "#f6c6d0", "experts": "#c9e7c3", "shared": "#e3eeb0",
    "ffn": "#e6e0f3", "mtp": "#f3e3a3", "head": "#d5d5ea",
}  # fmt: skip
