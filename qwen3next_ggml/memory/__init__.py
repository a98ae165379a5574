"""What lives between two graph runs (level 6)."""

from .hybrid import MIB, HybridMemory, Plan, available_memory

__all__ = ["MIB", "HybridMemory", "Plan", "available_memory"]
