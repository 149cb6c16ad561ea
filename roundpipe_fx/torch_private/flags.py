"""Flags of Dynamo, and functions that it does not trace, set for our compilations only."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo

from roundpipe_fx.torch_private.forks import ForkedLock
from roundpipe_fx.torch_private.random_branches import install_known_branches
from roundpipe_fx.torch_private.tracing_patches import break_at_transformed_functions, keep_float_updates
from roundpipe_fx.torch_private.tracing_retries import install_retries

__all__ = ["allowed_in_graph", "dynamo_flags", "is_ours"]

# Methods through which libraries log inside ``forward`` (Hugging Face does); tracing skips the calls.
_LOGGER_METHODS = ("debug", "info", "warning", "warn", "warning_once", "info_once", "warning_advice", "error")

_MOST_COMPILATIONS = 64


class _Local(threading.local):
    flags_are_set = False


_local = _Local()
patching = ForkedLock()


_COUNT = r".*\['num_items_in_batch'\]"
"""The number of what counts in a batch, which Hugging Face's Trainer passes: another one each step."""


@contextlib.contextmanager
def dynamo_flags(pipelined: bool = False) -> Iterator[None]:
    """Context manager that sets Dynamo's flags for our compilation and restores them on exit.

    Data-dependent shapes and scalars are captured into the graph instead of breaking it where possible, and so are
    branches on random numbers with a known outcome. Recurrent modules and packed sequences are traced, loggers are
    skipped, and hooks that are added to submodules later are guarded on. The recompile limit is raised: within a budget
    in bytes there is a plan for each range of sizes, and none for code that runs eagerly. A whole number that a module
    keeps as an attribute becomes an input once it has changed, as PyTorch does it for others: a model that counts its
    steps would be compiled in each. (Not in a pipeline, whose microbatches must not hand on what they count: that is
    seen where a number is part of the code.) Inside DDP the graph is not
    cut at DDP's buckets: a plan is for a whole step, and so is a pipeline's schedule.

    It is entered while Dynamo compiles a frame; nothing that runs in a step reads these flags. It may be nested.

    Args:
        pipelined: whether the frame is part of a pipeline.
    """
    if _local.flags_are_set:
        yield
        return
    with patching:
        _patch_dynamo()
    config = torch._dynamo.config
    flags = config.patch(
        recompile_limit=max(config.recompile_limit, _MOST_COMPILATIONS),
        capture_dynamic_output_shape_ops=True,
        capture_scalar_outputs=True,
        skip_nnmodule_hook_guards=False,
        ignore_logging_functions=config.ignore_logging_functions | _logging_functions(),
        allow_rnn=True,
        optimize_ddp=False,
        # With dynamic=True, which assumes nothing to be static, numbers of heads and layers would be symbolic too.
        allow_unspec_int_on_nn_module=config.allow_unspec_int_on_nn_module
        or (config.assume_static_by_default and not pipelined),
    )
    sources = filter(None, [torch.compiler.config.dynamic_sources, _COUNT])
    numbers = torch.compiler.config.patch(dynamic_sources=",".join(sources))  # type: ignore[attr-defined]
    _local.flags_are_set = True
    try:
        with flags, numbers:
            yield
    finally:
        _local.flags_are_set = False


_allowed: Counter[int] = Counter()
"""By the identity of a function, the number of compilations that allow it in graphs."""


@contextlib.contextmanager
def allowed_in_graph(function: Callable[..., Any]) -> Iterator[None]:
    """Context manager in which Dynamo puts calls of a function, or of an ``autograd.Function``, in the graph.

    ``torch.compiler.allow_in_graph`` does so for all compilations of the process.
    """
    from torch._dynamo.trace_rules import _allowed_callable_ids, is_callable_allowed

    key = id(function)
    with patching:
        is_users = is_callable_allowed(function) and not _allowed[key]
        if not is_users:
            _allowed[key] += 1
            _allowed_callable_ids.add(key)
    try:
        yield
    finally:
        with patching:
            _allowed[key] -= not is_users
            if not is_users and not _allowed[key]:
                _allowed_callable_ids.remove(key)


@functools.cache
def _patch_dynamo() -> None:
    """Patch Dynamo for our compilations, once: when a compiled model is first called, not when it is imported."""
    install_known_branches(is_ours)
    keep_float_updates(is_ours)
    install_retries(is_ours)
    break_at_transformed_functions(is_ours)
    _log_metrics_with_functions()


def is_ours() -> bool:
    """Return whether the current thread traces one of our compilations."""
    return _local.flags_are_set


def _logging_functions() -> set[Any]:
    """Logging functions to skip. Not cached: Hugging Face adds methods to loggers when it is imported."""
    functions: set[Any] = set()
    for owner in (logging.Logger, logging.LoggerAdapter):
        for name in _LOGGER_METHODS:
            method = getattr(owner, name, None)
            if method is not None:
                functions.add(method)
    return functions


def _log_metrics_with_functions() -> None:
    """Make Dynamo log its configuration although ``ignore_logging_functions`` is set, which fails in torch 2.11.

    It would log an error with a traceback at each compilation, and lose its metrics.
    """
    from torch._dynamo import utils

    in_full = utils._get_dynamo_config_for_logging

    def unless_it_cannot_be_written() -> str | None:
        try:
            return in_full()
        except TypeError:
            return None

    utils._get_dynamo_config_for_logging = unless_it_cannot_be_written
