"""Operators that training of transformers and of CNNs uses, by the family that each belongs to."""

OPERATORS = {
    "matmul": (
        "mm bmm addmm addmm_ baddbmm baddbmm_ mv addmv dot addr _addmm_activation _grouped_mm"
        " _scaled_mm _int_mm convolution _convolution convolution_backward cudnn_convolution"
        " cudnn_convolution_transpose mkldnn_convolution _conv_depthwise2d _slow_conv2d_forward"
        " mkldnn_linear linear_backward _cudnn_rnn _cudnn_rnn_backward"
    ),
    "attention": (
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward"
        " _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward"
        " _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward"
        " _scaled_dot_product_flash_attention_for_cpu _cudnn_attention_forward"
        " _cudnn_attention_backward _flash_attention_forward _flash_attention_backward"
        " _efficient_attention_forward _efficient_attention_backward"
    ),
    "norm": "linalg_vector_norm norm _foreach_norm",
    "elementwise": (
        "add add_ sub sub_ rsub mul mul_ div div_ floor_divide pow neg exp log sqrt rsqrt"
        " reciprocal abs sign sin cos erf tanh tanh_backward sigmoid sigmoid_ sigmoid_backward"
        " relu relu_ threshold_backward gelu gelu_backward silu silu_ silu_backward mish"
        " hardswish hardswish_ hardswish_backward hardsigmoid hardtanh leaky_relu elu softplus"
        " glu glu_backward log_sigmoid_forward _prelu_kernel clamp clamp_min clamp_min_ maximum"
        " minimum where masked_fill masked_fill_ lerp lerp_ addcmul addcmul_ addcdiv addcdiv_"
        " eq ne lt gt ge le logical_not logical_and bitwise_and isnan isinf nan_to_num"
        " native_dropout_backward _masked_scale mse_loss_backward smooth_l1_loss_backward"
        " binary_cross_entropy_backward _thnn_fused_lstm_cell"
        " _foreach_add_ _foreach_mul _foreach_mul_ _foreach_div_ _foreach_sqrt _foreach_lerp_"
        " _foreach_addcmul_ _foreach_addcdiv_ _foreach_neg _foreach_reciprocal_"
        " _amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_"
    ),
    "reduction": (
        "sum mean var std var_mean max min amax amin argmax argmin prod any all cumsum cumprod"
        " logsumexp logcumsumexp count_nonzero _softmax _log_softmax _softmax_backward_data"
        " _log_softmax_backward_data nll_loss_forward nll_loss_backward nll_loss2d_forward"
        " mse_loss smooth_l1_loss huber_loss binary_cross_entropy _ctc_loss"
        " binary_cross_entropy_with_logits native_layer_norm native_layer_norm_backward"
        " _fused_rms_norm_backward native_group_norm native_group_norm_backward"
        " native_batch_norm native_batch_norm_backward cudnn_batch_norm"
        " cudnn_batch_norm_backward _native_batch_norm_legit _batch_norm_with_update"
        " batch_norm_backward batch_norm_stats batch_norm_elemt batch_norm_backward_reduce"
        " batch_norm_gather_stats_with_counts max_pool2d_with_indices avg_pool2d"
        " max_pool2d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d"
        " _adaptive_avg_pool2d_backward adaptive_max_pool2d _weight_norm_interface _foreach_max"
    ),
    "indexing": (
        "embedding embedding_dense_backward _embedding_bag _embedding_bag_backward"
        " _embedding_bag_dense_backward embedding_renorm_ gather scatter scatter_ scatter_add"
        " scatter_add_ scatter_reduce index index_select index_put index_put_ _index_put_impl_"
        " index_add index_add_ index_copy_ index_fill masked_select masked_scatter topk sort"
        " kthvalue searchsorted bucketize nonzero _unique2 unique_dim bincount median isin"
        " repeat_interleave upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d"
        " grid_sampler_2d max_unpool2d col2im"
    ),
    "copy": (
        "clone copy_ _to_copy cat stack fill_ zero_ zeros ones full zeros_like ones_like arange"
        " linspace eye repeat tril triu flip roll constant_pad_nd reflection_pad2d"
        " reflection_pad2d_backward select_backward slice_backward diagonal_backward diag_embed"
        " slice_scatter select_scatter pixel_shuffle im2col expand_copy view_copy"
        " split_with_sizes_copy _chunk_cat _foreach_copy_ _foreach_zero_ _pin_memory"
    ),
    "random": (
        "normal normal_ randn rand randint randperm uniform_ bernoulli bernoulli_ multinomial"
        " exponential_ native_dropout _fused_dropout"
    ),
    "optimizer": "_fused_adam _fused_adam_ _fused_adamw _fused_adamw_ _fused_sgd_ _fused_adagrad_",
    # Views, operators that only call others, and those that move nothing.
    None: (
        "view transpose permute t expand unsqueeze squeeze_ slice select split chunk detach"
        " as_strided _unsafe_view empty empty_like empty_strided linear matmul einsum conv2d"
        " layer_norm batch_norm group_norm instance_norm max_pool2d adaptive_avg_pool2d dropout"
        " softmax log_softmax cross_entropy_loss scaled_dot_product_attention reshape contiguous"
        " to flatten embedding_bag item _fused_sdp_choice"
    ),
}

COLLECTIVES = (
    "c10d::allreduce_ c10d::_allgather_base_ c10d::_reduce_scatter_base_ c10d::alltoall_base_"
    " c10d::broadcast_ c10d::barrier _c10d_functional::all_reduce"
    " _c10d_functional::all_gather_into_tensor _c10d_functional::reduce_scatter_tensor"
    " _c10d_functional::wait_tensor"
)
"""They move data between devices."""
