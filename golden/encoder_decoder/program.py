import torch


def forward(args):
    (
        encoder_0_norm1_weight,
        encoder_0_norm1_bias,
        source,
        encoder_0_attention_key_value_weight,
        encoder_0_attention_key_value_bias,
        encoder_0_attention_query_weight,
        encoder_0_attention_query_bias,
        encoder_0_attention_out_weight,
        encoder_0_attention_out_bias,
        encoder_0_norm2_weight,
        encoder_0_norm2_bias,
        encoder_0_mlp_0_weight,
        encoder_0_mlp_0_bias,
        encoder_0_mlp_2_weight,
        encoder_0_mlp_2_bias,
        decoder_0_norm1_weight,
        decoder_0_norm1_bias,
        target,
        decoder_0_attention_key_value_weight,
        decoder_0_attention_key_value_bias,
        decoder_0_attention_query_weight,
        decoder_0_attention_query_bias,
        decoder_0_attention_out_weight,
        decoder_0_attention_out_bias,
        decoder_0_norm2_weight,
        decoder_0_norm2_bias,
        decoder_0_mlp_0_weight,
        decoder_0_mlp_0_bias,
        decoder_0_mlp_2_weight,
        decoder_0_mlp_2_bias,
        cross_0_key_value_weight,
        cross_0_key_value_bias,
        cross_0_query_weight,
        cross_0_query_bias,
        cross_0_out_weight,
        cross_0_out_bias,
    ) = args
    args.clear()
    # stage 0 forward: encoder.0.norm1 … encoder.0
    call = [
        encoder_0_norm1_weight, encoder_0_norm1_bias, source, encoder_0_attention_key_value_weight,
        encoder_0_attention_key_value_bias, encoder_0_attention_query_weight, encoder_0_attention_query_bias,
        encoder_0_attention_out_weight, encoder_0_attention_out_bias, encoder_0_norm2_weight, encoder_0_norm2_bias,
        encoder_0_mlp_0_weight, encoder_0_mlp_0_bias, encoder_0_mlp_2_weight, encoder_0_mlp_2_bias,
    ]
    del (encoder_0_mlp_2_bias)
    [_scaled_dot_product_flash_attention_for_cpu_rng_state, add_1] = stage_0_forward(call)
    # stage 1 forward: decoder.0.norm1 … cross.0.out
    call = [
        decoder_0_norm1_weight, decoder_0_norm1_bias, target, decoder_0_attention_key_value_weight,
        decoder_0_attention_key_value_bias, decoder_0_attention_query_weight, decoder_0_attention_query_bias,
        decoder_0_attention_out_weight, decoder_0_attention_out_bias, decoder_0_norm2_weight, decoder_0_norm2_bias,
        decoder_0_mlp_0_weight, decoder_0_mlp_0_bias, decoder_0_mlp_2_weight, decoder_0_mlp_2_bias,
        cross_0_key_value_weight, cross_0_key_value_bias, cross_0_query_weight, cross_0_query_bias, cross_0_out_weight,
        cross_0_out_bias, add_1,
    ]
    [
        _scaled_dot_product_flash_attention_for_cpu_1_rng_state,
        _scaled_dot_product_flash_attention_for_cpu_2_rng_state, mean,
    ] = stage_1_forward(call)
    return (
        mean, encoder_0_norm1_weight, encoder_0_norm1_bias, source, encoder_0_attention_key_value_weight,
        encoder_0_attention_key_value_bias, encoder_0_attention_query_weight, encoder_0_attention_query_bias,
        encoder_0_attention_out_weight, encoder_0_attention_out_bias, encoder_0_norm2_weight, encoder_0_norm2_bias,
        encoder_0_mlp_0_weight, encoder_0_mlp_0_bias, encoder_0_mlp_2_weight, decoder_0_norm1_weight,
        decoder_0_norm1_bias, target, decoder_0_attention_key_value_weight, decoder_0_attention_key_value_bias,
        decoder_0_attention_query_weight, decoder_0_attention_query_bias, decoder_0_attention_out_weight,
        decoder_0_attention_out_bias, decoder_0_norm2_weight, decoder_0_norm2_bias, decoder_0_mlp_0_weight,
        decoder_0_mlp_0_bias, decoder_0_mlp_2_weight, decoder_0_mlp_2_bias, cross_0_key_value_weight,
        cross_0_key_value_bias, cross_0_query_weight, cross_0_query_bias, cross_0_out_weight, cross_0_out_bias,
        _scaled_dot_product_flash_attention_for_cpu_rng_state, add_1,
        _scaled_dot_product_flash_attention_for_cpu_1_rng_state,
        _scaled_dot_product_flash_attention_for_cpu_2_rng_state,
    )


