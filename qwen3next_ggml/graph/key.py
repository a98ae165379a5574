"""What makes two graphs the same graph (level 5)."""

from dataclasses import dataclass

from .delta_net import CHUNK_PER_CHANNEL
from .inputs import Sizes
from .options import GraphOptions


PATCH_NODES = 8192


@dataclass(frozen=True)
class GraphKey:
    """Identify a graph: a change of key rebuilds, nothing else does.

    `mtp` is the NextN block instead of the trunk; `patches` are what probes.py puts in the place of named values; with `top`
    only so many of the largest logits are handed out.
    """

    sizes: Sizes
    options: GraphOptions
    captures: tuple[str, ...] = ()
    mtp: bool = False
    patches: tuple = ()
    top: int = 0


def node_budget(key: GraphKey, n_layer: int, n_expert_used: int) -> int:
    """Return an upper bound on the tensors of a graph; the tests count real graphs against it."""
    # one token of each of several sequences makes nodes of its own for each, to run the delta rule where the states lie
    per_layer = 128 + 3 * n_expert_used + 32 * len(key.sizes.keep) + 8 * (key.sizes.n_seqs if key.sizes.n_seq_tokens == 1 else 0)
    if key.options.delta_net != "fused":
        per_layer += 64 * (1 + len(key.sizes.keep)) + 20 * -(-key.sizes.n_seq_tokens // CHUNK_PER_CHANNEL)
    return (64 + n_layer * per_layer) * (4 if key.captures else 1) + (PATCH_NODES if key.patches else 0)
