"""`qgraph ppl`: perplexity of a text, and divergence from saved logits, in llama.cpp's figures (level 12)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import click

from ..errors import OptionError
from .options import json_option, model_options, option, sized_session_options
from .output import emit, emit_json, note, table
from .prompts import PromptOptions

PERCENT = {0.0: "Minimum", 50.0: "Median", 100.0: "Maximum"}


@click.command(name="ppl")
@model_options
@option("-f", "--file", metavar="FNAME", help="the text; -: standard input")
@option("--chunks", "n_chunks", type=int, default=-1, help="windows evaluated at most; -1: all")
@option("--ppl-stride", "stride", type=click.IntRange(min=0), default=0,
        help="begin a window every N tokens and score its last N; 0: windows end to end, the second half of each scored")
@option("--kl-divergence", "diverge", is_flag=True, help="compare with the logits in --kl-divergence-base")
@option("--kl-divergence-base", "--save-all-logits", "base", metavar="FNAME",
        help="a file of logits, llama.cpp's or ours: read with --kl-divergence, else written")
@sized_session_options(n_ctx=512)
@json_option
def command(model, file, n_chunks, stride, diverge, base, session, as_json) -> None:
    """Measure how well a model predicts a text.

    The text is cut into windows of -c tokens as llama.cpp cuts it, so the figures can be compared with llama-perplexity's; -b / -c windows
    are evaluated side by side. With --kl-divergence the tokens come from the file of logits; a text given as well must be the one it was
    made from.
    """
    if diverge and base is None:
        raise click.UsageError("--kl-divergence needs the other model's logits: --kl-divergence-base FNAME")
    if stride and base is not None:
        raise click.UsageError("a file of logits has no stride: --ppl-stride does not go with --kl-divergence-base")
    if file is None and not diverge:
        raise click.UsageError("no text: give one with -f")
    text = None if file is None else PromptOptions(prompt=None, file=file, escape=False).given() or ""
    with model.load() as loaded:
        result = _diverge(loaded, session, base, text, n_chunks) if diverge else _measure(loaded, session, text, base, n_chunks, stride)
    if as_json:
        emit_json({"model": str(loaded.file.path), **result})


def _measure(model, options, text: str, save: str | None, n_chunks: int, stride: int) -> dict:
    from ..perplexity import LogitsWriter, Windows, negative_log_likelihood, perplexity, read_tokens

    tokens, bos = read_tokens(model, text)
    windows = Windows.cut(tokens, n_ctx=options.n_ctx or model.hparams.n_ctx_train, stride=stride, n_chunks=n_chunks, bos=bos)
    nll = []
    with LogitsWriter(save, windows, model.hparams.n_vocab) if save else nullcontext() as writer:
        for i, logits in _evaluated(model, options, windows):
            if writer:
                writer.add(logits)
            nll.extend(negative_log_likelihood(logits, windows.targets(i)))
            note(f"[{i + 1}/{windows.count}] PPL = {perplexity(nll).value:.4f}")
    found = perplexity(nll)
    emit(f"Final estimate: PPL = {found.value:.4f} +/- {found.error:.5f}\n")
    return {**_extent(windows), "ppl": found._asdict()}


def _diverge(model, options, base: str, text: str | None, n_chunks: int) -> dict:
    from ..perplexity import LogitsFile, compare, join, read_tokens, statistics

    file = LogitsFile.open(base)
    if file.n_vocab != model.hparams.n_vocab:
        raise OptionError(f"{base} was made over a vocabulary of {file.n_vocab} tokens, the model's has {model.hparams.n_vocab}")
    given, bos = read_tokens(model, text or "")
    windows = file.windows(n_chunks=n_chunks, bos=bos)
    if text is not None and given[: len(windows.tokens)] != windows.tokens.tolist():
        raise OptionError(f"{base} was made from another text than the one given with -f")
    source = click.get_current_context().get_parameter_source("n_ctx")
    if options.n_ctx != windows.n_ctx and source is click.core.ParameterSource.COMMANDLINE:
        raise OptionError(f"{base} was made with windows of {windows.n_ctx} tokens, -c asks for {options.n_ctx}")
    parts = []
    for i, logits in _evaluated(model, options, windows):
        parts.append(compare(logits, file.rows[i], windows.targets(i)))
        figures = statistics(join(parts))
        note(f"[{i + 1}/{windows.count}] PPL = {figures['ppl'].value:.4f}, KLD = {figures['kld'].value:.6f}")
    for line in report(figures):
        emit(line + "\n")
    return {**_extent(windows), **{name: value._asdict() if hasattr(value, "_asdict") else value for name, value in figures.items()}}


def _evaluated(model, options, windows) -> Iterator:
    """Yield (window, its scored logits)."""
    from ..perplexity import evaluate

    n_seq = max(1, min(options.n_batch // windows.n_ctx, windows.count))
    with replace(options, n_ctx=n_seq * windows.n_ctx).open(model, n_seq_max=n_seq) as session:
        yield from enumerate(evaluate(session, windows))


def _extent(windows) -> dict:
    return {"n_ctx": windows.n_ctx, "stride": windows.stride, "n_chunks": windows.count, "n_scored": windows.count * windows.n_scored}


def report(figures: dict) -> Iterator[str]:
    """Yield the statistics line by line, under llama.cpp's names."""
    yield from table([
        ("Mean PPL(Q)", *_pm(figures["ppl"])),
        ("Mean PPL(base)", *_pm(figures["ppl_base"])),
        ("Cor(ln(PPL(Q)), ln(PPL(base)))", f"{100 * figures['log_ppl_correlation']:.2f}%", ""),
        ("Mean ln(PPL(Q)/PPL(base))", *_pm(figures["log_ppl_ratio"])),
        ("Mean PPL(Q)/PPL(base)", *_pm(figures["ppl_ratio"])),
        ("Mean PPL(Q)-PPL(base)", *_pm(figures["ppl_difference"])),
    ], right=(1,))  # fmt: skip
    yield ""
    yield from table([
        ("Mean KLD", *_pm(figures["kld"])),
        *((_percent(at, "KLD"), f"{value:.6f}", "") for at, value in figures["kld_percentiles"].items()),
    ], right=(1,))  # fmt: skip
    yield ""
    yield from table([
        ("Mean Δp", *_pm(figures["delta_p"], percent=True)),
        *((_percent(at, "Δp"), f"{100 * value:.3f}%", "") for at, value in figures["delta_p_percentiles"].items()),
        ("RMS Δp", *_pm(figures["delta_p_rms"], percent=True)),
        ("Same top p", *_pm(figures["same_top"], percent=True)),
    ], right=(1,))  # fmt: skip


def _pm(mean, *, percent: bool = False) -> tuple[str, str]:
    return (f"{100 * mean.value:.3f}%", f"± {100 * mean.error:.3f}%") if percent else (f"{mean.value:.6f}", f"± {mean.error:.6f}")


def _percent(at: float, of: str) -> str:
    return f"{PERCENT.get(at) or f'{at:.1f}%'} {of}"
