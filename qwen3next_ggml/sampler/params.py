"""Sampling options, checked (level 10)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real

from ..errors import OptionError

DEFAULT_SAMPLERS = "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature"
# dry is known because the default chain names it; it has no parameters here, which is its neutral value
_BUILT = tuple(DEFAULT_SAMPLERS.split(";"))
_ALIASES = {alias: name for name in _BUILT for alias in (name, name.replace("_", "-"), name.replace("_", ""))}
_ALIASES |= {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}
RANDOM_SEEDS = (None, -1, 0xFFFFFFFF)
_RANGES = {"temp": (0, math.inf), "top_p": (0, 1), "min_p": (0, 1), "typ_p": (0, 1), "xtc_probability": (0, 1),
           "xtc_threshold": (0, 1), "penalty_last_n": (0, math.inf), "min_keep": (0, math.inf)}
_WHOLE = ("seed", "top_k", "min_keep", "penalty_last_n")
_NO_NUMBERS = ("logit_bias", "samplers")


@dataclass(frozen=True, kw_only=True)
class SamplerParams:
    """Sampling options under llama.cpp's names and defaults. Raises OptionError for a value that means nothing.

    seed: None, -1 or 0xFFFFFFFF draw one. temp: 0 takes the most likely token. top_k: 0 and less keep all tokens; top_p 1, min_p 0,
    typ_p 1, top_n_sigma 0 and less, xtc_probability 0, penalty_repeat 1, penalty_freq 0 and penalty_present 0 do nothing.
    logit_bias: token id to what is added first of all, -inf forbids. samplers: names in the order applied, joined by ";".
    """

    seed: int | None = None
    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typ_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    min_keep: int = 0
    penalty_last_n: int = 64
    penalty_repeat: float = 1.0
    penalty_freq: float = 0.0
    penalty_present: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    samplers: str = DEFAULT_SAMPLERS

    def __post_init__(self):
        for option in fields(self):
            if option.name not in _NO_NUMBERS:
                self._check_number(option.name)
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not (low <= value <= high and math.isfinite(value)):
                raise OptionError(f"{name} is {value}, expected {f'{low} to {high}' if math.isfinite(high) else f'{low} or more'}")
        for name in ("penalty_freq", "penalty_present", "top_n_sigma"):
            if not math.isfinite(getattr(self, name)):
                raise OptionError(f"{name} is {getattr(self, name)}, expected a finite number")
        if not (self.penalty_repeat > 0 and math.isfinite(self.penalty_repeat)):
            raise OptionError(f"penalty_repeat is {self.penalty_repeat}, expected a finite number above 0")
        if self.seed not in RANDOM_SEEDS and not 0 <= self.seed < 2**32:
            raise OptionError(f"seed is {self.seed}, expected 0 to {2**32 - 2}, or -1 for a random one")
        for token, bias in self.logit_bias.items():
            if not isinstance(token, Integral) or not isinstance(bias, Real):
                raise OptionError(f"logit_bias has {bias!r} for {token!r}, expected a number for a token id")
            if math.isnan(bias) or bias == math.inf:
                raise OptionError(f"logit_bias of token {token} is {bias}, expected a number or -inf")
        if not isinstance(self.samplers, str):
            raise OptionError(f"samplers is {self.samplers!r}, expected names joined by ';'")
        unknown = [name for name in self._names() if name not in _ALIASES]
        if unknown:
            raise OptionError(f"sampler '{unknown[0]}' is not built, built are {', '.join(_BUILT)}")

    def _check_number(self, name: str) -> None:
        value, whole = getattr(self, name), name in _WHOLE
        if not isinstance(value, Integral if whole else Real) and not (name == "seed" and value is None):
            raise OptionError(f"{name} is {value!r}, expected a {'whole ' if whole else ''}number")

    def _names(self) -> list[str]:
        return [name.strip().lower() for name in self.samplers.split(";") if name.strip()]

    @property
    def chain(self) -> tuple[str, ...]:
        """The names in `samplers`, aliases resolved."""
        return tuple(_ALIASES[name] for name in self._names())
