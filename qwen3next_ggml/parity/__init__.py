"""Two runs of the same tokens, joined node by node: where they part first, and which line of Python made that node (level 11).

Also every op of our graphs against float64 (`ops`). Knows nothing of terminals or options.
"""

from .apart import record_apart
from .compare import Comparison, Joined, compare, nmse
from .pairs import reference_of, sweep
from .recording import Recording, Value
from .sides import FLOAT64, LLAMA, SESSION, Run, record

__all__ = [
    "FLOAT64",
    "LLAMA",
    "SESSION",
    "Comparison",
    "Joined",
    "Recording",
    "Run",
    "Value",
    "compare",
    "nmse",
    "record",
    "record_apart",
    "reference_of",
    "sweep",
]
