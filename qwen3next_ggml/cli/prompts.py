"""Where a prompt comes from, and the template that wraps it for a chat (level 12)."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from ..errors import OptionError
from .options import grouped, option

ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}


@dataclass(frozen=True)
class PromptOptions:
    """The parts of a prompt."""

    prompt: str | None
    file: str | None
    escape: bool

    def read(self, argument: str) -> str:
        """Return an argument of the command line with its escapes replaced, unless that was turned off."""
        return unescaped(argument) if self.escape else argument

    def given(self) -> str | None:
        """Return -p and -f, joined by a newline when there are both, None when there is neither."""
        parts = [self.prompt and self.read(self.prompt)]
        if self.file is not None:
            parts.append(sys.stdin.read() if self.file == "-" else read_text(self.file).removesuffix("\n"))
        return "\n".join(part for part in parts if part) or None

    def given_or_piped(self) -> str | None:
        """Return -p and -f, or what is piped in when there is neither, None when there is no prompt at all."""
        if self.prompt is not None or self.file is not None or sys.stdin.isatty():
            return self.given()
        return sys.stdin.read() or None


def unescaped(text: str) -> str:
    r"""Replace \n, \r, \t, \', \" and \\ as llama.cpp does, and \xHH with that byte; leave other backslashes."""
    raw = re.sub(rb"\\(x[0-9A-Fa-f]{2}|[nrt'\"\\])", _escaped, text.encode("utf-8", "surrogateescape"))
    return raw.decode("utf-8", "replace")


def _escaped(match: re.Match) -> bytes:
    return ESCAPES[match[1]] if match[1] in ESCAPES else bytes.fromhex(match[1][1:].decode())


def read_text(path: str) -> str:
    """Return a file's text. Raises OptionError."""
    try:
        return Path(path).read_bytes().decode()
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"{path}: not UTF-8 text, byte {error.start}") from None


prompt_options = grouped(
    "prompt", PromptOptions,
    option("-p", "--prompt", help="the prompt; joined with -f when both are given"),
    option("-f", "--file", metavar="FNAME", help="a file that holds the prompt; -: standard input"),
    option("-e", "--escape/--no-escape", default=True, help=r"turn \n, \t and so on in -p and -r into those characters  [default: yes]"),
)  # fmt: skip


@dataclass(frozen=True)
class TemplateOptions:
    """Which template, and what it is given besides messages."""

    system: str | None
    template: str | None
    template_file: str | None
    variables: dict

    def of(self, model):
        """Return the ChatTemplate: the one given, else the file's. Raises OptionError when there is none."""
        from ..chat import ChatTemplate

        source = read_text(self.template_file) if self.template_file else self.template
        if not source and not model.file.metadata.get("tokenizer.chat_template"):
            raise OptionError(f"{model.file.path} has no chat template: give one with --chat-template-file")
        return ChatTemplate.from_metadata(model.file.metadata, source=source)


class Jinja(click.ParamType):
    """The source of a template; llama.cpp's names of templates are not known here."""

    name = "jinja"

    def convert(self, value, param, ctx):
        return value if "{{" in value or "{%" in value else self.fail(f"{value!r} is no Jinja template", param, ctx)


class JsonObject(click.ParamType):
    """A JSON object, as a dict."""

    name = "json"

    def convert(self, value, param, ctx):
        try:
            parsed = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(f"not JSON: {error}", param, ctx)
        return parsed if isinstance(parsed, dict) else self.fail(f"{value!r} is not a JSON object", param, ctx)


template_options = grouped(
    "template", TemplateOptions,
    option("-sys", "--system-prompt", "system", metavar="PROMPT", help="system message"),
    option("--chat-template", "template", type=Jinja(), metavar="JINJA", env="CHAT_TEMPLATE", help="a template in place of the file's"),
    option("--chat-template-file", "template_file", metavar="FNAME", env="CHAT_TEMPLATE_FILE", help="the same, from a file"),
    option("--chat-template-kwargs", "variables", type=JsonObject(), default="{}", metavar="JSON", env="CHAT_TEMPLATE_KWARGS",
           show_default=False, help="what else the template is given, such as {\"enable_thinking\": false}"),
)  # fmt: skip
