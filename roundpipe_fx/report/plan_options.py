"""Options of a plan as text that tells nothing private: no names of modules or functions, no values of settings."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.options import INTERNAL_OPTIONS, Inductor, Options


def options_as_text(setting: Setting) -> dict[str, str]:
    """Options that differ from their defaults by name, and the device and the compiler that they led to."""
    options = setting.options
    changed = {
        field.name: _text(getattr(options, field.name))
        for field in dataclasses.fields(Options)
        if field.name not in INTERNAL_OPTIONS and getattr(options, field.name) != field.default
    }
    return changed | {"device": _device_text(setting), "stage_compiler": _compiler_text(setting)}


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} given"
    return "a function" if callable(value) else str(value)


def _device_text(setting: Setting) -> str:
    if setting.options.device_name is not None:
        return f"{setting.options.device_name}, planned for"
    if setting.device.type != "cuda":
        return setting.device.type
    return torch.cuda.get_device_name(setting.device)


def _compiler_text(setting: Setting) -> str:
    if isinstance(setting.compiler, Inductor):
        return "inductor"
    return _text(setting.compiler)
