"""A session in a file and back: tokens, KV cells, recurrent states, checkpoints, last logits, draws (level 7).

Is handed sessions, and reads and fills their memory and history; makes none. Everything is in canonical order: cells by row,
states in the shape of their specs, whatever layout a session computes with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .array_file import Lazy, read_arrays, write_arrays
from .errors import StateError
from .ggml import types
from .graph.options import GraphOptions

FORMAT, VERSION = "qwen3next_ggml session", "1"


@dataclass(frozen=True, eq=False)
class SessionFile:
    """What a session file holds: `about` as plain values, and read-only arrays by name."""

    path: str
    about: dict[str, Any]
    arrays: Mapping[str, np.ndarray]

    def array(self, name: str, *shape: int) -> np.ndarray:
        """Return an array of this shape (0 matches any size), or raise StateError."""
        found = self.arrays.get(name)
        if found is None or len(found.shape) != len(shape) or any(n not in (0, m) for n, m in zip(shape, found.shape)):
            what = "it is missing" if found is None else f"its shape is {list(found.shape)}"
            raise StateError(f"{self.path}: array {name} of shape {list(shape)} was expected, {what}")
        return found

    @property
    def options(self) -> dict[str, Any]:
        """The options of the session that was saved."""
        options = dict(self.about["options"])
        if isinstance(options["graph"], dict):
            options["graph"] = GraphOptions(**options["graph"])
        return options

    @property
    def has_sampler(self) -> bool:
        return any(name.startswith("sampler.") for name in self.arrays)

    def snapshot(self, name: str, recurrent) -> dict[tuple[int, str], np.ndarray]:
        """Return the recurrent states under `name`, in the shapes of that memory's specs."""
        return {(s.il, s.name): self.array(f"{name}.{s.il}.{s.name}", *s.ne[::-1]) for s in recurrent.specs}


# writing


def save(session, path: str | os.PathLike, *, sampler=None) -> None:
    """Write all that `session` holds, and where `sampler` is, to `path`. Raises StateError when the system refuses."""
    memory, history = session.memory, session.history
    seqs = [seq for seq, n in enumerate(memory.n_past) if n]
    arrays: dict[str, np.ndarray | Lazy] = {}
    for seq in seqs:
        _add_held(arrays, seq, history[seq])
        for n_past in memory.snapshots(seq):
            _add_state(arrays, f"state.{seq}.{n_past}", memory.recurrent, memory.recurrent.slot(seq, n_past))
    for i, checkpoint in enumerate(session.checkpoints.taken):
        for s in memory.recurrent.specs:
            arrays[f"checkpoint.{i}.{s.il}.{s.name}"] = checkpoint.values[s.il, s.name].reshape(s.ne[::-1])
        if checkpoint.logits is not None:
            arrays[f"checkpoint.{i}.logits"] = checkpoint.logits
    _add_cells(arrays, memory.kv, seqs)
    if sampler is not None:
        arrays |= {f"sampler.{name}": x for name, x in sampler.state().items()}
    about = {
        "model": _model(session.model),
        "options": _plain(session.settings),
        "kv_types": [memory.kv.type_k.name, memory.kv.type_v.name],
        "sequences": [
            {"seq": seq, "n_past": memory.n_past[seq], "states": list(memory.snapshots(seq)), "fed": history[seq].fed}
            for seq in seqs
        ],
        "checkpoints": [{"n_past": c.n_past, "seqs": sorted(c.seqs)} for c in session.checkpoints.taken],
    }
    write_arrays(path, {"format": FORMAT, "version": VERSION, "session": json.dumps(about)}, arrays)


def _add_held(arrays: dict, seq: int, held) -> None:
    arrays[f"tokens.{seq}"] = np.asarray(held.tokens, np.int32)
    if held.logits is not None:
        arrays[f"logits.{seq}"] = held.logits
    if held.hidden is not None:
        arrays[f"hidden.{seq}"] = held.hidden


def _add_state(arrays: dict, prefix: str, recurrent, slot: int) -> None:
    for s in recurrent.specs:
        arrays[f"{prefix}.{s.il}.{s.name}"] = Lazy(
            np.dtype(np.float32), s.ne[::-1], lambda il=s.il, name=s.name: recurrent.read(il, name, slot)
        )


def _add_cells(arrays: dict, kv, seqs: list[int]) -> None:
    cells = kv.used()
    if not len(cells):
        return
    arrays["kv.cell"] = cells.astype(np.int32)
    arrays["kv.pos"] = kv.pos[cells]
    arrays["kv.member"] = kv.member[seqs][:, cells].astype(np.uint8)
    arrays["kv.fed"] = kv.fed[cells].astype(np.uint8)
    for il in kv.layers:
        for what in ("k", "v"):
            shape = (len(cells), kv.row_size(il, what))
            arrays[f"kv.{il}.{what}"] = Lazy(np.dtype(np.uint8), shape, lambda il=il, what=what: kv.read(il, what, cells))


def _model(model) -> dict[str, str]:
    name = model.file.metadata.get("general.name", "")
    return {"name": name, "arch": model.file.arch, "file": os.path.basename(model.file.path), "fingerprint": model.fingerprint}


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: asdict(x) if isinstance(x, GraphOptions) else x for name, x in settings.items()}


# reading


