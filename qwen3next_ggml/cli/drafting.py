"""Whether tokens are drafted ahead, and how many, under llama.cpp's spelling (level 12)."""

from __future__ import annotations

from dataclasses import dataclass

import click

from .options import grouped, option

SPEC_TYPES = ("none", "draft-mtp")
AUTO = "auto"


@dataclass(frozen=True)
class DraftingOptions:
    """The arguments of `stream_generate` that have to do with drafting."""

    settings: dict

    def session_options(self) -> dict:
        """Return what the session must be made with."""
        from ..speculative import SpecParams

        return SpecParams(**self.settings).session_options()


def _drafting(**settings) -> DraftingOptions:
    if settings["spec_type"] == "none":
        source = click.get_current_context().get_parameter_source
        idle = [name for name in settings if name != "spec_type" and source(name) is click.core.ParameterSource.COMMANDLINE]
        if idle:
            raise click.UsageError(f"--{idle[0].replace('_', '-')} does nothing without --spec-type draft-mtp")
    return DraftingOptions(settings)


class Length(click.ParamType):
    """A number of tokens, or auto."""

    name = "length"

    def convert(self, value, param, ctx):
        return AUTO if value == AUTO else click.IntRange(min=1).convert(value, param, ctx)


drafting_options = grouped(
    "drafting", _drafting,
    option("--spec-type", type=click.Choice(SPEC_TYPES), default="none", env="SPEC_TYPE",
           help="draft-mtp: the file's NextN head guesses tokens ahead, and several are checked at once"),
    option("--spec-draft-n-max", type=Length(), default=3, metavar="N|auto", env="SPEC_DRAFT_N_MAX",
           help="tokens guessed at most; auto: as many as pay by what is measured, or none"),
    option("--spec-draft-p-min", "--draft-p-min", "spec_draft_p_min", type=click.FloatRange(0, 1), default=0.0, metavar="P",
           env="SPEC_DRAFT_P_MIN", help="end a guess where the head is less sure than that"),
)  # fmt: skip
