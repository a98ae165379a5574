"""What lives between two graph runs (level 6)."""

from .hybrid import HybridMemory, Plan, available_memory

__all__ = ["HybridMemory", "Plan", "available_memory"]
