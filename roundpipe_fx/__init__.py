"""roundpipe_fx: a compiler pass for training.

It takes any PyTorch model that ``torch.compile`` can trace, cuts its forward-backward FX graph into pipeline stages,
decides what is saved and what is computed again, never asks the device the same question twice, and emits stage
modules.
"""

from roundpipe_fx.budget import InfeasibleBudgetError
from roundpipe_fx.checkpointing import (
    checkpoint,
    checkpoint_sequential,
    doing_recompute,
    get_recompute_data,
    gradient_checkpoint_scope,
    is_checkpointing,
    is_recomputing,
    save_for_recompute,
)
from roundpipe_fx.compiled_module import CompiledModule, compile
from roundpipe_fx.graph_breaks import GraphBreakWarning
from roundpipe_fx.learned_steps import StepBudgetWarning
from roundpipe_fx.optimizer_parameters import OptimizerCtx
from roundpipe_fx.peak_memory import measure_peak
from roundpipe_fx.plan import Plan
from roundpipe_fx.planning import plan
from roundpipe_fx.plotting import plot_frontier
from roundpipe_fx.questions import count_questions
from roundpipe_fx.region import memory_budget
from roundpipe_fx.rotor import Backward, Chain, ForwardCheck, ForwardEnable, ForwardNograd, Loss, Sequence
from roundpipe_fx.rotor.checkpointable import Checkpointable
from roundpipe_fx.schedules import Action, InvalidScheduleError, Schedule
from roundpipe_fx.sync_ops import register_sync_op
from roundpipe_fx.timeline import Timeline

__all__ = [
    "Action",
    "Backward",
    "Chain",
    "Checkpointable",
    "CompiledModule",
    "ForwardCheck",
    "ForwardEnable",
    "ForwardNograd",
    "GraphBreakWarning",
    "InfeasibleBudgetError",
    "InvalidScheduleError",
    "Loss",
    "OptimizerCtx",
    "Plan",
    "Schedule",
    "Sequence",
    "StepBudgetWarning",
    "Timeline",
    "checkpoint",
    "checkpoint_sequential",
    "compile",
    "count_questions",
    "doing_recompute",
    "get_recompute_data",
    "gradient_checkpoint_scope",
    "is_checkpointing",
    "is_recomputing",
    "measure_peak",
    "memory_budget",
    "plan",
    "plot_frontier",
    "register_sync_op",
    "save_for_recompute",
]

__version__ = "0.1.0"
