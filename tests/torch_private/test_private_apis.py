"""What the page on private interfaces says is true: what is used, what is patched, and when."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from roundpipe_fx.torch_private import canary

ROOT = Path(__file__).parent.parent.parent
FILES = sorted((ROOT / "roundpipe_fx" / "torch_private").glob("*.py"))
PAGE = (ROOT / "docs" / "private-apis.md").read_text()
EVERYWHERE = {"_ops", "OpOverload", "OpOverloadPacket", "DispatchKey"}
DOCUMENTED = {"_check"}
"""On PyTorch's own pages, although the names look private."""

PATCHED = """
import sys, types, warnings
import torch, torch._dynamo.convert_frame
warnings.simplefilter("ignore")

def patched():
    found = set()
    folder = roundpipe_fx.__path__[0]
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "torch" and isinstance(module, types.ModuleType):
            for owner in (module, *(own for own in vars(module).values() if isinstance(own, type))):
                path = name if owner is module else f"{owner.__module__}.{owner.__qualname__}"
                for key, value in list(vars(owner).items()):
                    function = value.fget if isinstance(value, property) else value
                    if isinstance(function, types.FunctionType) and function.__code__.co_filename.startswith(folder):
                        found.add(f"{path}.{key}")
    return found

"""
"""Finds functions of this package in modules and classes of PyTorch's."""


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", PATCHED + code], check=True, capture_output=True, text=True).stdout


def _table() -> dict[str, str]:
    """When each patch is made, by what is patched."""
    rows = re.findall(r"^\| `([^`]+)` \| `[^`]+` \| ([^|]+) \|", PAGE, flags=re.MULTILINE)
    return dict(rows)


def test_importing_patches_only_what_the_page_says() -> None:
    made = set(_run("import roundpipe_fx\nprint(*patched())").split())
    assert made == {name for name, when in _table().items() if when == "at import"}
    assert len(made) == 1


def test_the_page_has_every_patch() -> None:
    code = """
import roundpipe_fx
model = torch.nn.Linear(2, 2)
torch.compile(model, backend="roundpipe_fx")(torch.randn(3, 2)).sum().backward()
print(*patched())
"""
    assert set(_run(code).split()) == set(_table())


def test_looking_the_backend_up_by_name_lets_its_context_be_entered() -> None:
    code = 'import roundpipe_fx\ntorch.compile(torch.nn.Linear(2, 2), backend="roundpipe_fx")\nprint(*patched())'
    made = set(_run(code).split())
    assert made == {name for name, when in _table().items() if when == "at import" or "CatchErrorsWrapper" in name}


@pytest.mark.parametrize("path", FILES[1:], ids=lambda path: path.stem)
def test_the_page_names_what_a_file_uses(path: Path) -> None:
    start = PAGE.index(f"### `{path.name}`: ")
    end = PAGE.find("\n### ", start + 1)
    section = PAGE[start : end if end >= 0 else None]
    missing = {name for name in _private_names(path) if not re.search(rf"\b{re.escape(name)}\b", section)}
    assert missing <= EVERYWHERE


def _private_names(path: Path) -> Iterator[str]:
    """Last parts of the names of PyTorch's that are private, or imported from a private module."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield from (own.name for own in node.names if "._" in f"{node.module}.{own.name}")
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"torch(\.\w+)+", ast.unparse(node)):
            yield from (name for name in ast.unparse(node).split(".") if re.match(r"_[a-zA-Z]", name))


def test_no_other_file_uses_private_names() -> None:
    used: dict[str, set[str]] = {}
    for path in [*ROOT.glob("roundpipe_fx/**/*.py"), *ROOT.glob("passes/*.py")]:
        found = set(_private_names(path)) - EVERYWHERE - DOCUMENTED
        found = {name for name in found if not hasattr(torch.ops.aten, name)}
        if path.parent.name != "torch_private" and found:
            used[path.stem] = found
    assert not used


OF_OTHERS = {"_TRITON_AVAILABLE", "_from_config", "_hf_hook", "_instances", "_make", "_use_triton"}
"""Of transformers, accelerate, tqdm, TRL and named tuples."""
ONLY_IN_SOME_RELEASES = {"_fsdp_param_groups", "_torchdynamo_disable_msg"}


def test_the_canary_looks_for_every_private_attribute() -> None:
    """Of objects of PyTorch's: attributes that this package does not set itself, and that are no operators."""
    ours, read = set(), set()
    for path in [*ROOT.glob("roundpipe_fx/**/*.py"), *ROOT.glob("passes/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.Name(id=name, ctx=ast.Store()) | ast.alias(name=name):
                    ours.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    ours.add(name)
                case ast.Attribute(attr=name) if re.match(r"_[a-zA-Z]", name):
                    read.add(name)
                case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=name), *_]):
                    read.update(re.findall("^_[a-zA-Z].*", name))
    names = {part for texts in (*canary.USED.values(), *canary.USED) for part in re.split(r"[ .]", texts)}
    names |= {part for texts in canary.SPELLED.values() for text in texts for part in re.findall(r"\w+", text)}
    missing = read - ours - names - OF_OTHERS - ONLY_IN_SOME_RELEASES
    assert not {name for name in missing if not hasattr(torch.ops.aten, name)}


def test_every_file_is_on_the_page() -> None:
    assert re.findall(r"^### `(.+?)`", PAGE, flags=re.MULTILINE) == [path.name for path in FILES[1:]]


def test_nothing_is_missing_in_the_installed_torch() -> None:
    assert list(canary.missing()) == []


@pytest.mark.parametrize("path", FILES[1:], ids=lambda path: path.stem)
def test_the_canary_looks_for_what_a_file_uses(path: Path) -> None:
    looked_for = {part for names in canary.USED.values() for part in re.split(r"[ .]", names)}
    looked_for |= {part for module in canary.USED for part in module.split(".")}
    assert set(_private_names(path)) - EVERYWHERE <= looked_for


@pytest.mark.parametrize(
    ("table", "gone"),
    [
        ({"torch._dynamo.exc": "Unsupported Gone"}, "torch._dynamo.exc.Gone"),
        ({"torch._dynamo.output_graph": "OutputGraph.gone"}, "torch._dynamo.output_graph.OutputGraph.gone"),
        ({"torch._inductor.compile_fx": "compile_fx_inner gone"}, "torch._inductor.compile_fx.gone"),
        ({"torch._C": "_is_tracing _gone"}, "torch._C._gone"),
    ],
)
def test_what_is_gone_is_named(table: dict[str, str], gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "USED", table)
    message = (
        f"{re.escape(torch.__version__)} does not have: {re.escape(gone)}. The package supports torch 2.11 to 2.15"
    )
    with pytest.raises(ImportError, match=message):
        canary.check()


def test_what_is_read_with_a_default_is_looked_for_in_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "SPELLED", {"torch._dynamo.output_graph": ("compile_subgraph_reason", "_gone")})
    assert list(canary.missing()) == ["_gone in torch._dynamo.output_graph"]


def test_the_canary_imports_nothing() -> None:
    code = """
before = set(sys.modules)
import importlib.util
spec = importlib.util.spec_from_file_location("canary", "roundpipe_fx/torch_private/canary.py")
spec.loader.exec_module(importlib.util.module_from_spec(spec))
print(*(set(sys.modules) - before))
"""
    assert not [name for name in _run(code).split() if name.startswith("torch")]
