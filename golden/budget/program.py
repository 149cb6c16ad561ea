import torch


def forward(args):
    (
        norm_weight,
        norm_bias,
        x,
        attention_key_value_weight,
        attention_key_value_bias,
        attention_query_weight,
        attention_query_bias,
        attention_out_weight,
        attention_out_bias,
    ) = args
    args.clear()
    # stage 0 forward: norm … attention.out
    call = [
        norm_weight, norm_bias, x, attention_key_value_weight, attention_key_value_bias, attention_query_weight,
        attention_query_bias, attention_out_weight, attention_out_bias,
    ]
    del (attention_key_value_bias, attention_query_bias, attention_out_bias)
    [addmm, addmm_1, getitem_5, getitem_6, add, mean] = stage_0_forward(call)
    return (
        mean, norm_weight, norm_bias, x, attention_key_value_weight, attention_query_weight, attention_out_weight,
        addmm, addmm_1, getitem_5, getitem_6, add,
    )


def backward(args):
    (
        norm_weight,
        norm_bias,
        x,
        attention_key_value_weight,
        attention_query_weight,
        attention_out_weight,
        addmm,
        addmm_1,
        getitem_5,
        getitem_6,
        add,
        tangents_1,
    ) = args
    args.clear()
    # stage 0 backward: norm … attention.out
    call = [
        norm_weight, norm_bias, x, attention_key_value_weight, attention_query_weight, attention_out_weight, tangents_1,
        addmm, addmm_1, getitem_5, getitem_6, add,
    ]
    del (
        norm_weight, norm_bias, x, attention_key_value_weight, attention_query_weight, attention_out_weight, tangents_1,
        addmm, addmm_1, getitem_5, getitem_6, add,
    )
    [mm_1, view_11, mm_3, view_18, getitem_11, getitem_12, mm_5, view_21] = stage_0_backward(call)
    return (getitem_11, getitem_12, None, mm_5, view_21, mm_3, view_18, mm_1, view_11)
