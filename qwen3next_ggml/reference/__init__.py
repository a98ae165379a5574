"""The whole model in float64 numpy, one token at a time: the judge of every other path (level 0).

`kit` holds the formulas, one file per architecture the walk. Slow on purpose; knows no ggml, no files and no batches.
"""

from .hparams import HParams, Rope, hparams_from_metadata
from .layer import STATES
from .qwen3next import ReferenceModel
from .ubatch import ubatch_values

__all__ = ["STATES", "HParams", "ReferenceModel", "Rope", "hparams_from_metadata", "ubatch_values"]
