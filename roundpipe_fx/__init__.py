"""roundpipe_fx: a compiler pass for training.

It takes any PyTorch model that ``torch.compile`` can trace, cuts its forward-backward FX graph into pipeline stages,
decides what is saved and what is recomputed, never repeats a host synchronization, and emits stage modules.
"""

from roundpipe_fx.analysis.cost.network import Network
from roundpipe_fx.analysis.host_sync import register_sync_op
from roundpipe_fx.api.compile import compile
from roundpipe_fx.api.compiled_module import CompiledModule
from roundpipe_fx.api.planning import plan
from roundpipe_fx.api.plans_of_modules import plans
from roundpipe_fx.budget import HostMemoryError, InfeasibleBudgetError
from roundpipe_fx.compat.checkpointing import (
    checkpoint,
    checkpoint_sequential,
    checkpoint_wrapper,
    doing_recompute,
    get_recompute_data,
    gradient_checkpoint_scope,
    is_checkpointing,
    is_recomputing,
    save_for_recompute,
)
from roundpipe_fx.distributed.ranks import RanksDifferError, RemoteError
from roundpipe_fx.frontend.graph_breaks import GraphBreakWarning
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.recompute_marks import memory_budget
from roundpipe_fx.passes.entry import Pass, PassContext, PassLevel
from roundpipe_fx.passes.pipeline import default_passes
from roundpipe_fx.remat.learned_steps import StepBudgetWarning
from roundpipe_fx.report.host_syncs import count_host_syncs
from roundpipe_fx.report.peak_memory import measure_peak
from roundpipe_fx.report.plan import Plan
from roundpipe_fx.report.plotting import plot_frontier
from roundpipe_fx.report.timeline import Timeline
from roundpipe_fx.runtime.optimizer_parameters import OptimizerCtx
from roundpipe_fx.schedules import Action, InvalidScheduleError, Schedule

__all__ = [
    "Action",
    "CompiledModule",
    "GraphBreakWarning",
    "HostMemoryError",
    "InfeasibleBudgetError",
    "InvalidScheduleError",
    "JointGraph",
    "Network",
    "OptimizerCtx",
    "Pass",
    "PassContext",
    "PassLevel",
    "Plan",
    "RanksDifferError",
    "RemoteError",
    "Schedule",
    "StepBudgetWarning",
    "Timeline",
    "checkpoint",
    "checkpoint_sequential",
    "checkpoint_wrapper",
    "compile",
    "count_host_syncs",
    "default_passes",
    "doing_recompute",
    "get_recompute_data",
    "gradient_checkpoint_scope",
    "is_checkpointing",
    "is_recomputing",
    "measure_peak",
    "memory_budget",
    "plan",
    "plans",
    "plot_frontier",
    "register_sync_op",
    "save_for_recompute",
]

__version__ = "0.1.0"
