"""The named ways in which a graph may differ from llama.cpp's own (level 5).

Every option is a fast variant that sits beside the plain one; PLAIN switches all of them off.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from ..errors import OptionError

FEW_SEQS = 4
DELTA_NETS = ("fused", "chunked", "autoregressive")


@dataclass(frozen=True)
class GraphOptions:
    """Say which variant of each block a graph is built from.

    `delta_net`: fused op, chunked form, or one token at a time. `flash_attn`: one fused attention op or its parts.
    `prune_last`: the last layer's projections and experts only for wanted rows. `top_k_first`: pick experts before
    the softmax, which then runs over the picked ones only. `expert_sum`: weigh and add experts in one op.
    `joint_sum`: lay the shared expert's output and the residual beside the experts' and add all of one token in one op, with `expert_sum`.
    `shared_as_expert`: run the shared expert of one token as one of those picked, where it lies behind them in memory, with `joint_sum`.
    `kv_as_stored`: hand a float32 cache to flash attention as it is instead of through float16. `state_view`: read the
    states of adjacent slots where they lie instead of gathering them. `state_rows`: gather and scatter a delta state
    head by head, so that threads share the copy. `finite_kv`: limit K and V to what float16 holds before they are
    stored, so that one sequence's NaN does not reach the others through masked cells, which take part in sums as 0·v.
    `state_in_place`: let a one-token step's new delta state take the place of the old one, where slots are adjacent.
    `joint_qk`: normalise and repeat the query and key heads of a delta net together. `heads_as_seqs`: in a prompt, run value
    heads that share a key head as sequences of their own, which the op pairs by itself, instead of repeating the key heads.
    `grouped_attn`: with few tokens, multiply K and V with all query heads that share them at once instead of head by head; K is kept
    head by head for it, so that it is read in one go, V transposed, and turned for flash attention.
    `conv_in_parts`: join old and new columns of the convolution in several parts, as threads share parts only.
    `conv_by_rows`: convolve a prompt's tokens as they lie, a row each, instead of turning them into columns.
    `stacked_weights`: multiply one column once with weights that lie one behind the other, and cut the result; the experts' with any.
    `repacked_few`: multiply few columns with weights rewritten for the CPU's kernels, where they are held beside the stored ones.
    `fewer_conts`: let elementwise ops read strided views, and gate in one op, instead of copying views first.
    """

    delta_net: str = "fused"
    flash_attn: bool = True
    prune_last: bool = False
    top_k_first: bool = False
    expert_sum: bool = False
    joint_sum: bool = False
    shared_as_expert: bool = False
    kv_as_stored: bool = False
    state_view: bool = False
    state_rows: bool = False
    finite_kv: bool = False
    state_in_place: bool = False
    joint_qk: bool = False
    heads_as_seqs: bool = False
    fewer_conts: bool = False
    grouped_attn: bool = False
    conv_in_parts: bool = False
    conv_by_rows: bool = False
    stacked_weights: bool = False
    repacked_few: bool = False

    def __post_init__(self):
        if self.delta_net not in DELTA_NETS:
            raise OptionError(f"delta_net must be one of auto, {', '.join(DELTA_NETS)}, got {self.delta_net!r}")

    @property
    def kv_layout(self) -> dict[str, bool]:
        """Return what a KV cache has to know: whether masks are flash attention's, K is kept head by head, V with a row per value."""
        return dict(flash_attn=self.flash_attn, k_by_head=self.grouped_attn, v_transposed=self.grouped_attn or not self.flash_attn)

    def for_session(self, type_v: str, n_seq_max: int, devices: Sequence) -> "GraphOptions":
        """Return what of these options goes with a V cache of `type_v` shared by up to `n_seq_max` sequences, and with `devices`."""
        # a quantised V has no row per value, and columns of many sequences would mostly meet cells of the others
        grouped = not self.flash_attn or n_seq_max <= FEW_SEQS and type_v in ("f32", "f16", "bf16")
        # memory that several nodes write into has no copies on other devices, and GPUs want places that are aligned and fuse ssm_conv
        kinds = [device.kind for device in devices]
        return self.but(
            grouped_attn=self.grouped_attn and grouped, joint_sum=self.joint_sum and kinds == ["cpu"],
            conv_by_rows=self.conv_by_rows and set(kinds) == {"cpu"},
        )

    def but(self, **changes) -> "GraphOptions":
        """Return a copy with some options changed."""
        return replace(self, **changes)


PLAIN = GraphOptions()
LEAN = GraphOptions(
    prune_last=True, top_k_first=True, expert_sum=True, joint_sum=True, shared_as_expert=True, kv_as_stored=True, state_view=True, state_rows=True,
    finite_kv=True, state_in_place=True, joint_qk=True, heads_as_seqs=True, fewer_conts=True,
    grouped_attn=True, conv_in_parts=True, conv_by_rows=True, stacked_weights=True, repacked_few=True,
)
FAST_OPTIONS = tuple(f.name for f in fields(GraphOptions) if f.name not in ("delta_net", "flash_attn"))
