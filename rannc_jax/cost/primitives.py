"""Which primitives are alike: sets of names that the cost rules are written for.

Names are those of JAX 0.10 and later; a name that a version does not have does no harm. A primitive
that is in no set is priced by its size (`flops.work`).
"""


def names(text: str) -> frozenset[str]:
    """A set of primitive names, written as words."""
    return frozenset(text.split())


VIEWS = names(
    "reshape squeeze expand_dims bitcast_convert_type optimization_barrier stop_gradient name "
    "sharding_constraint layout_constraint random_wrap random_unwrap random_clone pvary reshard "
    "debug_print debug_callback platform_index to_edtype from_edtype tie stage axis_index create_token "
    "after_all dce_sink pcast"
)
MOVES = names(
    "broadcast_in_dim broadcast_to transpose convert_element_type iota iota_2x32_shape rev pad "
    "concatenate copy copy_p split stack unstack reduce_precision tile device_put empty empty2 zeros_like"
)
SLICES = names("slice dynamic_slice gather")
ARITHMETIC = names(
    "add sub mul div rem neg sign abs max min and or xor not eq ne lt le gt ge lt_to le_to eq_to "
    "select_n clamp square sqrt rsqrt is_finite floor ceil round nextafter shift_left "
    "shift_right_logical shift_right_arithmetic real imag conj complex add_any population_count clz "
    "mulhi integer_pow"
)
TRANSCENDENTAL = names(
    "exp exp2 expm1 log log1p log2 log10 tanh sin cos tan asin acos atan sinh cosh asinh acosh atan2 atanh "
    "logistic erf erfc erf_inv pow cbrt lgamma digamma polygamma igamma igammac igamma_grad_a "
    "random_gamma_grad regularized_incomplete_beta bessel_i0e bessel_i1e zeta"
)
REDUCTIONS = names(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin reduce"
)
CUMULATIVE = names("cumsum cumprod cummax cummin cumlogsumexp")
WINDOWS = names(
    "reduce_window reduce_window_sum reduce_window_max reduce_window_min select_and_scatter "
    "select_and_scatter_add select_and_gather_add"
)
SCATTERS = names(
    "scatter scatter_add scatter-add scatter_mul scatter-mul scatter_min scatter-min scatter_max "
    "scatter-max scatter_sub scatter-sub"
)
MATMULS = names("dot_general ragged_dot ragged_dot_general scaled_dot scaled_matmul_wrapper")
CONVOLUTIONS = names("conv_general_dilated")
ATTENTION = names("dot_product_attention_fwd_wrapper dot_product_attention_fp8_fwd_wrapper")
COLLECTIVES = names(
    "psum pmax pmin psum_invariant ppermute pbroadcast all_to_all ragged_all_to_all all_gather "
    "all_gather_invariant reduce_scatter"
)
RANDOM = names(
    "random_bits random_seed random_fold_in random_split random_gamma threefry2x32 threefry4x32 "
    "philox2x32 philox4x32 rng_bit_generator rng_uniform"
)
CHECKPOINTS = names("remat remat2 checkpoint remat_opt")
CUSTOM_VJPS = names("custom_vjp_call custom_vjp_call_jaxpr")
TRANSPARENT = (
    CHECKPOINTS
    | CUSTOM_VJPS
    | names("jit pjit closed_call core_call custom_jvp_call custom_vmap_call composite call")
)
"""Equations with one body that takes exactly their operands, gives exactly their results and runs once."""
