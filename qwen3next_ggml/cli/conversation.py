"""A conversation over one session: a turn evaluates only what the session does not hold yet (level 12)."""

from __future__ import annotations

from collections.abc import Iterator

from .answers import Answer


class Conversation:
    """Messages, and the tokens and text that the session's sequence 0 holds of them.

    `settings` are passed on to `stream_generate`.
    """

    def __init__(self, model, session, template, variables: dict, system: str | None, settings: dict):
        self.model, self.session, self.template = model, session, template
        self.variables, self.system, self.settings = variables, system, settings
        self._begin()

    def _begin(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self._tokens: list[int] = []
        self._text = ""

    def clear(self) -> None:
        """Forget everything but the system message."""
        self._begin()
        self.session.clear()

    def prompt(self, message: str) -> tuple[str, list[int]]:
        """Return what the model reads when the user says `message` next, as text and tokens.

        What the session holds is kept as it was generated, and only the rest of the rendered text is encoded: encoding the
        whole again could cut words differently. A template that rewrites the past makes the text differ; then all is new.
        """
        said = [*self.messages, {"role": "user", "content": message}]
        text = self.template.render(said, add_generation_prompt=True, **self.variables)
        kept = self._tokens if self._text and text.startswith(self._text) else []
        rest = text[len(self._text) :] if kept else text
        return text, kept + self.model.tokenizer.encode(rest, add_special=False, parse_special=True)

    def ask(self, message: str) -> Iterator:
        """Return the steps of the answer to `message`; `keep` takes it into the conversation afterwards."""
        from ..generate import stream_generate

        self._asked = (message, *self.prompt(message))
        return stream_generate(self.model, self._asked[2], session=self.session, **self.settings)

    def keep(self, answer: Answer) -> None:
        """Note what was asked and answered."""
        message, text, tokens = self._asked
        self.messages += [{"role": "user", "content": message}, {"role": "assistant", "content": answer.text}]
        self._tokens = tokens + answer.tokens
        self._text = text + self.model.tokenizer.decode(answer.tokens, special=True)

    def drop(self) -> None:
        """Forget a turn that was cut in half, and with it what the session holds: half a step cannot be taken back."""
        self._tokens, self._text = [], ""
        self.session.clear()
