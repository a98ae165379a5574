"""Run the commands of docs/parity.md and write what they print under them: `python docs/make_parity.py [FOLDER]`, a test compares.

FOLDER is a llama.cpp build with Vulkan; without one the commands on it stay as they are. Pictures the commands draw are kept in docs/.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent
PAGE = DOCS / "parity.md"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
VULKAN = "vulkan"


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Yield (command, what is printed under it) of a block of the page."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        yield command, printed


def run(command: str, folder: str) -> str:
    """Run a command in a folder with this interpreter's programs first → what it prints on both streams, in order."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "GGML_VK_VISIBLE_DEVICES": "0"}
    env["PYTHONPATH"] = str(DOCS.parent)
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout


def needs_vulkan(block: str) -> bool:
    """Say whether a block has commands for a Vulkan device."""
    return "Vulkan0" in block


def render(text: str, folder: str, vulkan: str | None = None) -> str:
    """Return the page with every command run again, in order, in `folder`."""
    if vulkan:
        Path(folder, VULKAN).symlink_to(Path(vulkan).resolve())

    def again(found: re.Match) -> str:
        block = found[1]
        if needs_vulkan(block) and not vulkan:
            return found[0]
        return "```console\n" + "\n".join(f"$ {command}\n{run(command, folder)}" for command, _ in commands(block)) + "```"

    return BLOCK.sub(again, text)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), place, *sys.argv[1:]), encoding="utf-8")
        for picture in Path(place).glob("parity-*.svg"):
            shutil.copy(picture, DOCS)
