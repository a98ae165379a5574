"""Dirty memory: what a buffer held before must not show."""


def poison(session, byte):
    """Fill every recurrent slot and K/V cell of a session with a byte: 0xFF makes NaN, 0x3E finite garbage.

    A cell that is masked still takes part in sums as 0 * v, so cells get 0x3E even where the rest gets NaN.
    """
    memory = session.memory
    for state in memory.recurrent.states.values():
        state.all.memset(byte, 0, state.all.nbytes)
    for layer in memory.kv.layers.values():
        for cells in (layer.k, layer.v):
            cells.memset(0x3E, 0, cells.nbytes)
