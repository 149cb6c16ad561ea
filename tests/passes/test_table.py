"""The package's docstring is where a newcomer looks for a pass."""

from __future__ import annotations

from pathlib import Path

from roundpipe_fx import passes


def test_every_pass_is_in_the_table() -> None:
    assert passes.__doc__ is not None and passes.__file__ is not None
    rows = passes.__doc__.split("=\n")[1].splitlines()
    files = {path.stem for path in Path(passes.__file__).parent.glob("*.py")} - {"__init__"}
    assert {row.split()[0] for row in rows if not row.startswith("=")} == files
    for name in files:
        module = (Path(passes.__file__).parent / f"{name}.py").read_text()
        assert module.startswith('"""'), name
