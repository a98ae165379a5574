"""Measured speeds as llama-bench prints them: Markdown, CSV, JSON, JSON lines (level 12)."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from .output import count, size

FORMS = ("md", "csv", "json", "jsonl")
# what llama-bench's CSV has, in its order
CSV_FIELDS = """build_commit build_number cpu_info gpu_info backends model_filename model_type model_size model_n_params n_batch n_ubatch
n_threads cpu_mask cpu_strict poll type_k type_v n_gpu_layers n_cpu_moe split_mode main_gpu no_kv_offload flash_attn devices tensor_split
tensor_buft_overrides load_mode lazy_mode embeddings no_op_offload no_host repack fit_target fit_min_ctx n_prompt n_gen n_depth test_time
avg_ns stddev_ns avg_ts stddev_ts""".split()
# settings of llama-bench that have no counterpart here, at the values that describe what is done
ABSENT = {
    "cpu_mask": "0x0", "cpu_strict": False, "poll": 0, "n_cpu_moe": 0, "split_mode": "layer", "main_gpu": 0, "no_kv_offload": False,
    "tensor_split": "0.00", "tensor_buft_overrides": "none", "lazy_mode": "off", "embeddings": False, "no_op_offload": 0, "no_host": False,
    "fit_target": 0, "fit_min_ctx": 0,
}  # fmt: skip


def printed(form: str, rows: Iterable[Mapping], varied: Sequence[str]) -> Iterator[str]:
    """Yield lines of one of FORMS as soon as a row is measured; `varied` are the options with a column in Markdown."""
    # a head comes with the first row: what cannot be measured has no table
    rows = iter(rows)
    rows = chain([next(rows)], rows)
    if form == "json":
        yield json.dumps(list(rows), indent=2)
    elif form == "jsonl":
        yield from (json.dumps(row) for row in rows)
    elif form == "csv":
        yield ",".join(CSV_FIELDS)
        yield from map(_csv_line, rows)
    else:
        yield from _markdown(rows, varied)


def test_name(row: Mapping) -> str:
    """Return llama-bench's name of a test: pp512, tg128, pp512+tg128, with @ d and the depth where there is one."""
    parts = [f"{what}{row[key]}" for what, key in (("pp", "n_prompt"), ("tg", "n_gen")) if row[key]]
    return "+".join(parts) + (f" @ d{row['n_depth']}" if row["n_depth"] else "")


def _csv_line(row: Mapping) -> str:
    out = io.StringIO()
    values = (int(row[name]) if isinstance(row[name], bool) else row[name] for name in CSV_FIELDS)
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="").writerow(list(values))
    return out.getvalue()


def _markdown(rows: Iterable[Mapping], varied: Sequence[str]) -> Iterator[str]:
    titles = {"n_threads": "threads", "flash_attn": "fa", "load_mode": "load"}
    # "auto" is told apart from what it came to
    keys = [f"{name}_asked" if name in ("load_mode", "repack") else name for name in varied]
    widths = (24, 10, 10, 8, *(8 for _ in varied), 14, 20)
    header = ("model", "size", "params", "backend", *(titles.get(name, name) for name in varied), "test", "t/s")
    yield _line(header, widths)
    yield "|" + "|".join(f" {'-' * (w - 1)}{':' if i in (1, 2) or i >= 4 else '-'} " for i, w in enumerate(widths)) + "|"
    for row in rows:
        head = (row["model_type"], size(row["model_size"]), count(row["model_n_params"]), row["backends"])
        values = (int(row[name]) if isinstance(row[name], bool) else row[name] for name in keys)
        yield _line((*head, *values, test_name(row), f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}"), widths)


def _line(cells: Sequence[object], widths: Sequence[int]) -> str:
    aligned = (str(c).rjust(w) if i in (1, 2) or i >= 4 else str(c).ljust(w) for i, (c, w) in enumerate(zip(cells, widths)))
    return "| " + " | ".join(aligned) + " |"
