"""The one place that touches private torch APIs.

Tried with torch 2.11.0, 2.13.0 and 2.15.0. Everything else in the project uses documented interfaces, so a torch
release that moves something is answered here.
"""

from __future__ import annotations

from roundpipe_fx.torch_private.aot import (
    aot_autograd,
    aot_flags,
    checkpoint_policy,
    default_partition,
    differentiated_outputs,
    input_mutations,
    leave_unused_gradients_out,
    mutated_inputs,
    registered_backwards,
    traces,
)
from roundpipe_fx.torch_private.autograd import (
    detached_with_version,
    in_backward,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    top_saved_tensor_hooks,
    when_backward_ends,
)
from roundpipe_fx.torch_private.compiling import (
    boxed_codegen,
    boxed_false,
    graph_module,
    has_kernel,
    inductor,
    without_wrapper,
)
from roundpipe_fx.torch_private.dynamo import (
    PassedThrough,
    UserLine,
    checkpoint_body,
    forget_compiled,
    forward_backend_context,
    graph_break,
    graph_breaks,
    input_path,
    line_of_break,
    module_path_text,
    traced_forward_call,
    tracing_inside_checkpoint,
    try_again,
    untraced_functions,
    why_disabled,
)
from roundpipe_fx.torch_private.flags import dynamo_flags, log_metrics_with_functions
from roundpipe_fx.torch_private.memory import WatchedMemory, memory_is_watched, profiler_runs, watch_memory
from roundpipe_fx.torch_private.modes import (
    active_dispatch_modes,
    dispatch_mode_flags,
    dispatch_modes,
    fakes_on,
    set_dispatch_mode_flags,
    without_modes,
)
from roundpipe_fx.torch_private.random_branches import settled_draw
from roundpipe_fx.torch_private.recurrence import spell_out_lstm
from roundpipe_fx.torch_private.rng import (
    draws_on_own_device,
    rng_states,
    run_and_save_rng_state,
    run_with_rng_state,
)
from roundpipe_fx.torch_private.sizes import (
    InputSize,
    assume_sizes,
    assumed_sizes,
    data_dependent_symbol,
    input_sizes,
    shape_env_of,
    size_binding,
    size_hint,
)

__all__ = [
    "InputSize",
    "PassedThrough",
    "UserLine",
    "WatchedMemory",
    "active_dispatch_modes",
    "aot_autograd",
    "aot_flags",
    "assume_sizes",
    "assumed_sizes",
    "boxed_codegen",
    "boxed_false",
    "checkpoint_body",
    "checkpoint_policy",
    "data_dependent_symbol",
    "default_partition",
    "detached_with_version",
    "differentiated_outputs",
    "dispatch_mode_flags",
    "dispatch_modes",
    "draws_on_own_device",
    "dynamo_flags",
    "fakes_on",
    "forget_compiled",
    "forward_backend_context",
    "graph_break",
    "graph_breaks",
    "graph_module",
    "has_kernel",
    "in_backward",
    "inductor",
    "input_mutations",
    "input_path",
    "input_sizes",
    "leave_unused_gradients_out",
    "line_of_break",
    "log_metrics_with_functions",
    "memory_is_watched",
    "module_path_text",
    "mutated_inputs",
    "pop_saved_tensor_hooks",
    "profiler_runs",
    "push_saved_tensor_hooks",
    "registered_backwards",
    "rng_states",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "set_dispatch_mode_flags",
    "settled_draw",
    "shape_env_of",
    "size_binding",
    "size_hint",
    "spell_out_lstm",
    "top_saved_tensor_hooks",
    "traced_forward_call",
    "traces",
    "tracing_inside_checkpoint",
    "try_again",
    "untraced_functions",
    "watch_memory",
    "when_backward_ends",
    "why_disabled",
    "without_modes",
    "without_wrapper",
]
