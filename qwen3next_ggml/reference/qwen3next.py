"""Qwen3-Next walked token by token in float64 (level 0): trunk, head and MTP head, over the formulas of `kit`.

Takes plain metadata values and arrays keyed by GGUF tensor name; mirrors llama.cpp's src/models/qwen3next.cpp and its node names.
Knows no batches: each token passes all layers before the next one starts, so nothing depends on how tokens are cut.
"""

from functools import partial

import numpy as np

from ..errors import OptionError, StateError
from .kit import WEIGHT_SUM_MIN, attend, conv_step, delta_step, l2_norm, pair_heads, rms_norm, rope_neox, route, sigmoid, silu, softplus
from .layer import Layer, Recorder


class ReferenceModel:
    """The model, its weights in float64 and the state of any number of sequences.

    weights: GGUF tensor name to array in numpy order (ggml's shape reversed), dequantised. head_pairing: see `kit.pair_heads`.
    """

    def __init__(self, hparams, weights, *, head_pairing="interleaved"):
        self.hp = hparams
        self.w = {name: np.asarray(x, dtype=np.float64) for name, x in weights.items()}
        self.head_pairing = head_pairing
        self._states = {}

    def decode(self, tokens, *, seq=0, trace=None):
        """Run tokens through the trunk, advancing the sequence; returns logits [n_tokens, n_vocab].

        A `trace` dict receives every named value of this call as [n_tokens, ...], states as the first token found or the last one
        left them; "h_nextn" is what the MTP head wants. `ubatch_values` adds what tokens have only together.
        """
        note, rows = Recorder(trace is not None), []
        for token in self._checked(tokens):
            note.next_token()
            x = note("model.embed_tokens", self.w["token_embd.weight"][token])
            for il in range(self.hp.n_layer):
                x = self._block(x, il, self._layer_state(il, seq), partial(note, il=il))
            x = note("h_nextn", note("result_norm", self._norm(x, self.w["output_norm.weight"], note)))
            rows.append(note("result_output", self._head(x)))
        return self._finish(rows, note, trace)

    def decode_mtp(self, tokens, hidden, *, seq=0, trace=None):
        """Run the MTP head: tokens [n], each with the final-norm hidden [n, n_embd] of the token before it; returns logits [n, n_vocab].

        Its attention has a cache of its own. `trace["h_nextn"]` is the hidden of the next draft step.
        """
        il = self.hp.n_layer
        w = Layer(self.w, il)
        recorder, rows = Recorder(trace is not None), []
        for token, h in zip(self._checked(tokens), np.asarray(hidden, np.float64), strict=True):
            recorder.next_token()
            note = partial(recorder, il=il)
            table = w.get("nextn.embed_tokens")
            e = note("mtp_tok_embd", (self.w["token_embd.weight"] if table is None else table)[token])
            h = note("mtp_hnorm", self._norm(note("mtp_h_input", h), w["nextn.hnorm"], note))
            e = note("mtp_enorm", self._norm(e, w["nextn.enorm"], note))
            x = note("mtp_eh_proj", w.mm("nextn.eh_proj", note("mtp_concat", np.concatenate([e, h]))))
            x = self._block(x, il, self._layer_state(il, seq), lambda name, value: note(MTP_NAMES.get(name, name), value))
            norm = w.get("nextn.shared_head_norm")
            x = recorder("h_nextn", self._norm(x, self.w["output_norm.weight"] if norm is None else norm, recorder))
            own_head = w.get("nextn.shared_head_head") is not None
            rows.append(recorder("result_output", w.mm("nextn.shared_head_head", x) if own_head else self._head(x)))
        return self._finish(rows, recorder, trace)

    def state(self, il, *, seq=0):
        """Return copies of a layer's state, under upstream's names.

        r, the conv window, [n_channel, d_conv - 1] and s [H_v, S_v, S_k]; or k and v [n_past, n_head_kv, head_dim].
        """
        return {name: x.copy() for name, x in self._layer_state(il, seq).items()}

    def set_state(self, il, values, *, seq=0):
        """Replace a layer's state; names and, but for the number of cached tokens, shapes must be those of `state`."""
        now = self._layer_state(il, seq)
        same = set(values) == set(now) and all(np.shape(values[n])[1:] == now[n].shape[1:] for n in now)
        if not same:
            got, want = ({n: np.shape(x) for n, x in s.items()} for s in (values, now))
            raise StateError(f"layer {il}, sequence {seq}: state {got} does not fit {want}")
        self._states[seq][il] = {n: np.array(values[n], dtype=np.float64) for n in now}

    def copy(self, src, dst):
        """Make sequence dst an independent copy of src."""
        self._states[dst] = {il: self.state(il, seq=src) for il in self._states.get(src, {})}

    def clear(self, seq=0):
        """Forget a sequence; its next token starts from zeros."""
        self._states.pop(seq, None)

    def _checked(self, tokens):
        n_vocab = len(self.w["token_embd.weight"])
        for token in tokens:
            if not 0 <= token < n_vocab:
                raise OptionError(f"token {token} is outside the vocabulary of {n_vocab}")
        return tokens

    def _finish(self, rows, recorder, trace):
        if trace is not None:
            trace.update(recorder.stacked())
        return np.stack(rows) if rows else np.empty((0, len(self.w["token_embd.weight"])))

    def _layer_state(self, il, seq):
        layers = self._states.setdefault(seq, {})
        if il not in layers:
            layers[il] = self._empty_state(il)
        return layers[il]

    def _empty_state(self, il):
        hp = self.hp
        S, H_k, H_v = hp.ssm_d_state, hp.ssm_n_group, hp.ssm_dt_rank
        if il < hp.n_layer and hp.recurrent_layers[il]:
            return {"r": np.zeros((S * (2 * H_k + H_v), hp.ssm_d_conv - 1)), "s": np.zeros((H_v, S, S))}
        return {name: np.zeros((0, hp.n_head_kv, hp.n_embd_head_k)) for name in ("k", "v")}

    def _head(self, x):
        return self.w.get("output.weight", self.w["token_embd.weight"]) @ x

    def _norm(self, x, weight, note):
        return note("norm", rms_norm(x, 1.0, self.hp.f_norm_rms_eps)) * weight

    def _block(self, x, il, state, note):
        w = Layer(self.w, il)
        cur = note("attn_norm", self._norm(x, w["attn_norm"], note))
        mix = self._attn_linear if "s" in state else self._attn
        x = note("attn_residual", mix(cur, w, state, note) + x)
        cur = note("attn_post_norm", self._norm(x, w["post_attention_norm"], note))
        return note("l_out", note("post_moe", note("ffn_out", self._ffn(cur, w, note)) + x))

    def _attn(self, cur, w, state, note):
        hp, S = self.hp, self.hp.n_embd_head_k
        q_full, k, v = self._qkv(cur, w)
        for name, x in (("Qcur_full", q_full), ("Kcur", k), ("Vcur", v)):
            note(name, x)
        q, gate = np.split(q_full.reshape(hp.n_head, 2 * S), 2, axis=1)
        q = note("Qcur_normed", self._norm(note("Qcur_view", q), w["attn_q_norm"], note))
        k = note("Kcur_normed", self._norm(k.reshape(hp.n_head_kv, S), w["attn_k_norm"], note))
        pos = len(state["k"])
        q = note("Qcur", rope_neox(q, pos, hp.rope, n_rot=hp.n_rot))
        k = note("Kcur", rope_neox(k, pos, hp.rope, n_rot=hp.n_rot))
        v = note("Vcur", v.reshape(hp.n_head_kv, S))
        state["k"], state["v"] = np.concatenate([state["k"], k[None]]), np.concatenate([state["v"], v[None]])
        out = attend(q, state["k"], state["v"], scale=hp.f_attention_scale or S**-0.5)
        out = note("attn_pregate", out.ravel())
        gate = note("gate_sigmoid", sigmoid(note("gate", gate.ravel())))
        return note("attn_output", w.mm("attn_output", note("attn_gated", out * gate)))

    def _qkv(self, cur, w):
        hp, S = self.hp, self.hp.n_embd_head_k
        if w.get("attn_qkv") is None:
            return [w.mm(name, cur) for name in ("attn_q", "attn_k", "attn_v")]
        return np.split(w.mm("attn_qkv", cur), np.cumsum([2 * S * hp.n_head, S * hp.n_head_kv]))

    def _attn_linear(self, cur, w, state, note):
        hp = self.hp
        S, H_k, H_v = hp.ssm_d_state, hp.ssm_n_group, hp.ssm_dt_rank
        qkv, z = self._qkvz(cur, w)
        note("linear_attn_qkv_mixed", qkv)
        note("z", z)
        ba = note("linear_attn_mixed_ba", w.mm("ssm_ba", cur)).reshape(H_k, 2, H_v // H_k)
        beta = note("beta", sigmoid(note("b", ba[:, 0].ravel())))
        a = note("a_softplus", softplus(note("a", ba[:, 1].ravel()) + w.get("ssm_dt", ".bias")))
        gate = note("gate", a * w.get("ssm_a", ""))
        conv, state["r"] = conv_step(note("conv_states", state["r"]), qkv, w["ssm_conv1d"])
        note("conv_state_last", state["r"])
        conv = note("conv_output_silu", silu(note("conv_output_raw", conv)))
        q, k, v = (x.reshape(-1, S) for x in np.split(conv, [S * H_k, 2 * S * H_k]))
        note("q_conv", q)
        note("k_conv", k)
        q, k = (pair_heads(l2_norm(x, hp.f_norm_rms_eps), H_v, self.head_pairing) for x in (q, k))
        note("q_conv_predelta", q)
        note("k_conv_predelta", k)
        note("v_conv_predelta", note("v_conv", v))
        out, state["s"] = delta_step(note("state_predelta", state["s"]), q, k, v, gate, beta)
        note("attn_output", out)
        note("new_state", state["s"])
        out = self._norm(out, w["ssm_norm"], note) * silu(z.reshape(H_v, S))
        return note("linear_attn_out", w.mm("ssm_out", note("final_output", out.ravel())))

    def _qkvz(self, cur, w):
        hp = self.hp
        S, H_k, H_v = hp.ssm_d_state, hp.ssm_n_group, hp.ssm_dt_rank
        if w.get("ssm_in") is None:
            return w.mm("attn_qkv", cur), w.mm("attn_gate", cur)
        # the legacy tensor holds q, k, v x r, z x r of one key head after the other
        r = H_v // H_k
        parts = np.split(w.mm("ssm_in", cur).reshape(H_k, -1), np.cumsum([S, S, r * S]), axis=1)
        q, k, v, z = (x.ravel() for x in parts)
        return np.concatenate([q, k, v]), z

    def _ffn(self, cur, w, note):
        hp = self.hp
        probs, order, weights = route(note("ffn_moe_logits", w.mm("ffn_gate_inp", cur)), hp.n_expert_used)
        note("ffn_moe_probs", probs)
        note("ffn_moe_argsort", order)
        ids = note("ffn_moe_topk", order[: hp.n_expert_used])
        total = note("ffn_moe_weights_sum", note("ffn_moe_weights", probs[ids]).sum(keepdims=True))
        note("ffn_moe_weights_sum_clamped", np.maximum(total, WEIGHT_SUM_MIN))
        note("ffn_moe_weights_norm", weights)
        if hp.expert_weights_scale not in (0.0, 1.0):
            weights = note("ffn_moe_weights_scaled", weights * hp.expert_weights_scale)
        gate, up = self._gate_up(cur, w, ids)
        inner = note("ffn_moe_swiglu", silu(note("ffn_moe_gate", gate)) * note("ffn_moe_up", up))
        down = note("ffn_moe_down", w.mm_id("ffn_down_exps", inner, ids))
        moe = note("ffn_moe_out", note("ffn_moe_weighted", down * weights[:, None]).sum(axis=0))
        if w.get("ffn_up_shexp") is None:
            return moe
        gate, up = note("ffn_gate", w.mm("ffn_gate_shexp", cur)), note("ffn_up", w.mm("ffn_up_shexp", cur))
        shared = note("ffn_shexp", w.mm("ffn_down_shexp", note("ffn_swiglu", silu(gate) * up)))
        gate = note("shared_expert_gate", w["ffn_gate_inp_shexp"].reshape(1, -1) @ cur)
        gate = note("shared_expert_gate_sigmoid", sigmoid(gate))
        return moe + note("ffn_shexp_gated", shared * gate)

    def _gate_up(self, cur, w, ids):
        if w.get("ffn_gate_up_exps") is None:
            return w.mm_id("ffn_gate_exps", cur, ids), w.mm_id("ffn_up_exps", cur, ids)
        return np.split(w.mm_id("ffn_gate_up_exps", cur, ids), 2, axis=1)


# the block's names that upstream spells otherwise in its MTP graph
MTP_NAMES = {
    "attn_norm": "mtp_attn_norm",
    "Qcur_full": "mtp_Qcur_full",
    "Qcur_normed": "mtp_Qcur_normed",
    "Kcur_normed": "mtp_Kcur_normed",
    "Qcur": "mtp_Qcur",
    "Kcur": "mtp_Kcur",
    "Vcur": "mtp_Vcur",
    "attn_pregate": "mtp_attn_pregate",
    "gate": "mtp_gate",
    "attn_output": "mtp_attn_out",
    "attn_residual": "mtp_attn_residual",
    "attn_post_norm": "mtp_attn_post_norm",
    "ffn_moe_out": "mtp_ffn_moe_out",
    "ffn_shexp": "mtp_ffn_shexp",
    "shared_expert_gate_sigmoid": "mtp_shared_expert_gate_sigmoid",
    "ffn_shexp_gated": "mtp_ffn_shexp_gated",
    "ffn_out": "mtp_ffn_out",
    "l_out": "mtp_post_ffn",
}
