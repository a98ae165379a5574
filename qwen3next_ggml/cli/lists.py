"""Values of options as llama-bench takes them: lists, ranges of numbers, pairs (level 12)."""

from __future__ import annotations

import re

import click

from .options import Listed, option


class Ranges(Listed):
    """Numbers as llama-bench takes them: commas, and ranges `first-last`, `first-last+step`, `first-last*factor`."""

    name = "ranges"
    form = re.compile(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?")

    def __init__(self, min: int):
        super().__init__(click.IntRange(min=min))

    def get_metavar(self, param, ctx=None):
        return "N,…"

    def convert(self, value, param, ctx):
        if isinstance(value, tuple):
            return value
        return tuple(self.of.convert(n, param, ctx) for part in value.split(",") for n in self._range(part, param, ctx))

    def _range(self, part: str, param, ctx) -> list[int]:
        match = self.form.fullmatch(part)
        if match is None:
            self.fail(f"{part!r} is neither a number nor a range such as 1-4, 64-512+64 or 1-64*2", param, ctx)
        first, last, how, by = int(match[1]), int(match[2] or match[1]), match[3] or "+", int(match[4] or 1)
        if last > first and (first * by <= first if how == "*" else by < 1):
            self.fail(f"{part!r} never ends", param, ctx)
        numbers = [first]
        while (following := numbers[-1] * by if how == "*" else numbers[-1] + by) <= last:
            numbers.append(following)
        return numbers if last >= first else []


class Pair(click.ParamType):
    """Two numbers joined by a comma, as in -pg 512,128."""

    name = "pair"

    def convert(self, value, param, ctx):
        if isinstance(value, tuple):
            return value
        if not re.fullmatch(r"\d+,\d+", value):
            self.fail(f"{value!r} is not two numbers such as 512,128", param, ctx)
        return tuple(map(int, value.split(",")))


class Repack(click.ParamType):
    """0, 1 or auto."""

    name = "repack"
    words = {"0": False, "1": True, "auto": "auto"}

    def convert(self, value, param, ctx):
        return self.words[value] if value in self.words else self.fail(f"{value!r} is not one of 0, 1, auto", param, ctx)


def several(*spelling: str, type, **settings):
    """Return an option with a list of values that may be given more than once."""

    def joined(ctx, param, values):
        return tuple(x for one in values for x in one)

    if "default" in settings:
        default = settings["default"]
        settings |= {"default": [default], "show_default": False, "help": f"{settings['help']}  [default: {default}]"}
    return option(*spelling, type=type, multiple=True, callback=joined, **settings)
