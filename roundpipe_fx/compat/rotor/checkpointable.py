"""``Checkpointable``: a module that trains within a memory limit by a checkpointing sequence."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.api.compiled_module import CompiledModule, compiled_module
from roundpipe_fx.budget import available_memory, plan_or_error
from roundpipe_fx.compat.rotor.measuring import measure_layers
from roundpipe_fx.compat.rotor.nesting import Kept, Rerun, nest, run
from roundpipe_fx.ir.options import Options, RotorOptions
from roundpipe_fx.remat.follow_sequence import chain_of_segments, fit_sequence
from roundpipe_fx.remat.sequences.algorithms import ALGORITHMS, make_sequence
from roundpipe_fx.remat.sequences.layer_costs import Chain
from roundpipe_fx.remat.sequences.sequence import Sequence


class Checkpointable(nn.Module):
    """A module that trains within a memory limit: rotor's front end, for any module.

    ::

        model = Checkpointable(model)
        model.measure(x)
        model.compute_sequence(2 << 30)
        model(x).sum().backward()

    The layers of an ``nn.Sequential`` form the chain, are measured by running them, and run eagerly as nested
    checkpoints. Any other module is traced as one graph, as by :func:`roundpipe_fx.compile`; its segments form the
    chain, and it runs compiled. In evaluation, and without gradients, the module runs unchanged.

    Args:
        custom_input: measure with this input at once.
        mem_limit: bytes; compute the sequence for this limit at once, if there is an input. ``None``: 90 % of the
            device's free memory.
        mem_slots: how finely memory is counted.
        verbosity: 1: print the sequence, 2: and the chain, to standard error.
        preserve_rng_state: whether recomputation draws the same random numbers. ``False``: an ``nn.Sequential`` draws
            new ones, as with ``torch.utils.checkpoint``; for any other module random numbers are saved.
        loss_tmp_memory_usage: bytes that the loss, or other code between forward and backward, allocates.

    Attributes:
        chain: the costs of its layers, once measured.
        sequence: the operations, once computed.

    Raises:
        ValueError: a limit that cannot be met.
    """

    model: nn.Module
    _compiled: CompiledModule | None

    def __init__(
        self,
        model: nn.Module,
        custom_input: Any = None,
        mem_limit: int | None = None,
        mem_slots: int = 500,
        verbosity: int = 0,
        preserve_rng_state: bool = True,
        loss_tmp_memory_usage: int = 0,
    ) -> None:
        super().__init__()
        self.model = model
        self.mem_limit = mem_limit
        self.mem_slots = mem_slots
        self.verbosity = verbosity
        self.preserve_rng_state = preserve_rng_state
        self.loss_tmp_memory_usage = loss_tmp_memory_usage
        self.chain: Chain | None = None
        self.sequence: Sequence | None = None
        self._measured: Chain | None = None
        self._graph: OperationGraph | None = None
        self._how: tuple[Kept | Rerun, ...] = ()
        self._options = Options()
        self.__dict__["_compiled"] = None  # no submodule: it stands for the model
        if custom_input is not None:
            self.measure(custom_input)
            if mem_limit is not None:
                self.compute_sequence(mem_limit)

    @property
    def _layers(self) -> list[nn.Module] | None:
        # A subclass with a forward of its own is like any other module.
        plain = isinstance(self.model, nn.Sequential) and type(self.model).forward is nn.Sequential.forward
        return list(self.model.children()) if plain else None

    @property
    def _device(self) -> torch.device:
        parameter = next(self.model.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    def measure(self, custom_input: Any) -> None:
        """Measure seconds and bytes of the layers on an input.

        Args:
            custom_input: a tensor; a tuple of arguments; or a mapping of keyword arguments. For an ``nn.Sequential``,
                the input of its first layer.
        """
        layers = self._layers
        if layers is not None:
            self._measured = measure_layers(layers, custom_input, self._device)
        else:
            args, kwargs = _arguments(custom_input)
            options = Options(memory_budget=1.0, cost="measured")
            with torch.enable_grad():
                plan = compiled_module(self.model, options, fullgraph=True, dynamic=None).trace(*args, **kwargs)
            assert plan.operations is not None
            self._graph = plan.operations
            self._measured = chain_of_segments(plan.operations)
        self.chain = self.sequence = None

    def build_chain(self, mem_limit: int | None = None) -> Chain:
        """Build the chain as measured, with the bytes that the loss allocates.

        Args:
            mem_limit: accepted for compatibility; memory is counted in slots when a sequence is computed.

        Returns:
            the chain: seconds and bytes of each layer.

        Raises:
            ValueError: nothing was measured.
        """
        if self._measured is None:
            raise ValueError("Checkpointable: nothing was measured; call measure(input) first.")
        *temporaries, loss = self._measured.backward_temporary
        measured = self._measured
        self.chain = Chain(
            forward=measured.forward,
            backward=measured.backward,
            boundary=measured.boundary,
            saved=measured.saved,
            forward_temporary=measured.forward_temporary,
            backward_temporary=(*temporaries, loss + self.loss_tmp_memory_usage),
        )
        return self.chain

    def compute_sequence(
        self, custom_mem_limit_bytes: int | None = None, mem_slots: int | None = None, algo: str = "persistent"
    ) -> Sequence:
        """Compute the sequence that training follows from now on.

        Args:
            custom_mem_limit_bytes: the limit; ``None``: ``mem_limit``, else 90 % of the device's free memory.
            mem_slots: how finely memory is counted; ``None``: the constructor's value.
            algo: ``"persistent"``: the fastest sequence whose saved values stay until their backward; or a baseline:
                ``"no-checkpoint"``, ``"every-segment"``, ``"periodic"`` (√n segments).

        Returns:
            the sequence, which training follows too.

        Raises:
            ValueError: nothing was measured, the limit cannot be met, or an unknown algorithm.
        """
        if algo not in ALGORITHMS:
            raise ValueError(f"algo={algo!r}: valid values are {', '.join(map(repr, ALGORITHMS))}.")
        limits = (custom_mem_limit_bytes, self.mem_limit)
        limit = next((value for value in limits if value is not None), None)
        limit = available_memory(self._device) if limit is None else limit
        slots = self.mem_slots if mem_slots is None else mem_slots
        chain = self.build_chain(limit)
        layers = self._layers
        if layers is not None:
            self.sequence = make_sequence(chain, limit, slots, algo)
            self._how = nest(self.sequence, chain.length)
        else:
            if self._graph is None:
                raise ValueError("Checkpointable: nothing was measured since it was copied; call measure(input) first.")
            fitted = fit_sequence(self._graph, limit, slots, algo, self.loss_tmp_memory_usage)
            self.sequence = plan_or_error(fitted).sequence
            rotor = RotorOptions(limit, slots, algo, self.loss_tmp_memory_usage, self.preserve_rng_state)
            self._options = Options(cost="measured", rotor=rotor)
            self.__dict__["_compiled"] = None
        if self.verbosity > 1:
            print(chain, file=sys.stderr)
        if self.verbosity > 0:
            print(self.sequence, file=sys.stderr)
        return self.sequence

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own; in training it follows the sequence.

        Args:
            *args: inputs of the model.
            **kwargs: keyword inputs of the model.

        Returns:
            the model's outputs.

        Raises:
            ValueError: it trains, and no sequence was computed.
        """
        if not (self.training and torch.is_grad_enabled()):
            return self.model(*args, **kwargs)
        if self.sequence is None:
            raise ValueError(
                "Checkpointable: there is no sequence; call measure(input) and compute_sequence(limit) first."
            )
        layers = self._layers
        if layers is not None:
            if len(args) != 1 or kwargs:
                raise TypeError("Checkpointable: an nn.Sequential takes one positional input.")
            return run(layers, self._how, args[0], self.preserve_rng_state)
        if torch.compiler.is_compiling():
            return self.model(*args, **kwargs)  # the compiler around it decides
        compiled = self._compiled
        if compiled is None:
            compiled = compiled_module(self.model, self._options, fullgraph=True, dynamic=None)
            self.__dict__["_compiled"] = compiled
        return compiled(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # Traced graphs are not copied: a copy compiles again, and must measure before it computes another sequence.
        return {**self.__dict__, "_compiled": None, "_graph": None}


def _arguments(custom_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(custom_input, Mapping):
        return (), dict(custom_input)
    return (tuple(custom_input) if isinstance(custom_input, (tuple, list)) else (custom_input,)), {}
