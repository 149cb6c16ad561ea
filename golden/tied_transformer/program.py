import torch


def forward(args):
    (
        embedding_weight,
        tokens,
        blocks_0_norm1_weight,
        blocks_0_norm1_bias,
        blocks_0_attention_key_value_weight,
        blocks_0_attention_key_value_bias,
        blocks_0_attention_query_weight,
        blocks_0_attention_query_bias,
        blocks_0_attention_out_weight,
        blocks_0_attention_out_bias,
        blocks_0_norm2_weight,
        blocks_0_norm2_bias,
        blocks_0_mlp_0_weight,
        blocks_0_mlp_0_bias,
        blocks_0_mlp_2_weight,
        blocks_0_mlp_2_bias,
        blocks_1_norm1_weight,
        blocks_1_norm1_bias,
        blocks_1_attention_key_value_weight,
        blocks_1_attention_key_value_bias,
        blocks_1_attention_query_weight,
        blocks_1_attention_query_bias,
        blocks_1_attention_out_weight,
        blocks_1_attention_out_bias,
        blocks_1_norm2_weight,
        blocks_1_norm2_bias,
        blocks_1_mlp_0_weight,
        blocks_1_mlp_0_bias,
        blocks_1_mlp_2_weight,
        blocks_1_mlp_2_bias,
        norm_weight,
        norm_bias,
        targets,
    ) = args
    args.clear()
    # stage 0 forward: embedding … blocks.0
    call = [
        embedding_weight, tokens, blocks_0_norm1_weight, blocks_0_norm1_bias, blocks_0_attention_key_value_weight,
        blocks_0_attention_key_value_bias, blocks_0_attention_query_weight, blocks_0_attention_query_bias,
        blocks_0_attention_out_weight, blocks_0_attention_out_bias, blocks_0_norm2_weight, blocks_0_norm2_bias,
        blocks_0_mlp_0_weight, blocks_0_mlp_0_bias, blocks_0_mlp_2_weight, blocks_0_mlp_2_bias,
    ]
    del (blocks_0_mlp_2_bias)
    [
        _scaled_dot_product_flash_attention_for_cpu_rng_state, bernoulli_p_rng_state, bernoulli_p_1_rng_state, add_1,
    ] = stage_0_forward(call)
    # stage 1 forward: blocks.1.norm1 … norm
    call = [
        embedding_weight, blocks_1_norm1_weight, blocks_1_norm1_bias, blocks_1_attention_key_value_weight,
        blocks_1_attention_key_value_bias, blocks_1_attention_query_weight, blocks_1_attention_query_bias,
        blocks_1_attention_out_weight, blocks_1_attention_out_bias, blocks_1_norm2_weight, blocks_1_norm2_bias,
        blocks_1_mlp_0_weight, blocks_1_mlp_0_bias, blocks_1_mlp_2_weight, blocks_1_mlp_2_bias, norm_weight, norm_bias,
        targets, add_1,
    ]
    [
        _scaled_dot_product_flash_attention_for_cpu_1_rng_state, bernoulli_p_2_rng_state, bernoulli_p_3_rng_state,
        getitem_31,
    ] = stage_1_forward(call)
    return (
        getitem_31, embedding_weight, tokens, blocks_0_norm1_weight, blocks_0_norm1_bias,
        blocks_0_attention_key_value_weight, blocks_0_attention_key_value_bias, blocks_0_attention_query_weight,
        blocks_0_attention_query_bias, blocks_0_attention_out_weight, blocks_0_attention_out_bias,
        blocks_0_norm2_weight, blocks_0_norm2_bias, blocks_0_mlp_0_weight, blocks_0_mlp_0_bias, blocks_0_mlp_2_weight,
        blocks_1_norm1_weight, blocks_1_norm1_bias, blocks_1_attention_key_value_weight,
        blocks_1_attention_key_value_bias, blocks_1_attention_query_weight, blocks_1_attention_query_bias,
        blocks_1_attention_out_weight, blocks_1_attention_out_bias, blocks_1_norm2_weight, blocks_1_norm2_bias,
        blocks_1_mlp_0_weight, blocks_1_mlp_0_bias, blocks_1_mlp_2_weight, blocks_1_mlp_2_bias, norm_weight, norm_bias,
        targets, _scaled_dot_product_flash_attention_for_cpu_rng_state, bernoulli_p_rng_state, bernoulli_p_1_rng_state,
        add_1, _scaled_dot_product_flash_attention_for_cpu_1_rng_state, bernoulli_p_2_rng_state,
        bernoulli_p_3_rng_state,
    )


