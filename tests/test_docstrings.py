"""What users import says what its arguments mean, what it returns and what it raises."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import roundpipe_fx
from roundpipe_fx.compat import rotor


def _public() -> Iterator[Any]:
    members = {name: getattr(package, name) for package in (roundpipe_fx, rotor) for name in package.__all__}
    for name, member in members.items():
        yield pytest.param(member, id=name)
        if not inspect.isclass(member):
            continue
        inner = getattr(member, "__members__", {})
        for attribute, raw in vars(member).items():
            function = getattr(raw, "__func__", raw)
            is_field = dataclasses.is_dataclass(member) and attribute in {f.name for f in dataclasses.fields(member)}
            hidden = attribute.startswith("_") or attribute == "is_infra_mode" or attribute in inner or is_field
            if not hidden and (inspect.isfunction(function) or isinstance(function, property)):
                yield pytest.param(function, id=f"{name}.{attribute}")


@pytest.mark.parametrize("member", _public())
def test_docstring_is_complete(member: Any) -> None:
    text = inspect.getdoc(member)
    assert text, "has no docstring"
    if inspect.isclass(member):
        records = [base.__doc__ or "" for base in member.__mro__ if dataclasses.is_dataclass(base)]
        assert not _undescribed(_fields(member), "\n".join([text, *records, inspect.getdoc(member.__init__) or ""]))
    elif not isinstance(member, property):
        signature = inspect.signature(member)
        assert not _undescribed(
            [name for name in signature.parameters if name not in ("self", "cls") and name[0] != "_"], text
        )
        assert signature.return_annotation in (None, "None") or re.search("^(Returns|Yields):$", text, re.MULTILINE)
        raises = re.search(r"^\s+raise \w", inspect.getsource(member), re.MULTILINE)
        assert not raises or re.search("^Raises:$", text, re.MULTILINE)


def _fields(member: type) -> list[str]:
    if dataclasses.is_dataclass(member):
        return [field.name for field in dataclasses.fields(member) if not field.name.startswith("_")]
    if issubclass(member, BaseException) or "__init__" not in vars(member):
        return []
    return [name for name in inspect.signature(member).parameters if name != "self"]


def _undescribed(names: list[str], text: str) -> list[str]:
    return [name for name in names if not re.search(rf"^\s*\*{{0,2}}{name}\b.*:", text, re.MULTILINE)]
