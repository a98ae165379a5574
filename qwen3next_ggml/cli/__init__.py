"""The command line `qgraph`: one command, one file (level 12).

A QGraphError is one line on stderr and exit 1, a usage error exits 2, Ctrl-C exits 130 with what was printed kept, and
anything else is a bug and shows its traceback.
"""

import os
import sys

import click

from .. import errors
from . import bench, chat, devices, graph, inspect, parity, ppl, profile, run, session, toy, trace, validate
from .output import complain

INTERRUPTED = 130
BROKEN_PIPE = 141


class Commands(click.Group):
    """The command group, with the one place that turns exceptions into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context):
        try:
            return super().invoke(ctx)
        except errors.QGraphError as error:
            complain(str(error))
            ctx.exit(1)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            # whoever read has gone; the interpreter must not fail again when it flushes stdout on its way out
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(BROKEN_PIPE)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="Every command runs the embedded model when no MODEL is given. `qgraph COMMAND --help` explains its options.",
)
@click.version_option(package_name="qwen3next_ggml", prog_name="qgraph")
def cli() -> None:
    """Run, measure and look into Qwen3-Next GGUF files, over a graph written in Python and executed by ggml."""


for module in (run, chat, inspect, validate, devices, graph, parity, toy, bench, ppl, trace, session, profile):
    cli.add_command(module.command)


def main() -> None:
    """Run the command line and exit; what a terminal cannot show is replaced."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")
    cli(prog_name="qgraph")
