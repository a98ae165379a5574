"""Shared test kit: distances, files as float64 arrays, greedy text under the near-tie rule, children, dirty memory.

Reads files with gguf-py's own reader and dequantiser, never with ours, so that a test has a second opinion.
"""

from .dirt import poison
from .distance import assert_same_greedy, max_abs, nmse, top2_gap
from .files import read_arrays, read_metadata, reference_of, write_gguf
from .process import run_python, run_qgraph
from .state import apart, count_runs, digest, halves, same
from .toys import Toys

__all__ = [
    "Toys",
    "apart",
    "assert_same_greedy",
    "count_runs",
    "digest",
    "halves",
    "max_abs",
    "nmse",
    "poison",
    "read_arrays",
    "read_metadata",
    "reference_of",
    "run_python",
    "run_qgraph",
    "same",
    "top2_gap",
    "write_gguf",
]
