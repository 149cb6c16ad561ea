"""Replicas of a pipeline: rings, what is gathered and reduced when, and bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_fx.analysis.cost import DEVICES
from roundpipe_fx.analysis.cost.network import Network, Ring
from roundpipe_fx.schedules import ActionKind, StepCosts, chain, gpipe, one_f_one_b, simulate_time
from roundpipe_fx.schedules.data_parallel import DataParallel, Gather
from roundpipe_fx.schedules.memory import weights_of_devices
from roundpipe_fx.schedules.sharding import ShardedCosts, find_gaps, gathers_of
from roundpipe_fx.schedules.step_costs import device_orders

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_H100 = DEVICES["H100"].network


def _hop_by_hop(ranks: int, size: float, latency: float, bandwidth: float, reduces: bool) -> float:
    """Seconds of a ring in which each rank forwards each part once it has it and has sent the one before."""
    part, hops = size / ranks, (2 if reduces else 1) * (ranks - 1)
    has = np.zeros((ranks, ranks))  # seconds at which a rank has what it sends next of a part
    free = np.zeros(ranks)
    for hop in range(hops):
        for rank in range(ranks):
            own = (rank - hop) % ranks
            free[rank] = max(free[rank], has[rank, own]) + part / bandwidth + latency
            has[(rank + 1) % ranks, own] = free[rank]
    return float(free.max())


@settings(deadline=None, max_examples=50)
@given(
    ranks=st.integers(2, 12),
    size=st.integers(1, 10**9),
    latency=st.floats(0, 1e-3),
    bandwidth=st.floats(1e6, 1e12),
)
def test_a_ring_takes_what_its_hops_take(ranks: int, size: int, latency: float, bandwidth: float) -> None:
    network = Network(
        node=1,
        within_bandwidth=1e15,
        within_latency=0.0,
        between_bandwidth=bandwidth,
        between_latency=latency,
    )
    ring = network.ring(ranks, 1)
    assert ring.gather_seconds(size) == pytest.approx(_hop_by_hop(ranks, size, latency, bandwidth, False))
    assert ring.all_reduce_seconds(size) == pytest.approx(_hop_by_hop(ranks, size, latency, bandwidth, True))


@given(ranks=st.integers(1, 64), stride=st.integers(1, 32), size=st.integers(0, 10**10))
def test_a_ring_over_nodes_is_between_its_fastest_and_slowest_links(ranks: int, stride: int, size: int) -> None:
    seconds = _H100.ring(ranks, stride).all_reduce_seconds(size)
    within = Ring(ranks, (ranks - 1) * _H100.within_latency, _H100.within_bandwidth).all_reduce_seconds(size)
    between = Ring(ranks, (ranks - 1) * _H100.between_latency, _H100.between_bandwidth).all_reduce_seconds(size)
    assert within * (1 - 1e-9) <= seconds <= between * (1 + 1e-9)


def test_rings_of_h100s() -> None:
    assert _H100.ring(8, 1).bandwidth == 450e9 and _H100.ring(64, 16).bandwidth == 50e9
    assert _H100.ring(64, 2).bandwidth == 200e9  # four of a node, each through its network adapter
    assert _H100.ring(64, 16).latency == pytest.approx(63 * 9.6e-6)
    assert not _H100.leaves(0, 7, 8, 2) and _H100.leaves(7, 8, 16, 2)
    assert not _H100.leaves(0, 1, 6, 1) and _H100.leaves(1, 2, 6, 2)  # the second replica begins on the first's node


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"node": 0}, r"Network\(node=0\): give the number of devices"),
        ({"node": 1.5}, r"Network\(node=1.5\)"),
        ({"between_bandwidth": 0.0}, r"between_bandwidth=0.0\): it has to be a positive number of bytes per second"),
        ({"within_bandwidth": -1e9}, "within_bandwidth=-1000000000.0"),
        ({"within_bandwidth": "400 GB"}, "within_bandwidth='400 GB'"),
        ({"within_latency": -1.0}, r"within_latency=-1.0\): it has to be seconds, at least 0"),
        ({"between_latency": float("nan")}, "between_latency=nan"),
    ],
)
def test_what_is_no_network_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(_H100, **wrong)


_SIZE = 10**6


def _costs(stages: int, sharded: bool = False, bandwidth: float = 1e6, replicas: int = 2) -> StepCosts:
    """Each stage has a parameter of 1 MB; a forward takes 1 s, a backward 2 s."""
    graph = chain(stages)
    shared_out = ShardedCosts(
        replicas=replicas,
        whole_bytes=dict.fromkeys(range(stages), _SIZE),
        reads={step: (step[1],) for step in graph.steps},
    )
    return StepCosts(
        seconds={step: 1.0 if step[0] is _F else 2.0 for step in graph.steps},
        base_bytes={(_B, stage): {stage: _SIZE} for stage in range(stages)},
        copied_bytes={step: {step[1]: _SIZE} for step in graph.steps},
        parameters=frozenset(range(stages)),
        sharded=shared_out if sharded else None,
        data_parallel=DataParallel(ring=Ring(replicas, 0.0, bandwidth), sharded=sharded),
    )


def test_reductions_run_beside_later_actions() -> None:
    """By hand: an all-reduce of 1 MB over two ranks at 1 MB/s takes 1 s; F0 F1 B1 B0 take 6 s."""
    timing = simulate_time(one_f_one_b(1, 2, 1), chain(2), _costs(2))
    assert timing.makespan == pytest.approx(7.0)  # that of stage 1 is hidden behind B0, that of stage 0 is not
    assert timing.collective_seconds == (pytest.approx(2.0),)
    # Two devices: stage 0 ends at 6 s and reduces until 7 s.
    assert simulate_time(one_f_one_b(2, 2, 1), chain(2), _costs(2)).makespan == pytest.approx(7.0)
    slow = simulate_time(one_f_one_b(1, 2, 1), chain(2), _costs(2, bandwidth=0.25e6))
    assert slow.makespan == pytest.approx(4 + 4 + 4)  # both behind B1, one after the other


def test_sharded_parameters_are_gathered_ahead() -> None:
    """By hand, at 0.5 s a gather or reduction: the first gather, then F0 F1 B1 B0, then the last reduction."""
    timing = simulate_time(one_f_one_b(1, 2, 1), chain(2), _costs(2, sharded=True))
    assert timing.makespan == pytest.approx(0.5 + 6 + 0.5)
    # The parameter of stage 1 is gathered once, since F1 and B1 are one window; that of stage 0 stays for B0.
    assert timing.collective_seconds == (pytest.approx(4 * 0.5),)


@given(stages=st.integers(1, 5), batches=st.integers(1, 4), sharded=st.booleans(), exponent=st.integers(3, 9))
def test_more_bandwidth_is_never_slower(stages: int, batches: int, sharded: bool, exponent: int) -> None:
    schedule, graph = one_f_one_b(1, stages, batches), chain(stages)
    slow = simulate_time(schedule, graph, _costs(stages, sharded, 10.0**exponent))
    fast = simulate_time(schedule, graph, _costs(stages, sharded, 3 * 10.0**exponent))
    without = simulate_time(schedule, graph, _costs(stages, sharded).without_communication())
    assert without.makespan <= fast.makespan <= slow.makespan
    assert slow.makespan <= without.makespan + slow.collective_seconds[0] + 1e-9


def test_links_between_nodes_are_slower() -> None:
    graph = chain(2)
    costs = dataclasses.replace(
        _costs(2), data_parallel=None, sent_bytes={((_F, 0), (_F, 1)): 10**6, ((_B, 1), (_B, 0)): 10**6}
    )
    network = Network(node=2, within_bandwidth=1e7, within_latency=0.1, between_bandwidth=1e6, between_latency=0.5)
    for node, send in ((2, 0.2), (1, 1.5)):
        own = dataclasses.replace(costs, network=dataclasses.replace(network, node=node))
        assert simulate_time(one_f_one_b(2, 2, 1), graph, own).makespan == pytest.approx(6 + 2 * send)


def test_bytes_of_sharded_parameters() -> None:
    schedule = one_f_one_b(1, 4, 1)
    whole, sharded = _costs(4), _costs(4, sharded=True, replicas=4)
    assert weights_of_devices(schedule, whole) == [4 * _SIZE] and weights_of_devices(schedule, sharded) == [_SIZE]


def test_what_stays_gathered_is_not_gathered_again() -> None:
    schedule, costs = gpipe(1, 3, 1), _costs(3, sharded=True, bandwidth=0.25e6)
    assert costs.sharded is not None
    (order,) = device_orders(schedule)
    whole = (_SIZE,)
    least = [Gather(0, whole, whole), Gather(1, (), whole), Gather(2, (), ()), Gather(4, (), whole), Gather(5, (), ())]
    gaps = find_gaps(order, costs.sharded)
    assert gathers_of(order, costs.sharded, ()) == least
    kept = [least[0], least[1], least[2], Gather(4, (), ()), least[4]]
    assert [(gap.dropped, gap.regathered) for gap in gaps] == [(1, 4)] and gathers_of(
        order, costs.sharded, gaps
    ) == kept
    # 2 s a gather or reduction; F0 F1 F2 B2 B1 B0 take 9 s.
    dropped, stays = (simulate_time(schedule, chain(3), costs, kept=own) for own in ((), gaps))
    assert dropped.collective_seconds == (pytest.approx(7 * 2.0),)
    assert stays.collective_seconds == (pytest.approx(6 * 2.0),)
    assert stays.makespan < dropped.makespan and stays.peak_bytes[0] >= dropped.peak_bytes[0]


def test_each_half_of_a_step_gathers_what_it_begins_with() -> None:
    schedule, costs = gpipe(1, 2, 1).halves(), _costs(2, sharded=True)
    assert costs.sharded is not None
    (order,) = device_orders(schedule)
    whole = (_SIZE,)
    halves = [Gather(0, whole, whole), Gather(1, (), ()), Gather(2, whole, whole), Gather(3, (), ())]
    assert gathers_of(order, costs.sharded, ()) == halves
