from __future__ import annotations

import pytest

from roundpipe_fx.schedules import InvalidScheduleError, Schedule, chain, one_f_one_b, validate

VALID = "0: F0.0 F0.1 B0.0 B0.1\n1: F1.0 B1.0 F1.1 B1.1"


def check(text: str, microbatches: int = 2, devices: int = 2) -> None:
    validate(Schedule.parse(text), chain(2), microbatches, devices)


def test_a_valid_schedule_passes() -> None:
    check(VALID)
    validate(one_f_one_b(2, 2, 5), chain(2), 5, 2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("B0.1", "", r"B0\.1 is missing"),
        ("B0.1", "B0.1 B0.1", r"B0\.1 occurs more than once: twice on device 0"),
        ("F1.0 B1.0", "F1.0 F0.0 B1.0", r"F0\.0 occurs more than once: on devices 0, 1"),
        ("B0.1", "B7.1", r"B7\.1 on device 0 is not an action of this model; valid actions are F0 to F1, B0 to B1"),
        ("B0.1", "B0.1 W0.1", r"W0\.1 on device 0 is not an action of this model"),
        ("B0.1", "B0.5", r"B0\.5 on device 0: there are 2 microbatches"),
        ("F1.0 B1.0", "B1.0 F1.0", r"the schedule deadlocks: device 0 waits at B0\.0 for B1\.0"),
        ("F0.0 F0.1", "F0.1 F0.0", r"F0\.0 on device 0 comes after a later microbatch"),
    ],
)
def test_errors_name_the_action(old: str, new: str, message: str) -> None:
    assert old in VALID
    with pytest.raises(InvalidScheduleError, match=message):
        check(VALID.replace(old, new))


def test_devices_that_wait_for_each_other() -> None:
    with pytest.raises(InvalidScheduleError, match=r"device 0 waits at B0\.0 for B1\.0.*1 more devices wait"):
        check("0: F0.0 B0.0 F0.1 B0.1\n1: F1.0 F1.1 B1.0 B1.1")


def test_too_many_devices() -> None:
    with pytest.raises(InvalidScheduleError, match="for 2 devices, but there are 1"):
        check(VALID, devices=1)
