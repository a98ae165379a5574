"""The files that rows are measured on: the embedded model, and random ones of the published geometry, made on first use."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

EMBEDDED = Path(__file__).parents[1] / "qwen3next_ggml/data/bard.gguf"
DEFAULT_CACHE = Path("~/.cache/qgraph-bench").expanduser()


@dataclass(frozen=True)
class Made:
    """A file that `qgraph toy` writes."""

    n_layer: int
    type: str
    gib: float

    @property
    def name(self) -> str:
        return f"qwen3-next-80b-{self.n_layer}-layers-{self.type}.gguf"

    def command(self, path) -> list[str]:
        return ["toy", str(path), "--geometry", "qwen3-next-80b", "--layers", str(self.n_layer), "--type", self.type]


MADE = {
    "four": Made(n_layer=4, type="q4_k", gib=3.8),
    "twelve": Made(n_layer=12, type="q4_k", gib=10.7),
    "whole": Made(n_layer=48, type="iq1_s", gib=15.6),
}


def model_path(name: str, cache: Path, given: str | None = None) -> Path:
    """Return the file that rows call `name`, written to `cache` if it is not there; `given` stands in for "four"."""
    if name == "embedded":
        return EMBEDDED
    if name == "four" and given:
        return Path(given)
    made = MADE[name]
    path = cache / made.name
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        print(f"writing {path}, about {made.gib:.1f} GiB", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "qwen3next_ggml.cli", *made.command(path)], check=True)
    return path
