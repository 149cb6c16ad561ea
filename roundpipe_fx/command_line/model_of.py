"""The model and the batch that a command names: a function of the user's, or a Hugging Face configuration.

Neither takes memory: parameters and inputs are on the meta device, and weights are not read.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class CommandError(Exception):
    """A command's argument cannot be used; the text is for the user, on one line."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """A model, and how to make batches for it.

    Attributes:
        model: on the meta device.
        make_batch: gets the number of rows and their length; returns keyword inputs of the model.
        images: whether rows are images, whose size is the model's, so that no length is read.
    """

    model: nn.Module
    make_batch: Callable[[int, int], dict[str, Any]]
    images: bool = False


def named_model(name: str, dtype: str | None) -> Named:
    """The model of a name.

    Args:
        name: ``module:function``, a function without arguments that returns a model, or a model and a function
            ``(batch, sequence) -> keyword inputs``; or a folder with a Hugging Face ``config.json``, or the name of
            such a configuration.
        dtype: of the parameters, such as ``"bfloat16"``; ``None``: as the function or the configuration says.

    Raises:
        CommandError: there is no such function or configuration, or its model has no inputs that could be guessed.
    """
    module, separator, function = name.partition(":")
    model = _of_function(module, function) if separator else _of_configuration(name)
    return model if dtype is None else dataclasses.replace(model, model=model.model.to(_dtype(dtype)))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CommandError(f"--dtype {name}: not a floating-point dtype of torch, such as bfloat16")
    return dtype


def _of_function(module: str, function: str) -> Named:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as ``python -m`` has it, and an installed script has not
    try:
        make = getattr(importlib.import_module(module), function)
    except ImportError as error:
        raise CommandError(f"{module}:{function}: {error}") from error
    except AttributeError as error:
        raise CommandError(f"{module}:{function}: the module has no {function!r}") from error
    with torch.device("meta"):
        made = make()
    # A pair has a function for inputs; a Transformers model alone gets those that its configuration describes.
    model, make_batch = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise CommandError(f"{module}:{function} returns {type(model).__name__}: it must return a module, or a pair")
    if make_batch is None:
        if not hasattr(model, "config"):
            raise CommandError(
                f"{module}:{function} returns a model alone: it must return a pair with a function (batch, sequence) "
                "-> dict of the model's inputs"
            )
        make_batch = functools.partial(_batch, model)
    return Named(model=model, make_batch=functools.partial(_on_meta, make_batch))


def _on_meta(make_batch: Callable[[int, int], dict[str, Any]], rows: int, length: int) -> dict[str, Any]:
    with torch.device("meta"):
        return make_batch(rows, length)


def _of_configuration(name: str) -> Named:
    try:
        import transformers
    except ImportError as error:
        raise CommandError(f"{name}: a configuration needs transformers: pip install transformers") from error
    # Without this, Transformers would look "./folder" up on the hub and say that the name is not valid.
    if name.startswith((".", os.sep)) and not os.path.isdir(name):
        raise CommandError(f"{name}: there is no such folder")
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise CommandError(
            f"{name}: no configuration: {str(error).splitlines()[0].rstrip('.')}; names are looked up on the Hugging "
            "Face hub and in its cache: give a folder with a config.json, or module:function"
        ) from error
    architectures = getattr(config, "architectures", None) or []
    kind = getattr(transformers, architectures[0], None) if architectures else None
    if kind is None:
        raise CommandError(
            f"{name}: its configuration names no architecture of transformers {transformers.__version__}"
        )
    # A cache of keys and values is for generation; in training it would be one more output.
    config.use_cache = False
    with torch.device("meta"):
        # ``_from_config`` and not the class itself: it sets the dtype and the attention that the configuration names.
        model = kind._from_config(config, dtype=getattr(config, "dtype", None) or torch.float32)
    make_batch = functools.partial(_on_meta, functools.partial(_batch, model))
    return Named(model=model.train(), make_batch=make_batch, images=model.main_input_name == "pixel_values")


def _batch(model: Any, rows: int, length: int) -> dict[str, Any]:
    """A batch of tokens or images with labels, as the model's kind asks for."""
    config, inputs = model.config, getattr(model, "main_input_name", "input_ids")
    if inputs not in ("input_ids", "pixel_values"):
        raise CommandError(f"{type(model).__name__} reads {inputs!r}, not tokens or images: use module:function")
    if "labels" not in inspect.signature(model.forward).parameters:
        raise CommandError(f"{type(model).__name__} takes no labels, so it has no loss: use module:function")
    if inputs == "pixel_values":
        # Configurations of models with two towers have the image's sizes one level below.
        image = getattr(config, "vision_config", config)
        if not hasattr(image, "image_size"):
            raise CommandError(f"the configuration of {type(model).__name__} says no image_size: use module:function")
        size = image.image_size if isinstance(image.image_size, (tuple, list)) else (image.image_size,) * 2
        return {"pixel_values": torch.empty(rows, image.num_channels, *size), "labels": _integers(rows)}
    # Rotary positions have no end; beyond a table of learned ones nothing fails on the meta device, but training does.
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and length > positions and not hasattr(config, "rope_parameters"):
        raise CommandError(f"{type(model).__name__} has {positions} positions: give a --sequence up to that")
    tokens = _integers(rows, length)
    if type(model).__name__.endswith("ForSequenceClassification"):
        return {"input_ids": tokens, "labels": _integers(rows)}
    return {"input_ids": tokens, "labels": _integers(rows, length)}


def _integers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.long)
