"""What every walk needs around the formulas (level 0): a block's tensors by name, and a recorder of named values."""

import numpy as np

from ..errors import TensorError

# states: what the first token finds, and what the last one leaves
FOUND, LEFT = ("conv_states", "state_predelta"), ("conv_state_last", "new_state")
STATES = FOUND + LEFT


class Layer:
    """The tensors of one block by GGUF name, without "blk.N." and ".weight"."""

    def __init__(self, weights, il):
        self.weights, self.il = weights, il

    def get(self, name, suffix=".weight"):
        return self.weights.get(f"blk.{self.il}.{name}{suffix}")

    def __getitem__(self, name):
        if (x := self.get(name)) is None:
            raise TensorError(f"blk.{self.il}.{name}.weight: not in the file")
        return x

    def mm(self, name, x):
        """Project x, with the tensor's scale and bias where the file has them."""
        y = self[name] @ x
        if (scale := self.get(name, ".scale")) is not None:
            y = y * scale
        return y if (bias := self.get(name, ".bias")) is None else y + bias

    def mm_id(self, name, x, ids):
        """Project x [n_in] or [n_used, n_in] through the chosen experts: [n_used, n_out]."""
        y = np.einsum("eoi,ei->eo" if x.ndim == 2 else "eoi,i->eo", self[name][ids], x)
        return y if (scale := self.get(name, ".scale")) is None else y * scale[ids, None]


class Recorder:
    """Keeps the named values of each token; of a state what the first token found, or what the last one left.

    Where a name repeats within a token (as in llama.cpp), the last value has the name, those before it "#0", "#1" … behind theirs.
    """

    def __init__(self, keep):
        self.keep, self.tokens, self.states = keep, [], {}

    def next_token(self):
        self.tokens.append({})

    def __call__(self, name, value, il=None):
        if self.keep:
            full = name if il is None else f"{name}-{il}"
            if name in FOUND:
                self.states.setdefault(full, value)
            elif name in LEFT:
                self.states[full] = value
            else:
                self._add(full, value)
        return value

    def _add(self, name, value):
        token = self.tokens[-1]
        if name in token:
            n_before = sum(other.startswith(f"{name}#") for other in token)
            token[f"{name}#{n_before}"] = token[name]
        token[name] = value

    def stacked(self):
        """Return name to [n_tokens, ...], states without the token axis."""
        names = self.tokens[0] if self.tokens else ()
        return {name: np.stack([token[name] for token in self.tokens]) for name in names} | self.states
