"""How well a model predicts a text, and how far it is from another one, in llama.cpp's figures (level 11).

Works on logits in float64. Knows nothing of graphs, terminals or options.
"""

from .divergence import Comparison, compare, join, statistics
from .logits_file import LogitsFile, LogitsWriter
from .scores import Mean, mean, negative_log_likelihood, perplexity
from .windows import Windows, evaluate, read_tokens

__all__ = [
    "Comparison",
    "LogitsFile",
    "LogitsWriter",
    "Mean",
    "Windows",
    "compare",
    "evaluate",
    "join",
    "mean",
    "negative_log_likelihood",
    "perplexity",
    "read_tokens",
    "statistics",
]
