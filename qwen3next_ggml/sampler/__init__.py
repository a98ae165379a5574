"""From logits to a token: llama.cpp's sampling chain on numpy arrays (level 10).

Names, defaults, order and random draws are llama.cpp's (common/common.h, src/llama-sampler.cpp), so one seed gives one text in
both. Knows nothing of models, tokenizers or text.
"""

from .chain import Sampler
from .filters import Candidates, Proposal
from .params import SamplerParams

__all__ = ["Candidates", "Proposal", "Sampler", "SamplerParams"]
