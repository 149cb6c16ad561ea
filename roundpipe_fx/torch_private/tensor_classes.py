"""Classes of tensors that compute their values in Python."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

__all__ = ["WithoutStorage", "without_storage"]

T = TypeVar("T", bound="WithoutStorage")


class WithoutStorage(torch.Tensor):
    """A tensor without memory, whose class runs each operation on it, below autograd."""

    @classmethod
    def run(cls, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation.

        Args:
            operator: an overload.
            args: of which some are of this class.
            kwargs: likewise.
        """
        raise NotImplementedError


def _dispatch(cls: type[WithoutStorage], func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return cls.run(func, args, kwargs or {})


for _name, _method in {
    "__torch_dispatch__": classmethod(_dispatch),
    "__torch_function__": torch._C._disabled_torch_function_impl,
}.items():
    setattr(WithoutStorage, _name, _method)


def without_storage(kind: type[T], example: torch.Tensor, device: torch.device) -> T:
    """A tensor without memory.

    Args:
        kind: its class.
        example: has its shape, strides and dtype.
        device: its device.
    """
    wrapper: T = torch.Tensor._make_wrapper_subclass(
        kind, example.shape, strides=example.stride(), dtype=example.dtype, device=device
    )
    return wrapper