def backward(args):
    (
        embedding_weight,
        tokens,
        blocks_0_norm1_weight,
        blocks_0_norm1_bias,
        blocks_0_attention_key_value_weight,
        blocks_0_attention_key_value_bias,
        blocks_0_attention_query_weight,
        blocks_0_attention_query_bias,
        blocks_0_attention_out_weight,
        blocks_0_attention_out_bias,
        blocks_0_norm2_weight,
        blocks_0_norm2_bias,
        blocks_0_mlp_0_weight,
        blocks_0_mlp_0_bias,
        blocks_0_mlp_2_weight,
        blocks_1_norm1_weight,
        blocks_1_norm1_bias,
        blocks_1_attention_key_value_weight,
        blocks_1_attention_key_value_bias,
        blocks_1_attention_query_weight,
        blocks_1_attention_query_bias,
        blocks_1_attention_out_weight,
        blocks_1_attention_out_bias,
        blocks_1_norm2_weight,
        blocks_1_norm2_bias,
        blocks_1_mlp_0_weight,
        blocks_1_mlp_0_bias,
        blocks_1_mlp_2_weight,
        blocks_1_mlp_2_bias,
        norm_weight,
        norm_bias,
        targets,
        _scaled_dot_product_flash_attention_for_cpu_rng_state,
        bernoulli_p_rng_state,
        bernoulli_p_1_rng_state,
        add_1,
        _scaled_dot_product_flash_attention_for_cpu_1_rng_state,
        bernoulli_p_2_rng_state,
        bernoulli_p_3_rng_state,
        tangents_1,
    ) = args
    args.clear()
    # stage 1 recompute: blocks.1.norm1 … norm
    call = [
        embedding_weight, blocks_1_norm1_weight, blocks_1_norm1_bias, blocks_1_attention_key_value_weight,
        blocks_1_attention_key_value_bias, blocks_1_attention_query_weight, blocks_1_attention_query_bias,
        blocks_1_attention_out_weight, blocks_1_attention_out_bias, blocks_1_norm2_weight, blocks_1_norm2_bias,
        blocks_1_mlp_0_weight, blocks_1_mlp_0_bias, blocks_1_mlp_2_weight, blocks_1_mlp_2_bias, norm_weight, norm_bias,
        targets, add_1, _scaled_dot_product_flash_attention_for_cpu_1_rng_state, bernoulli_p_2_rng_state,
        bernoulli_p_3_rng_state,
    ]
    del (
        blocks_1_attention_key_value_bias, blocks_1_attention_query_bias, blocks_1_attention_out_bias,
        blocks_1_mlp_0_bias, blocks_1_mlp_2_bias, _scaled_dot_product_flash_attention_for_cpu_1_rng_state,
        bernoulli_p_2_rng_state, bernoulli_p_3_rng_state,
    )
    [
        getitem_54, getitem_55, getitem_56, addmm_10, addmm_11, getitem_59, getitem_60, run_with_rng_state_1, add_11,
        getitem_61, getitem_62, getitem_63, addmm_13, gelu_2, run_with_rng_state_2, add_12, getitem_64, getitem_65,
        getitem_66, _log_softmax_1, getitem_68,
    ] = stage_1_recompute(call)
    streams.record_event(2, 0)
    # stage 1 backward: blocks.1.norm1 … norm
    call = [
        embedding_weight, blocks_1_norm1_weight, blocks_1_norm1_bias, blocks_1_attention_key_value_weight,
        blocks_1_attention_query_weight, blocks_1_attention_out_weight, blocks_1_norm2_weight, blocks_1_norm2_bias,
        blocks_1_mlp_0_weight, blocks_1_mlp_2_weight, norm_weight, norm_bias, targets, tangents_1, add_1, getitem_54,
        getitem_55, getitem_56, addmm_10, addmm_11, getitem_59, getitem_60, run_with_rng_state_1, add_11, getitem_61,
        getitem_62, getitem_63, addmm_13, gelu_2, run_with_rng_state_2, add_12, getitem_64, getitem_65, getitem_66,
        _log_softmax_1, getitem_68,
    ]
    del (
        blocks_1_norm1_weight, blocks_1_norm1_bias, blocks_1_attention_key_value_weight,
        blocks_1_attention_query_weight, blocks_1_attention_out_weight, blocks_1_norm2_weight, blocks_1_norm2_bias,
        blocks_1_mlp_0_weight, blocks_1_mlp_2_weight, norm_weight, norm_bias, targets, tangents_1, add_1, getitem_54,
        getitem_55, getitem_56, addmm_10, addmm_11, getitem_59, getitem_60, run_with_rng_state_1, add_11, getitem_61,
        getitem_62, getitem_63, addmm_13, gelu_2, run_with_rng_state_2, add_12, getitem_64, getitem_65, getitem_66,
        _log_softmax_1, getitem_68,
    )
    [
        mm_1, getitem_34, getitem_35, mm_4, view_35, mm_6, view_38, getitem_37, getitem_38, mm_8, view_41, mm_10,
        view_48, mm_12, view_51, getitem_43, getitem_44, add_6,
    ] = stage_1_backward(call)
    streams.fork(0, 1)
    streams.wait_event(2, 1)
    streams.record_streams([
        _scaled_dot_product_flash_attention_for_cpu_rng_state, bernoulli_p_rng_state, bernoulli_p_1_rng_state,
    ], 1)
    # stage 0 recompute: embedding … blocks.0
    call = [
        embedding_weight, tokens, blocks_0_norm1_weight, blocks_0_norm1_bias, blocks_0_attention_key_value_weight,
        blocks_0_attention_key_value_bias, blocks_0_attention_query_weight, blocks_0_attention_query_bias,
        blocks_0_attention_out_weight, blocks_0_attention_out_bias, blocks_0_norm2_weight, blocks_0_norm2_bias,
        blocks_0_mlp_0_weight, blocks_0_mlp_0_bias, _scaled_dot_product_flash_attention_for_cpu_rng_state,
        bernoulli_p_rng_state, bernoulli_p_1_rng_state,
    ]
    del (
        embedding_weight, blocks_0_attention_key_value_bias, blocks_0_attention_query_bias, blocks_0_attention_out_bias,
        blocks_0_mlp_0_bias, _scaled_dot_product_flash_attention_for_cpu_rng_state, bernoulli_p_rng_state,
        bernoulli_p_1_rng_state,
    )
    [
        embedding_1, getitem_69, getitem_70, getitem_71, addmm_15, addmm_16, getitem_74, getitem_75,
        run_with_rng_state_4, add_13, getitem_76, getitem_77, getitem_78, addmm_18, gelu_3, run_with_rng_state_5,
    ] = stage_0_recompute(call)
    streams.record_event(3, 1)
    streams.join(1, 0)
    streams.wait_event(3, 0)
    streams.record_streams([
        embedding_1, getitem_69, getitem_70, getitem_71, addmm_15, addmm_16, getitem_74, getitem_75,
        run_with_rng_state_4, add_13, getitem_76, getitem_77, getitem_78, addmm_18, gelu_3, run_with_rng_state_5,
    ], 0)
    # stage 0 backward: embedding … blocks.0
    call = [
        tokens, blocks_0_norm1_weight, blocks_0_norm1_bias, blocks_0_attention_key_value_weight,
        blocks_0_attention_query_weight, blocks_0_attention_out_weight, blocks_0_norm2_weight, blocks_0_norm2_bias,
        blocks_0_mlp_0_weight, blocks_0_mlp_2_weight, embedding_1, getitem_69, getitem_70, getitem_71, addmm_15,
        addmm_16, getitem_74, getitem_75, run_with_rng_state_4, add_13, getitem_76, getitem_77, getitem_78, addmm_18,
        gelu_3, run_with_rng_state_5, mm_1, add_6,
    ]
    del (
        tokens, blocks_0_norm1_weight, blocks_0_norm1_bias, blocks_0_attention_key_value_weight,
        blocks_0_attention_query_weight, blocks_0_attention_out_weight, blocks_0_norm2_weight, blocks_0_norm2_bias,
        blocks_0_mlp_0_weight, blocks_0_mlp_2_weight, embedding_1, getitem_69, getitem_70, getitem_71, addmm_15,
        addmm_16, getitem_74, getitem_75, run_with_rng_state_4, add_13, getitem_76, getitem_77, getitem_78, addmm_18,
        gelu_3, run_with_rng_state_5, mm_1, add_6,
    )
    [
        mm_14, view_54, mm_16, view_57, getitem_46, getitem_47, mm_18, view_60, mm_20, view_67, mm_22, view_70,
        getitem_52, getitem_53, add_10,
    ] = stage_0_backward(call)
    return (
        add_10, None, getitem_52, getitem_53, mm_22, view_70, mm_20, view_67, mm_18, view_60, getitem_46, getitem_47,
        mm_16, view_57, mm_14, view_54, getitem_43, getitem_44, mm_12, view_51, mm_10, view_48, mm_8, view_41,
        getitem_37, getitem_38, mm_6, view_38, mm_4, view_35, getitem_34, getitem_35, None,
    )
