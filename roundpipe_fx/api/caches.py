"""Caches of keys and values, which a language model that generates reads and extends in each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["has_cache"]

_MODULE = "transformers.cache_utils"


def has_cache(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a model is given a cache of Hugging Face's."""
    return any(_is_cache(value) for value in (*args, *kwargs.values()))


def _is_cache(value: Any) -> bool:
    return any(cls.__module__ == _MODULE for cls in type(value).__mro__)
