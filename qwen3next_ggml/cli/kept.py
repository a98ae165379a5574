"""A session that a file keeps between two runs of a command (level 12)."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ..errors import OptionError
from .options import SessionOptions, given, option
from .output import note

session_file_option = option(
    "--session", "session_file", metavar="FILE",
    help="go on from the session in FILE if it is there, and save to it at the end, after Ctrl-C too; without a prompt the text it "
    "holds is continued, with one only what it does not hold yet is evaluated",
)  # fmt: skip


class KeptSession:
    """The session of `path`, or without a path one that is not kept."""

    def __init__(self, path: str | None):
        from ..session_file import open_session_file

        folder = os.path.dirname(path or "")
        if folder and not os.path.isdir(folder):
            raise OptionError(f"{path} cannot be written: there is no folder {folder}")
        self.path = path
        self._saved = open_session_file(path) if path is not None and os.path.exists(path) else None

    @property
    def goes_on(self) -> bool:
        return self._saved is not None

    def open(self, options: SessionOptions, model, **more):
        """Return the session: the one that was kept, with the options it had but for those that were given, or a new one."""
        return options.resume(model, self._saved, **more) if self.goes_on else options.open(model, **more)

    def with_sampler(self, model, settings: dict) -> dict:
        """Return `settings` of `stream_generate` with a sampler, which goes on with the kept one's draws unless a seed was given."""
        from ..generate import make_sampler
        from ..session_file import restore_sampler

        self._sampler = make_sampler(model, settings.pop("params"), ignore_eos=settings.pop("ignore_eos"))
        if self.goes_on and self._saved.has_sampler and not given("seed"):
            restore_sampler(self._saved, self._sampler)
        return settings | {"sampler": self._sampler}

    def watched(self, session, steps: Iterator) -> Iterator:
        """Yield the steps; when the prompt has been read, a checkpoint is taken that the same prompt can go back to."""
        first = next(steps)
        if self.path is not None and session.last_evaluated:
            session.checkpoint()
        yield first
        yield from steps

    def save(self, session, tokens: list[int]) -> None:
        """Bring the session to `tokens`, of which it has not seen the last one yet, and save it: the next run finds its logits."""
        if self.path is None:
            return
        if len(tokens) <= session.n_ctx:
            session.prompt(tokens)
        session.save(self.path, sampler=self._sampler)
        note(f"session: {session.n_past()} tokens in {self.path}")
