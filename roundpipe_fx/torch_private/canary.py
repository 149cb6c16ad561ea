"""Canary: whether PyTorch still has what this folder uses. Importing this module runs it.

A private name that a release has removed or renamed would fail at the first model that needs it, or, where it is read
with a default or compared as text, not at all. So all of them are looked for at once, and the error names each one.

Beyond Dynamo, which the package needs in any case, nothing is imported for it. In modules that are loaded names are
looked up. Of the others, and for names that only instances have, the source is searched, which takes a millisecond a
file; where a distribution has no sources, it is not. What docs/private-apis.md lists is what is looked for here; a test
compares the two.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch._dynamo

__all__ = ["SUPPORTED", "USED", "check", "missing"]

SUPPORTED = ("2.11", "2.15")
"""The oldest and the newest release of PyTorch that the package supports."""

USED: Mapping[str, str] = {
    "torch": (
        "Tensor._backward_hooks Tensor._base Tensor._make_wrapper_subclass Tensor._post_accumulate_grad_hooks "
        "Tensor._use_count Tensor._version "
        "UntypedStorage._cdata "
        "ops.aten._pack_padded_sequence_backward"
    ),
    "torch._C": (
        "DispatchKey.ADInplaceOrView _ForceDispatchKeyGuard _current_graph_task_id "
        "_dispatch_tls_is_dispatch_key_excluded _dispatch_tls_local_exclude_set _dispatch_tls_local_include_set "
        "_dispatch_tls_set_dispatch_key_excluded _disabled_torch_dispatch_impl _disabled_torch_function_impl "
        "_get_mkldnn_enabled _is_tracing "
        "_set_mkldnn_enabled _storage_Use_Count"
    ),
    "torch._C._autograd": (
        "_disable_profiler_legacy _enable_profiler_legacy _get_current_graph_task_keep_graph "
        "_pop_saved_tensors_default_hooks _profiler_enabled _push_saved_tensors_default_hooks "
        "_top_saved_tensors_default_hooks"
    ),
    "torch._C._distributed_c10d": "Backend.Options._timeout ProcessGroup._get_backend",
    "torch._C._dynamo.eval_frame": "_debug_get_cache_entry_list",
    "torch._C._profiler": "ProfilerConfig ProfilerState _ExperimentalConfig _RecordFunctionFast",
    "torch._VF": "_pack_padded_sequence _pad_packed_sequence lstm",
    "torch._dynamo": "assume_constant_result config",
    "torch._dynamo.backends.common": "aot_autograd",
    "torch._dynamo.config": "patch",
    "torch._dynamo.convert_frame": "CatchErrorsWrapper.__call__ ConvertFrameAssert.__call__ input_codes",
    "torch._dynamo.eval_frame": "OptimizedModule reset_code",
    "torch._dynamo.exc": "FailOnRecompileLimitHit ShortenTraceback Unsupported UserError UserErrorType unimplemented",
    "torch._dynamo.guards": "DeletedGuardManagerWrapper",
    "torch._dynamo.output_graph": "OutputGraph.remove_tensorify_specialized_graphargs",
    "torch._dynamo.symbolic_convert": (
        "InstructionTranslator.current_tx InstructionTranslatorBase.inline_user_function_return"
    ),
    "torch._dynamo.trace_rules": "_allowed_callable_ids is_callable_allowed",
    "torch._dynamo.utils": "_get_dynamo_config_for_logging get_compilation_metrics graph_break_reasons",
    "torch._dynamo.variables.functions": "SkipFunctionVariable.call_function UserFunctionVariable",
    "torch._dynamo.variables.misc": "AutogradFunctionVariable.call_apply",
    "torch._dynamo.variables.tensor": "TensorVariable.as_python_constant",
    "torch._functorch._aot_autograd.descriptors": (
        "BackwardTokenAOTInput ForwardTokenAOTInput GradAOTOutput.grad_of InputMutationAOTOutput.mutated_input "
        "PlainAOTInput.idx PlainAOTOutput SubclassGetAttrAOTInput.base SubclassGetAttrAOTOutput.base "
        "SyntheticBaseAOTInput TangentAOTInput.output ViewBaseAOTInput"
    ),
    "torch._functorch.config": "backward_pass_autocast donated_buffer patch",
    "torch._functorch.partitioners": "default_partition",
    "torch._guards": "TracingContext detect_fake_mode tracing",
    "torch._inductor": "list_options",
    "torch._inductor.codecache": "PyCodeCache.load_by_key_path",
    "torch._inductor.compile_fx": "compile_fx_inner",
    "torch._inductor.config": "fallback_random patch",
    "torch._inductor.decomposition": "select_decomp_table",
    "torch._inductor.output_code": "CompiledFxGraph CompiledFxGraph.current_callable",
    "torch._inductor.exc": "InductorError",
    "torch._inductor.graph": "GraphLowering.decide_layout_opt",
    "torch._inductor.inductor_prims": "_low_memory_max_pool_offsets_to_indices _low_memory_max_pool_with_offsets",
    "torch._inductor.ir": "DonatedBuffer",
    "torch._inductor.utils": "BoxedBool get_donated_idxs",
    "torch._inductor.virtualized": "V",
    "torch._logging": "trace_structured",
    "torch._library.custom_ops": "OPDEFS CustomOpDef",
    "torch._library.fake_class_registry": "FakeScriptObject",
    "torch._library.opaque_object": "is_opaque_value",
    "torch._ops": "OpOverload OpOverloadPacket",
    "torch._prims.rng_prims": "run_and_save_rng_state run_with_rng_state",
    "torch._subclasses.fake_tensor": (
        "DataDependentOutputException DynamicOutputShapeException FakeTensorMode UnsupportedFakeTensorException"
    ),
    "torch.autograd.profiler": "_is_profiler_enabled",
    "torch.autograd": "Variable._execution_engine.queue_callback _unsafe_preserve_version_counter",
    "torch.cuda.memory": "_snapshot",
    "torch.distributed._functional_collectives": "all_reduce wait_tensor",
    "torch.distributed.distributed_c10d": "_get_default_store _resolve_process_group",
    "torch.distributed.tensor": "DTensor._local_tensor",
    "torch.distributed.pipelining.microbatch": "_Replicate",
    "torch.distributed.fsdp": "FSDPModule._get_fsdp_state",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": "FSDPParamGroup._reshard_after_forward",
    "torch.fx._lazy_graph_module": "_LazyGraphModule _use_lazy_graph_module",
    "torch.fx._symbolic_trace": "is_fx_symbolic_tracing",
    "torch.fx.experimental.proxy_tensor": "disable_proxy_modes_tracing make_fx",
    "torch.fx.experimental.symbolic_shapes": (
        "CallMethodKey GuardOnDataDependentSymNode ShapeEnv.create_unbacked_symfloat ShapeEnv.create_unbacked_symint "
        "ShapeEnv.ignore_fresh_unbacked_symbols ShapeEnv.replace StrictMinMaxConstraint"
    ),
    "torch.fx.graph": "_BoxedCodeGen",
    "torch.fx.node": "Node._rename",
    "torch.multiprocessing.reductions": "StorageWeakRef.expired",
    "torch.nn.modules.batchnorm": "_BatchNorm _NormBase._check_input_dim",
    "torch.nn.modules.module": "Module._compiled_call_impl Module._get_name",
    "torch.nn.modules.rnn": "RNNBase._update_flat_weights",
    "torch.nn.parallel.distributed": (
        "DistributedDataParallel._get_active_ddp_module DistributedDataParallel._post_forward "
        "DistributedDataParallel._pre_forward"
    ),
    "torch.utils._python_dispatch": (
        "TorchDispatchMode _disable_current_modes _get_current_dispatch_mode _get_current_dispatch_mode_stack "
        "_is_in_any_mode_without_ignore_compile_internals _is_in_non_infra_torch_dispatch_mode "
        "_is_in_torch_dispatch_mode _pop_mode_temporarily is_traceable_wrapper_subclass"
    ),
    "torch.utils._pytree": (
        "SequenceKey TreeSpec key_get keystr tree_flatten tree_flatten_with_path tree_leaves tree_map tree_map_only "
        "tree_unflatten"
    ),
    "torch.utils._sympy.functions": "Max",
}
"""Names by module; those of classes with a member that is used."""

SPELLED: Mapping[str, tuple[str, ...]] = {
    "torch": ("self.compiler_fn", 'self.kwargs["options"]'),
    "torch._dynamo.convert_frame": ("_torchdynamo_orig_backend",),
    "torch._dynamo.decorators": ("_torchdynamo_disable",),
    "torch._dynamo.output_graph": ("compile_subgraph_reason", '"grapharg"', "_dynamo_source"),
    "torch._functorch._aot_autograd.utils": ("_boxed_call",),
    "torch._library.custom_ops": ("self._backward_fn", "self._opoverload", "self._qualname", "self._setup_context_fn"),
    "torch._ops": ("self._op ", "self._overloadname", "self._qualified_op_name", "self._schema"),
    "torch.fx.graph": ("self._codegen",),
    "torch.nn.modules.module": ('"_backward_hooks"', '"_backward_pre_hooks"', '"_modules"', "_metadata"),
    "torch.nn.modules.rnn": ("self._flat_weights",),
    "torch.distributed.fsdp._fully_shard._fsdp_common": ("shard_mesh_size",),
    "torch.distributed.fsdp._fully_shard._fsdp_param": ("_orig_size", "self.param_dtype", "self.orig_dtype"),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": (
        "self.fsdp_params",
        "self._reduce_dtype",
        "self.mesh_info",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state": ("_fsdp_param_group",),
    "torch.optim.lr_scheduler": ("_opt_called", "_wrapped_by_lr_sched"),
    "torch.optim.optimizer": ("self._optimizer_step_post_hooks", "self._optimizer_step_pre_hooks"),
    "torch._functorch._aot_autograd.runtime_wrappers": (
        "class CompiledFunction(torch.autograd.Function)",
        "class _AnalyzeCustomOpInputOutputMode(TorchDispatchMode)",
    ),
    "torch._inductor.compile_fx": ("original_output_strides", "user_visible_output_idxs"),
    "torch._inductor.codecache": ("self.cache_key_tag",),
    "torch._inductor.graph": ("self.bw_donated_idxs",),
    "torch._inductor.utils": ("fw_metadata.bw_donated_idxs",),
}
"""What must occur in the source of a module: attributes and keys that are read with a default, classes in functions."""


def check() -> None:
    """Look for everything.

    Raises:
        ImportError: names what is gone.
    """
    gone = list(missing())
    if gone:
        raise ImportError(
            f"roundpipe_fx uses private interfaces of PyTorch that torch {torch.__version__} does not have: "
            f"{', '.join(gone)}. The package supports torch {SUPPORTED[0]} to {SUPPORTED[1]}. Install one of these, or "
            "a newer roundpipe_fx. What each interface is used for is in docs/private-apis.md."
        )


def missing(loaded: Mapping[str, object] = sys.modules, root: Path = Path(torch.__file__).parent) -> Iterator[str]:
    """Yield the names that are gone.

    Args:
        loaded: modules by name; of others the source is searched.
        root: folder of PyTorch's sources.
    """
    for module, names in USED.items():
        for name in names.split():
            exists = _has(loaded[module], name) if module in loaded else _is_defined(_source(module, root), name)
            if not exists:
                yield f"{module}.{name}"
    for module, texts in SPELLED.items():
        source = _source(module, root)
        for text in texts:
            if source is not None and text not in source:
                yield f"{text} in {module}"


def _has(owner: object, name: str) -> bool:
    for part in name.split("."):
        fields = getattr(owner, "__dataclass_fields__", {})
        if not hasattr(owner, part) and part not in fields:
            return False
        owner = getattr(owner, part, None)
    return True


def _is_defined(source: str | None, name: str) -> bool:
    first, *members = name.split(".")
    if source is None:
        return True
    defined = re.search(rf"^(?:class|def)\s+{first}\b|^{first}\b.*=|^\s+{first},$", source, flags=re.MULTILINE)
    return defined is not None and all(re.search(rf"\b{member}\b", source) for member in members)


def _source(module: str, root: Path) -> str | None:
    path = root.joinpath(*module.split(".")[1:])
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file.read_text(encoding="utf-8")
    return None


check()
