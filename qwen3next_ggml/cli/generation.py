"""How to generate: length, ends and sampling, under llama.cpp's spelling and with its defaults (level 12)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import click

from .options import grouped, option


@dataclass(frozen=True)
class GenerationOptions:
    """How tokens are chosen, how many of them, and what of them is shown."""

    n_predict: int
    stop: tuple[str, ...]
    special: bool
    ignore_eos: bool
    sampler: dict

    def settings(self, n_ctx: int, read: Callable[[str], str]) -> dict:
        """Return the arguments of `stream_generate`: n_ctx is the context's size, `read` replaces escapes. Raises OptionError."""
        from ..sampler import SamplerParams

        last_n = self.sampler["penalty_last_n"]
        params = SamplerParams(**self.sampler | {"penalty_last_n": n_ctx if last_n == -1 else last_n})
        return dict(n_predict=self.n_predict, stop=[read(stop) for stop in self.stop], special=self.special, ignore_eos=self.ignore_eos, params=params)


def _generation(n_predict, stop, special, ignore_eos, logit_bias, samplers, **sampler) -> GenerationOptions:
    if samplers is not None:
        sampler["samplers"] = samplers
    return GenerationOptions(n_predict, stop, special, ignore_eos, sampler | {"logit_bias": dict(logit_bias)})


class Bias(click.ParamType):
    """A token id with a signed number behind it, such as 15043+1 or 15043-inf."""

    name = "bias"

    def convert(self, value, param, ctx):
        at = next((i for i, char in enumerate(value) if char in "+-"), 0)
        try:
            return int(value[:at]), float(value[at:])
        except ValueError:
            self.fail(f"{value!r} is not TOKEN_ID+BIAS or TOKEN_ID-BIAS", param, ctx)


generation_options = grouped(
    "generation", _generation,
    option("-n", "--predict", "--n-predict", "n_predict", type=int, default=-1, env="N_PREDICT",
           help="tokens wanted at most; -1: until the text ends or the context is full"),
    option("-r", "--reverse-prompt", "stop", multiple=True, metavar="TEXT", help="stop where this text comes; may be repeated"),
    option("-sp", "--special", is_flag=True, help="show control tokens"),
    option("--ignore-eos", is_flag=True, help="never choose a token that ends the text"),
    option("-s", "--seed", type=int, default=-1, env="SEED", help="seed of the draws; -1: a random one"),
    option("--temp", "--temperature", "temp", default=0.8, env="TEMPERATURE", help="temperature; 0: the most likely token"),
    option("--top-k", default=40, env="TOP_K", help="keep the k most likely tokens; 0: all"),
    option("--top-p", default=0.95, env="TOP_P", help="keep the most likely tokens that sum to p; 1: all"),
    option("--min-p", default=0.05, env="MIN_P", help="keep tokens at least p times as likely as the best; 0: all"),
    option("--typical", "--typical-p", "typ_p", default=1.0, help="locally typical sampling; 1: off"),
    option("--top-nsigma", "--top-n-sigma", "top_n_sigma", default=-1.0, help="keep logits within n deviations of the best; -1: off"),
    option("--xtc-probability", default=0.0, help="chance to drop the most likely tokens; 0: off"),
    option("--xtc-threshold", default=0.1, help="probability from which xtc drops tokens"),
    option("--repeat-penalty", "penalty_repeat", default=1.0, env="REPEAT_PENALTY", help="divide the logits of repeated tokens; 1: off"),
    option("--repeat-last-n", "penalty_last_n", default=64, help="tokens the penalties look back on; 0: none; -1: the whole context"),
    option("--presence-penalty", "penalty_present", default=0.0, env="PRESENCE_PENALTY", help="taken once off tokens that occurred"),
    option("--frequency-penalty", "penalty_freq", default=0.0, env="FREQUENCY_PENALTY", help="taken off tokens for each time they occurred"),
    option("-l", "--logit-bias", type=Bias(), multiple=True, metavar="TOKEN_ID(+/-)BIAS", help="added to a token's logit; may be repeated"),
    option("--samplers", metavar="NAME;…", help="the steps and their order  [default: llama.cpp's]"),
)  # fmt: skip
