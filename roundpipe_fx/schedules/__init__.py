"""Schedules: which device runs which action for which microbatch, in which order; their time and memory."""

from roundpipe_fx.schedules.action import Action, ActionKind, StageAction
from roundpipe_fx.schedules.building import with_recompute, with_transfers
from roundpipe_fx.schedules.dualpipev import dualpipev
from roundpipe_fx.schedules.gpipe import gpipe
from roundpipe_fx.schedules.interleaved import interleaved
from roundpipe_fx.schedules.one_f_one_b import one_f_one_b
from roundpipe_fx.schedules.registry import SCHEDULES
from roundpipe_fx.schedules.round_robin import round_robin
from roundpipe_fx.schedules.spec import ScheduleSpec
from roundpipe_fx.schedules.stage_graph import StageGraph, chain, slot_chain
from roundpipe_fx.schedules.step_costs import Held, StepCosts
from roundpipe_fx.schedules.timetable import Schedule
from roundpipe_fx.schedules.timing import Deadlock, Timing, simulate_time
from roundpipe_fx.schedules.validate import InvalidScheduleError, validate
from roundpipe_fx.schedules.zbv import zbv
from roundpipe_fx.schedules.zero_bubble import zero_bubble

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Deadlock",
    "Held",
    "InvalidScheduleError",
    "Schedule",
    "ScheduleSpec",
    "StageAction",
    "StageGraph",
    "StepCosts",
    "Timing",
    "chain",
    "dualpipev",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "round_robin",
    "simulate_time",
    "slot_chain",
    "validate",
    "with_recompute",
    "with_transfers",
    "zbv",
    "zero_bubble",
]
