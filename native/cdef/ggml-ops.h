// The operations of ggml.h that build one node each, in its argument order. Markers: see ggml.h here.

// arithmetic
OP ggml_tensor * ggml_dup(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_add(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
OP ggml_tensor * ggml_add_inplace(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
OP ggml_tensor * ggml_add_id(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, ggml_tensor * ids);
OP ggml_tensor * ggml_sub(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
OP ggml_tensor * ggml_mul(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
OP ggml_tensor * ggml_mul_inplace(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
OP ggml_tensor * ggml_div(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
OP ggml_tensor * ggml_scale(ggml_context * ctx, ggml_tensor * a, float s);
OP ggml_tensor * ggml_scale_inplace(ggml_context * ctx, ggml_tensor * a, float s);
OP ggml_tensor * ggml_scale_bias(ggml_context * ctx, ggml_tensor * a, float s, float b);
OP ggml_tensor * ggml_clamp(ggml_context * ctx, ggml_tensor * a, float min, float max);
OP ggml_tensor * ggml_arange(ggml_context * ctx, float start, float stop, float step);
OP ggml_tensor * ggml_fill(ggml_context * ctx, ggml_tensor * a, float c);
OP ggml_tensor * ggml_fill_inplace(ggml_context * ctx, ggml_tensor * a, float c);

// element by element
OP ggml_tensor * ggml_sqr(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_sqrt(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_log(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_exp(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_expm1(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_sin(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_cos(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_abs(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_sgn(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_neg(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_step(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_floor(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_round(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_tanh(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_elu(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_relu(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_sigmoid(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_sigmoid_inplace(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_softplus(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_gelu(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_gelu_erf(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_gelu_quick(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_silu(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_silu_inplace(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_swiglu(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_swiglu_split(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
OP ggml_tensor * ggml_geglu_split(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
OP ggml_tensor * ggml_reglu_split(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);

// rows
OP ggml_tensor * ggml_norm(ggml_context * ctx, ggml_tensor * a, float eps);
OP ggml_tensor * ggml_rms_norm(ggml_context * ctx, ggml_tensor * a, float eps);
OP ggml_tensor * ggml_rms_norm_inplace(ggml_context * ctx, ggml_tensor * a, float eps);
OP ggml_tensor * ggml_group_norm(ggml_context * ctx, ggml_tensor * a, int n_groups, float eps);
OP ggml_tensor * ggml_l2_norm(ggml_context * ctx, ggml_tensor * a, float eps);
OP ggml_tensor * ggml_sum(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_sum_rows(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_mean(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_cumsum(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_argmax(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_argsort(ggml_context * ctx, ggml_tensor * a, int order);
OP ggml_tensor * ggml_argsort_top_k(ggml_context * ctx, ggml_tensor * a, int k);
OP ggml_tensor * ggml_top_k(ggml_context * ctx, ggml_tensor * a, int k);
OP ggml_tensor * ggml_soft_max(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_soft_max_inplace(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_soft_max_ext(ggml_context * ctx, ggml_tensor * a, MAYBE ggml_tensor * mask, float scale, float max_bias);
OP ggml_tensor * ggml_diag_mask_inf(ggml_context * ctx, ggml_tensor * a, int n_past);
OP ggml_tensor * ggml_diag_mask_zero(ggml_context * ctx, ggml_tensor * a, int n_past);
OP ggml_tensor * ggml_get_rows(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
OP ggml_tensor * ggml_set_rows(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, ggml_tensor * c);

// matrices
OP ggml_tensor * ggml_mul_mat(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
OP ggml_tensor * ggml_mul_mat_id(ggml_context * ctx, ggml_tensor * as, ggml_tensor * b, ggml_tensor * ids);
OP ggml_tensor * ggml_out_prod(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
OP ggml_tensor * ggml_tri(ggml_context * ctx, ggml_tensor * a, int kind);
OP ggml_tensor * ggml_diag(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_solve_tri(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, bool left, bool lower, bool uni);
OPTIONAL void ggml_mul_mat_set_prec(ggml_tensor * a, int prec);

// copies and layout
OP ggml_tensor * ggml_cpy(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
OP ggml_tensor * ggml_cast(ggml_context * ctx, ggml_tensor * a, int type);
OP ggml_tensor * ggml_cont(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_cont_1d(ggml_context * ctx, ggml_tensor * a, int64_t ne0);
OP ggml_tensor * ggml_cont_2d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1);
OP ggml_tensor * ggml_cont_3d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1, int64_t ne2);
OP ggml_tensor * ggml_cont_4d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3);
OP ggml_tensor * ggml_reshape(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
OP ggml_tensor * ggml_reshape_1d(ggml_context * ctx, ggml_tensor * a, int64_t ne0);
OP ggml_tensor * ggml_reshape_2d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1);
OP ggml_tensor * ggml_reshape_3d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1, int64_t ne2);
OP ggml_tensor * ggml_reshape_4d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3);
OP ggml_tensor * ggml_view_1d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, size_t offset);
OP ggml_tensor * ggml_view_2d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1, size_t nb1, size_t offset);
OP ggml_tensor * ggml_view_3d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1, int64_t ne2, size_t nb1, size_t nb2, size_t offset);
OP ggml_tensor * ggml_view_4d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3, size_t nb1, size_t nb2, size_t nb3, size_t offset);
OP ggml_tensor * ggml_permute(ggml_context * ctx, ggml_tensor * a, int axis0, int axis1, int axis2, int axis3);
OP ggml_tensor * ggml_transpose(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_repeat(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
OP ggml_tensor * ggml_repeat_4d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3);
OP ggml_tensor * ggml_concat(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, int dim);
OP ggml_tensor * ggml_pad(ggml_context * ctx, ggml_tensor * a, int p0, int p1, int p2, int p3);
OP ggml_tensor * ggml_pad_ext(ggml_context * ctx, ggml_tensor * a, int lp0, int rp0, int lp1, int rp1, int lp2, int rp2, int lp3, int rp3);
OP ggml_tensor * ggml_roll(ggml_context * ctx, ggml_tensor * a, int shift0, int shift1, int shift2, int shift3);
OP ggml_tensor * ggml_set(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, size_t nb1, size_t nb2, size_t nb3, size_t offset);
OP ggml_tensor * ggml_set_inplace(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, size_t nb1, size_t nb2, size_t nb3, size_t offset);
OP ggml_tensor * ggml_acc(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, size_t nb1, size_t nb2, size_t nb3, size_t offset);

// attention, recurrence, position
OP ggml_tensor * ggml_rope_ext(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, MAYBE ggml_tensor * c, int n_dims, int mode, int n_ctx_orig,
    float freq_base, float freq_scale, float ext_factor, float attn_factor, float beta_fast, float beta_slow);
OP ggml_tensor * ggml_rope_ext_inplace(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, MAYBE ggml_tensor * c, int n_dims, int mode, int n_ctx_orig,
    float freq_base, float freq_scale, float ext_factor, float attn_factor, float beta_fast, float beta_slow);
OP ggml_tensor * ggml_rope_multi(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, MAYBE ggml_tensor * c, int n_dims, int * sections, int mode, int n_ctx_orig,
    float freq_base, float freq_scale, float ext_factor, float attn_factor, float beta_fast, float beta_slow);
OP ggml_tensor * ggml_flash_attn_ext(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, MAYBE ggml_tensor * mask,
    float scale, float max_bias, float logit_softcap);
OPTIONAL void ggml_flash_attn_ext_set_prec(ggml_tensor * a, int prec);
OP ggml_tensor * ggml_conv_2d_dw_direct(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, int stride0, int stride1, int pad0, int pad1,
    int dilation0, int dilation1);
OP ggml_tensor * ggml_ssm_conv(ggml_context * ctx, ggml_tensor * sx, ggml_tensor * c);
OP ggml_tensor * ggml_gated_delta_net(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * g, ggml_tensor * beta,
    ggml_tensor * state, int64_t K);
OP ggml_tensor * ggml_gated_linear_attn(ggml_context * ctx, ggml_tensor * k, ggml_tensor * v, ggml_tensor * q, ggml_tensor * g, ggml_tensor * state, float scale);
