"""Messages to a prompt, by the chat template inside a GGUF file (level 3).

Renders as transformers' apply_chat_template does, in jinja2's immutable sandbox: a template is a stranger's program.
Knows nothing of tokens beyond the texts of the special ones.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from .errors import GgufError, OptionError

_KEY = "tokenizer.chat_template"
_SPECIAL_IDS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


class ChatTemplate:
    """One template's source and the special tokens it may write. Rendering raises OptionError, with the template's line.

    tool_source: used instead of source when tools are given.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None, tool_source: str | None = None):
        self.source, self.tool_source = source, tool_source
        self.special_tokens = dict(special_tokens or {})

    @classmethod
    def from_metadata(cls, metadata: Mapping, *, source: str | None = None) -> "ChatTemplate":
        """Return the file's template, or this source with the file's special tokens. Raises OptionError, GgufError."""
        source = source or metadata.get(_KEY)
        if not source:
            raise OptionError(f"the file has no {_KEY}: name a template of your own")
        tool_source = metadata.get(f"{_KEY}.tool_use") if source == metadata.get(_KEY) else None
        return cls(source, special_tokens=_special_tokens(metadata, source + (tool_source or "")), tool_source=tool_source)

    def render(self, messages: Sequence[Mapping], *, add_generation_prompt: bool = True, tools: Sequence[Mapping] | None = None,
               **variables) -> str:
        """Return the prompt of a conversation; variables are seen by the template (enable_thinking, documents …).

        messages: role, content (text or parts), tool_calls, … as the template knows them; a key whose value is None is
        left out, as transformers does. Raises OptionError.
        """
        source = self.tool_source if tools and self.tool_source else self.source
        strange = [message for message in messages if not isinstance(message, Mapping)]
        if strange:
            raise OptionError(f"a message is {strange[0]!r}, expected a mapping with role and content")
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        names = {"documents": None, **self.special_tokens, **variables, "messages": messages, "tools": tools}
        try:
            return _compiled(source).render(_plain(names), add_generation_prompt=add_generation_prompt)
        # whatever a template does, adding None to text or an endless recursion, is its own error and not a bug here
        except Exception as error:
            raise OptionError(_message(error, source)) from error


def _special_tokens(metadata: Mapping, source: str) -> dict[str, str]:
    """Return the texts of the special tokens a source names; the vocabulary is read only if there is one."""
    found = {}
    for name, role in _SPECIAL_IDS.items():
        key = f"tokenizer.ggml.{role}_token_id"
        if name in source and metadata.get(key) is not None:
            token, tokens = int(metadata[key]), metadata["tokenizer.ggml.tokens"]
            if not 0 <= token < len(tokens):
                raise GgufError(f"{key} is {token}, the vocabulary has {len(tokens)} tokens")
            found[name] = tokens[token]
    return found


def _plain(value):
    """Rebuild a value from JSON types alone: methods of richer objects are nothing for a stranger's program."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    return f"<{type(value).__name__}>"


class _Generation(Extension):
    """Accepts {% generation %} blocks, which mark an assistant's words for training, and renders what is in them."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _SafeNamespace(Namespace):
    """jinja2's namespace without underscore names, which lead to the interpreter's insides."""

    def __setitem__(self, name, value):
        if name.startswith("_"):
            raise SecurityError(f"namespace attribute {name!r} begins with an underscore")
        super().__setitem__(name, value)


def _raise_exception(message):
    raise TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=8)
def _compiled(source: str):
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    env.filters["tojson"] = _to_json
    env.globals |= {"raise_exception": _raise_exception, "strftime_now": lambda form: datetime.now().strftime(form),
                    "namespace": _SafeNamespace}
    return env.from_string(source)


def _message(error: Exception, source: str) -> str:
    """Return one sentence with the line of the template that was being read or run when the error came."""
    line, trace = getattr(error, "lineno", None), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    lines = source.splitlines()
    where = f"line {line}: {lines[line - 1].strip()[:120]}" if line and line <= len(lines) else "unknown line"
    what = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    return f"chat template: {' '.join(what.split())} ({where})"
