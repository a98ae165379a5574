"""`python -m qwen3next_ggml.cli` (level 12)."""

from . import main

main()
