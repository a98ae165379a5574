"""What a session holds, read without its own bookkeeping functions: both halves of a sequence, a digest of everything."""

import hashlib

import numpy as np

from .distance import max_abs


def halves(session, seq=0):
    """Return name to array: the recurrent states of a sequence ("r-0", "s-0", …) and its K and V in order of position ("k-3", "v-3")."""
    memory = session.memory
    found = {f"{name}-{il}": session.state(il, seq)[name] for il, name in memory.recurrent.states}
    cells = np.flatnonzero(memory.kv.member[seq])
    cells = cells[np.argsort(memory.kv.pos[cells])]
    for il, layer in memory.kv.layers.items():
        k = layer.k.get()
        if memory.kv.k_by_head:
            n_head, D = layer.spec.n_head_kv, layer.spec.n_embd_head_k
            k = k.reshape(n_head, memory.kv.n_cells, D).swapaxes(0, 1).reshape(memory.kv.n_cells, n_head * D)
        found[f"k-{il}"] = k[cells]
        v = layer.v.get()
        found[f"v-{il}"] = v[cells] if not memory.kv.v_transposed else v.reshape(-1, memory.kv.n_cells).T[cells]
    return found


def apart(a, b):
    """Return how far two sequences' halves are apart; both must hold equally many tokens."""
    assert a.keys() == b.keys()
    return max(max_abs(a[name], b[name]) for name in a)


def same(a, b):
    """Tell whether two sequences' halves are equal bit for bit."""
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name], equal_nan=True) for name in a)


def digest(session):
    """Return a hash over every state tensor and all that says where what lies."""
    memory = session.memory
    out = hashlib.sha256()
    for state in memory.recurrent.states.values():
        out.update(state.all.raw())
    for layer in memory.kv.layers.values():
        out.update(layer.k.raw())
        out.update(layer.v.raw())
    for array in (memory.kv.pos, memory.kv.member):
        out.update(np.ascontiguousarray(array))
    held = [session.history[seq].tokens for seq in range(session.n_seq_max)]
    taken = [(c.n_past, sorted(c.seqs)) for c in session.checkpoints.taken]
    out.update(repr((memory.n_past, list(memory.recurrent.oldest), held, taken)).encode())
    return out.hexdigest()


def count_runs(session):
    """Return a list to which the session's executor adds the number of tokens of each graph it runs from now on."""
    ran, run = [], session.graphs.executor.run

    def counted(built, arrays, outs):
        ran.append(built.inputs["inp_tokens"].nelements)
        return run(built, arrays, outs)

    session.graphs.executor.run = counted
    return ran
