"""Toy model files, one of each kind per test run."""

from functools import cached_property

from qwen3next_ggml.toy import write_toy

from .files import reference_of


class Toys:
    """Write toys into a folder on first use; the same options give the same file."""

    def __init__(self, folder):
        self.folder = folder
        self._files = {}

    def file(self, **options):
        """Return the path of the toy with these options of `write_toy`."""
        key = repr(sorted(options.items()))
        if key not in self._files:
            self._files[key] = write_toy(self.folder / f"toy-{len(self._files)}.gguf", **options)
        return self._files[key]

    @property
    def t0(self):
        """Four layers (L L L F), F32, no two sizes equal."""
        return self.file()

    @property
    def legacy(self):
        """The weights of t0 with `ssm_in` for `attn_qkv` and `attn_gate`."""
        return self.file(legacy=True)

    @property
    def mtp(self):
        """The weights of t0 and a NextN block."""
        return self.file(mtp=True)

    @cached_property
    def t0_reference(self):
        """A fresh float64 model of t0; clear the sequences you use."""
        return reference_of(self.t0)
