"""Steps over two processes leave nothing behind: ``python -m benchmarks.growth`` runs a thousand."""

from __future__ import annotations

import pytest

from benchmarks import growth


@pytest.mark.long
def test_growth() -> None:
    for row in growth.measured(80):
        assert row["more tensors"] == row["threads"] == row["files"] == row["works left"] == 0, row
        assert row["objects"] < 60 and row["resident KiB"] < 4096, row  # one of each step would be 60
