"""Code generation: from a graph in which every decision is explicit to stage modules and programs."""

from roundpipe_fx.codegen.program import Program, emit_backward_program, emit_forward_program, seen_by_autograd
from roundpipe_fx.codegen.program_text import program_text, stage_text
from roundpipe_fx.codegen.stage_modules import (
    KnownModules,
    StageModule,
    emit_stage_modules,
    moved,
    own_nodes,
    value_name,
)

__all__ = [
    "KnownModules",
    "Program",
    "StageModule",
    "emit_backward_program",
    "emit_forward_program",
    "emit_stage_modules",
    "moved",
    "own_nodes",
    "program_text",
    "seen_by_autograd",
    "stage_text",
    "value_name",
]