def open_session_file(path: str | os.PathLike) -> SessionFile:
    """Map a session file and check it; StateError for a file that is damaged, cut short, or none of ours."""
    about, arrays = read_arrays(path)
    if about.get("format") != FORMAT:
        raise StateError(f"{path} is not a session file: its format is {about.get('format')!r}, expected {FORMAT!r}")
    if about.get("version") != VERSION:
        raise StateError(f"{path}: format version {about.get('version')} is not known here, expected {VERSION}")
    return SessionFile(str(path), json.loads(about["session"]), arrays)


def check_model(saved: SessionFile, model) -> None:
    """Raise StateError unless the session was one of this model's."""
    was, now = saved.about["model"], _model(model)
    if was["fingerprint"] != now["fingerprint"]:
        told = [f"{m['name'] or m['file']} ({m['arch']}, fingerprint {m['fingerprint'][:12]})" for m in (was, now)]
        raise StateError(f"{saved.path} belongs to another model: saved with {told[0]}, this is {told[1]}")


def restore(saved: SessionFile, session) -> None:
    """Fill a new session. Raises StateError with the reason when it cannot hold it all."""
    sequences = saved.about["sequences"]
    _check_room(saved, session)
    _restore_cells(saved, session.memory.kv, [s["seq"] for s in sequences])
    for s in sequences:
        seq, n_past = s["seq"], s["n_past"]
        held = session.history[seq]
        held.tokens = saved.array(f"tokens.{seq}", n_past).tolist()
        held.logits = _copied(saved, f"logits.{seq}")
        if session.drafter is not None and f"hidden.{seq}" in saved.arrays:
            held.hidden, held.fed = _copied(saved, f"hidden.{seq}"), s["fed"]
        states = {n: saved.snapshot(f"state.{seq}.{n}", session.memory.recurrent) for n in s["states"]}
        session.memory.resume(seq, n_past, states)
    for i, c in enumerate(saved.about["checkpoints"]):
        values = saved.snapshot(f"checkpoint.{i}", session.memory.recurrent)
        logits = _copied(saved, f"checkpoint.{i}.logits")
        session.checkpoints.add(c["seqs"], c["n_past"], {at: x.copy() for at, x in values.items()}, logits)


def restore_sampler(saved: SessionFile, sampler) -> None:
    """Let a sampler go on where the one saved with the session was. Raises StateError when there was none."""
    if not saved.has_sampler:
        raise StateError(f"{saved.path} holds no sampler: it was saved without one")
    sampler.restore({name.removeprefix("sampler."): x for name, x in saved.arrays.items() if name.startswith("sampler.")})


def _copied(saved: SessionFile, name: str) -> np.ndarray | None:
    return saved.arrays[name].copy() if name in saved.arrays else None


def _check_room(saved: SessionFile, session) -> None:
    for s in saved.about["sequences"]:
        if s["seq"] >= session.n_seq_max:
            raise StateError(f"{saved.path} holds sequence {s['seq']}; n_seq_max={session.n_seq_max} has no such sequence")
        if s["n_past"] > session.n_ctx:
            raise StateError(f"{saved.path} holds {s['n_past']} tokens of sequence {s['seq']}; n_ctx is {session.n_ctx}")
    n_cells = len(saved.arrays.get("kv.cell", ()))
    if n_cells > session.n_ctx:
        raise StateError(f"{saved.path} holds {n_cells} KV cells; n_ctx is {session.n_ctx}")


def _restore_cells(saved: SessionFile, kv, seqs: list[int]) -> None:
    if "kv.cell" not in saved.arrays:
        return
    cells = saved.array("kv.cell", 0).astype(np.int64)
    n = len(cells)
    if cells[-1] >= kv.n_cells:
        cells = np.arange(n)
    with_nextn = all(f"kv.{il}.k" in saved.arrays for il in kv.layers)
    fed = saved.array("kv.fed", n).astype(bool) & with_nextn
    kv.occupy(cells, saved.array("kv.pos", n), seqs, saved.array("kv.member", len(seqs), n).astype(bool), fed)
    for il in kv.layers:
        for what, was, now in zip("kv", saved.about["kv_types"], (kv.type_k, kv.type_v)):
            if f"kv.{il}.{what}" in saved.arrays:
                rows = saved.array(f"kv.{il}.{what}", n, 0)
                kv.write(il, what, cells, rows if was == now.name else _converted(rows, types.GgmlType.of(was), now))


def _converted(rows: np.ndarray, was: types.GgmlType, now: types.GgmlType) -> np.ndarray:
    n = rows.shape[-1] // was.type_size * was.block_size
    return types.quantize(now, types.dequantize(was, rows, n))


# telling


def describe(saved: SessionFile) -> dict[str, Any]:
    """Return what the file holds as plain values, for people: model, options, sequences, checkpoints, sizes in bytes."""

    def nbytes(prefix: str) -> int:
        return sum(x.nbytes for name, x in saved.arrays.items() if name.startswith(prefix))

    sequences = [
        {
            "seq": s["seq"], "n_past": s["n_past"], "states": s["states"],
            "checkpoints": sorted(c["n_past"] for c in saved.about["checkpoints"] if s["seq"] in c["seqs"]),
            "last_logits": f"logits.{s['seq']}" in saved.arrays,
        }
        for s in saved.about["sequences"]
    ]  # fmt: skip
    return {
        "path": saved.path, "format": int(VERSION), "model": saved.about["model"], "options": saved.about["options"],
        "kv_types": saved.about["kv_types"], "n_cells": len(saved.arrays.get("kv.cell", ())), "sequences": sequences,
        "sampler": saved.has_sampler,
        "bytes": {what: nbytes(f"{what}.") for what in ("kv", "state", "checkpoint")} | {"all": nbytes("")},
    }  # fmt: skip
