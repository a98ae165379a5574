"""The documentation says what is so: options, files, code that is quoted, commands that are shown."""

import re
import runpy

import click
import numpy as np
import pytest

from qwen3next_ggml.cli import cli
from tests.kit.process import ROOT

DOCS = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md"])


def test_the_command_reference_is_up_to_date():
    rendered = runpy.run_path(str(ROOT / "docs" / "make_cli.py"))["render"]()
    assert (ROOT / "docs" / "cli.md").read_text() == rendered, "run: python docs/make_cli.py"


def test_quoted_code_is_the_code():
    source = (ROOT / "qwen3next_ggml" / "models" / "qwen3next.py").read_text()
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "adding-an-architecture.md").read_text(), re.DOTALL)
    assert len(blocks) >= 6
    for block in blocks:
        assert block in source


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_paths_that_are_named_exist(path):
    inside = ("qwen3next_ggml/", "docs/", "tests/", "benchmarks/", "examples/", "native/")
    named = {name for name in re.findall(r"[`(]([\w./-]+/[\w./-]*)[`):]", path.read_text()) if name.startswith(inside)}
    missing = [name for name in named if not (ROOT / name).exists()]
    assert missing == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_commands_that_are_shown_have_these_options(path):
    for line in re.findall(r"qgraph (\w+)((?: [^\n`&|]+)?)", path.read_text()):
        name, args = line
        if name not in cli.commands:
            continue
        known = {opt for p in cli.commands[name].params if isinstance(p, click.Option) for opt in (*p.opts, *p.secondary_opts)} | {"--help"}
        given = [word for word in re.sub(r"\"[^\"]*\"|'[^']*'", "", args).split() if re.match(r"--?[a-z]", word)]
        assert [word for word in given if word not in known] == [], line


def test_the_readmes_python_runs(bard, capsys):
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    given = {"tokens": [1, 2, 3], "a": np.eye(4, 3), "b": np.ones((5, 3))}
    exec(block.replace('"model.gguf", n_threads=8', f'"{bard}", n_threads=1'), given)  # noqa: S102
    assert len(capsys.readouterr().out) > 20
    assert given["logits"].shape == (1, 2048) and set(given["rows"]) == {0, 1}
    assert given["y"].tolist() == [[1, 1, 1, 0]] * 5
