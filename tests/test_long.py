"""Which tests are long, and which of these a run of CI has."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

_TESTS = """
import pytest

@pytest.mark.quick_every(3)
@pytest.mark.parametrize("case", range(7))
def test_of_cases(case): pass

@pytest.mark.long
def test_whole(): pass

def test_quick(): pass
"""
_QUICK = {"test_of_cases[0]", "test_of_cases[3]", "test_of_cases[6]", "test_quick"}
_LONG = {*(f"test_of_cases[{case}]" for case in (1, 2, 4, 5)), "test_whole"}


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> object:
    """Names of the tests that are run with some arguments."""
    pytester.makeini('[pytest]\nmarkers =\n  long: long\n  quick_every(n): quick\npythonpath = "."')
    pytester.makeconftest("from tests.conftest import pytest_addoption, pytest_collection_modifyitems")
    pytester.makepyfile(_TESTS)

    def names(*arguments: str) -> set[str]:
        result = pytester.inline_run("-p", "no:cacheprovider", "--strict-markers", *arguments)
        passed, _, failed = result.listoutcomes()
        assert not failed
        return {report.nodeid.partition("::")[2] for report in passed}

    return names


def test_every_third_case_is_quick(run) -> None:
    assert run("-m", "not long") == _QUICK
    assert run("-m", "long") == _LONG
    assert run() == _QUICK | _LONG


def test_parts_have_all_quick_tests_and_together_all(run) -> None:
    parts = [run("--long-part", f"{part}/3") for part in range(4)]
    assert all(part >= _QUICK for part in parts)
    long = [part - _QUICK for part in parts]
    assert sorted(map(len, long[:3])) == [1, 2, 2] and set.union(*long[:3]) == _LONG
    assert long[3] == long[0], "the fourth run begins again"