def backward(args):
    (
        encoder_0_norm1_weight,
        encoder_0_norm1_bias,
        source,
        encoder_0_attention_key_value_weight,
        encoder_0_attention_key_value_bias,
        encoder_0_attention_query_weight,
        encoder_0_attention_query_bias,
        encoder_0_attention_out_weight,
        encoder_0_attention_out_bias,
        encoder_0_norm2_weight,
        encoder_0_norm2_bias,
        encoder_0_mlp_0_weight,
        encoder_0_mlp_0_bias,
        encoder_0_mlp_2_weight,
        decoder_0_norm1_weight,
        decoder_0_norm1_bias,
        target,
        decoder_0_attention_key_value_weight,
        decoder_0_attention_key_value_bias,
        decoder_0_attention_query_weight,
        decoder_0_attention_query_bias,
        decoder_0_attention_out_weight,
        decoder_0_attention_out_bias,
        decoder_0_norm2_weight,
        decoder_0_norm2_bias,
        decoder_0_mlp_0_weight,
        decoder_0_mlp_0_bias,
        decoder_0_mlp_2_weight,
        decoder_0_mlp_2_bias,
        cross_0_key_value_weight,
        cross_0_key_value_bias,
        cross_0_query_weight,
        cross_0_query_bias,
        cross_0_out_weight,
        cross_0_out_bias,
        _scaled_dot_product_flash_attention_for_cpu_rng_state,
        add_1,
        _scaled_dot_product_flash_attention_for_cpu_1_rng_state,
        _scaled_dot_product_flash_attention_for_cpu_2_rng_state,
        tangents_1,
    ) = args
    args.clear()
    # stage 1 recompute: decoder.0.norm1 … cross.0.out
    call = [
        decoder_0_norm1_weight, decoder_0_norm1_bias, target, decoder_0_attention_key_value_weight,
        decoder_0_attention_key_value_bias, decoder_0_attention_query_weight, decoder_0_attention_query_bias,
        decoder_0_attention_out_weight, decoder_0_attention_out_bias, decoder_0_norm2_weight, decoder_0_norm2_bias,
        decoder_0_mlp_0_weight, decoder_0_mlp_0_bias, decoder_0_mlp_2_weight, decoder_0_mlp_2_bias,
        cross_0_key_value_weight, cross_0_key_value_bias, cross_0_query_weight, cross_0_query_bias, cross_0_out_weight,
        cross_0_out_bias, add_1, _scaled_dot_product_flash_attention_for_cpu_1_rng_state,
        _scaled_dot_product_flash_attention_for_cpu_2_rng_state,
    ]
    del (
        decoder_0_attention_key_value_bias, decoder_0_attention_query_bias, decoder_0_attention_out_bias,
        decoder_0_mlp_0_bias, decoder_0_mlp_2_bias, cross_0_key_value_bias, cross_0_query_bias, cross_0_out_bias,
        _scaled_dot_product_flash_attention_for_cpu_1_rng_state,
        _scaled_dot_product_flash_attention_for_cpu_2_rng_state,
    )
    [
        getitem_45, getitem_46, getitem_47, addmm_13, addmm_14, getitem_50, getitem_51, add_9, getitem_52, getitem_53,
        getitem_54, addmm_16, gelu_2, add_10, addmm_18, addmm_19, getitem_57, getitem_58, mul,
    ] = stage_1_recompute(call)
    streams.record_event(2, 0)
    # stage 1 backward: decoder.0.norm1 … cross.0.out
    call = [
        decoder_0_norm1_weight, decoder_0_norm1_bias, target, decoder_0_attention_key_value_weight,
        decoder_0_attention_query_weight, decoder_0_attention_out_weight, decoder_0_norm2_weight, decoder_0_norm2_bias,
        decoder_0_mlp_0_weight, decoder_0_mlp_2_weight, cross_0_key_value_weight, cross_0_query_weight,
        cross_0_out_weight, tangents_1, add_1, getitem_45, getitem_46, getitem_47, addmm_13, addmm_14, getitem_50,
        getitem_51, add_9, getitem_52, getitem_53, getitem_54, addmm_16, gelu_2, add_10, addmm_18, addmm_19, getitem_57,
        getitem_58, mul,
    ]
    del (
        decoder_0_norm1_weight, decoder_0_norm1_bias, target, decoder_0_attention_key_value_weight,
        decoder_0_attention_query_weight, decoder_0_attention_out_weight, decoder_0_norm2_weight, decoder_0_norm2_bias,
        decoder_0_mlp_0_weight, decoder_0_mlp_2_weight, cross_0_key_value_weight, cross_0_query_weight,
        cross_0_out_weight, tangents_1, add_1, getitem_45, getitem_46, getitem_47, addmm_13, addmm_14, getitem_50,
        getitem_51, add_9, getitem_52, getitem_53, getitem_54, addmm_16, gelu_2, add_10, addmm_18, addmm_19, getitem_57,
        getitem_58, mul,
    )
    [
        mm_1, view_39, mm_3, view_46, mm_4, mm_5, view_49, view_50, mm_7, view_52, mm_9, view_55, getitem_28,
        getitem_29, mm_11, view_58, mm_13, view_65, mm_15, view_68, getitem_34, getitem_35,
    ] = stage_1_backward(call)
    streams.fork(0, 1)
    streams.wait_event(2, 1)
    streams.record_streams([_scaled_dot_product_flash_attention_for_cpu_rng_state], 1)
    # stage 0 recompute: encoder.0.norm1 … encoder.0
    call = [
        encoder_0_norm1_weight, encoder_0_norm1_bias, source, encoder_0_attention_key_value_weight,
        encoder_0_attention_key_value_bias, encoder_0_attention_query_weight, encoder_0_attention_query_bias,
        encoder_0_attention_out_weight, encoder_0_attention_out_bias, encoder_0_norm2_weight, encoder_0_norm2_bias,
        encoder_0_mlp_0_weight, encoder_0_mlp_0_bias, _scaled_dot_product_flash_attention_for_cpu_rng_state,
    ]
    del (
        encoder_0_attention_key_value_bias, encoder_0_attention_query_bias, encoder_0_attention_out_bias,
        encoder_0_mlp_0_bias, _scaled_dot_product_flash_attention_for_cpu_rng_state,
    )
    [
        getitem_59, getitem_60, getitem_61, addmm_21, addmm_22, getitem_64, getitem_65, add_12, getitem_66, getitem_67,
        getitem_68, addmm_24, gelu_3,
    ] = stage_0_recompute(call)
    streams.record_event(3, 1)
    streams.join(1, 0)
    streams.wait_event(3, 0)
    streams.record_streams([
        getitem_59, getitem_60, getitem_61, addmm_21, addmm_22, getitem_64, getitem_65, add_12, getitem_66, getitem_67,
        getitem_68, addmm_24, gelu_3,
    ], 0)
    # stage 0 backward: encoder.0.norm1 … encoder.0
    call = [
        encoder_0_norm1_weight, encoder_0_norm1_bias, source, encoder_0_attention_key_value_weight,
        encoder_0_attention_query_weight, encoder_0_attention_out_weight, encoder_0_norm2_weight, encoder_0_norm2_bias,
        encoder_0_mlp_0_weight, encoder_0_mlp_2_weight, getitem_59, getitem_60, getitem_61, addmm_21, addmm_22,
        getitem_64, getitem_65, add_12, getitem_66, getitem_67, getitem_68, addmm_24, gelu_3, mm_4, view_50,
    ]
    del (
        encoder_0_norm1_weight, encoder_0_norm1_bias, source, encoder_0_attention_key_value_weight,
        encoder_0_attention_query_weight, encoder_0_attention_out_weight, encoder_0_norm2_weight, encoder_0_norm2_bias,
        encoder_0_mlp_0_weight, encoder_0_mlp_2_weight, getitem_59, getitem_60, getitem_61, addmm_21, addmm_22,
        getitem_64, getitem_65, add_12, getitem_66, getitem_67, getitem_68, addmm_24, gelu_3, mm_4, view_50,
    )
    [
        mm_17, view_71, mm_19, view_74, getitem_37, getitem_38, mm_21, view_77, mm_23, view_84, mm_25, view_87,
        getitem_43, getitem_44,
    ] = stage_0_backward(call)
    return (
        getitem_43, getitem_44, None, mm_25, view_87, mm_23, view_84, mm_21, view_77, getitem_37, getitem_38, mm_19,
        view_74, mm_17, view_71, getitem_34, getitem_35, None, mm_15, view_68, mm_13, view_65, mm_11, view_58,
        getitem_28, getitem_29, mm_9, view_55, mm_7, view_52, mm_5, view_49, mm_3, view_46, mm_1, view_39,
    )
