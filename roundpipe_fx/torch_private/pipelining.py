"""Specifications of ``torch.distributed.pipelining``: how a user says what is split into microbatches."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["is_replicate_spec"]


def is_replicate_spec(spec: Any) -> bool:
    """Whether a specification says that a value is the same for every microbatch: ``_Replicate``, or one of it.

    Args:
        spec: the user's. Where the user has not imported its module, it cannot be one, and the module is not imported.
    """
    if "torch.distributed.pipelining.microbatch" not in sys.modules:
        return False
    from torch.distributed.pipelining.microbatch import _Replicate

    return issubclass(spec if isinstance(spec, type) else type(spec), _Replicate)
