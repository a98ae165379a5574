"""Two runs of the same tokens, joined node by node: where they part first, and which line of Python made that node (level 11).

Also the op behind a difference as a script of its own, and every op of our graphs against float64 (`ops`). Knows nothing of
terminals or options.
"""

from .apart import look_apart, record_apart
from .compare import Comparison, Joined, compare, nmse
from .one_op import OneOp
from .pairs import cut_like, providers, reference_of, sweep
from .recording import Recording, Value
from .plot import plot
from .shrink import shrink
from .sides import FLOAT64, LLAMA, SESSION, Run, record

__all__ = [
    "FLOAT64",
    "LLAMA",
    "SESSION",
    "Comparison",
    "Joined",
    "OneOp",
    "Recording",
    "Run",
    "Value",
    "compare",
    "cut_like",
    "look_apart",
    "nmse",
    "plot",
    "providers",
    "record",
    "record_apart",
    "reference_of",
    "shrink",
    "sweep",
]
