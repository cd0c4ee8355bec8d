"""Devices that are all the CPU and behave as if they were not: what meets on two of them fails, as it would there.

torch ignores the index of a CPU device. Inside `PretendedDevices` every tensor has the device it was put on or made of
tensors of, `tensor.device` says so, and an operation on tensors of two devices raises what torch would. A forward that
passes here mixes no devices; a copy that it lacks on other hardware it would lack here too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

HOST = torch.device("cpu")
# Operations that copy between devices, or read indices from the host.
_COPIES = (Tensor.copy_,)
_INDEXED = (Tensor.__getitem__, Tensor.__setitem__)
_MOVES = (Tensor.to, torch.as_tensor)


def pretended(index: int) -> torch.device:
    """Return one of the devices; the CPU itself is another one."""
    return torch.device("cpu", index)


def device_of(tensor: Tensor) -> torch.device:
    """Return where a tensor is."""
    return getattr(tensor, "pretended_device", HOST)


def put(module: torch.nn.Module, device: torch.device) -> None:
    """Put a module's parameters and buffers on a device."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.pretended_device = device


class PretendedDevices(TorchFunctionMode):
    """Gives every tensor its device, and refuses operations on tensors of two."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation where its tensors are."""
        if func == Tensor.device.__get__:
            return device_of(args[0])
        kwargs = dict(kwargs or {})
        target = _asked(func, args, kwargs)
        if target is None:
            target, out = _common(func, args, kwargs), func(*args, **kwargs)
        else:
            if func not in _MOVES:
                _common(func, args, kwargs)
            out = func(*_replaced(args), **{name: _replaced(value) for name, value in kwargs.items()})
            if any(out is given for given in args) and device_of(out) != target:
                out = out.clone()
        for tensor in _tensors(out):
            if not any(tensor is given for given in args):
                tensor.pretended_device = target
        return out


def _asked(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device a call names for its result; None where it names none."""
    if func is Tensor.cpu:
        return HOST
    named = kwargs.get("device")
    if named is None and func is Tensor.to:
        other = next((given for given in args[1:] if isinstance(given, Tensor)), None)
        if other is not None:
            return device_of(other)
        named = next((given for given in args[1:] if isinstance(given, str | torch.device)), None)
    return None if named is None else torch.device(named)


def _replaced(value: Any) -> Any:
    """Return arguments that name the CPU instead of a pretended device."""
    if isinstance(value, tuple):
        return tuple(_replaced(one) for one in value)
    return HOST if isinstance(value, torch.device) else value


def _common(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.device:
    """Return the one device of a call's tensors.

    Raises:
        RuntimeError: there are two.
    """
    given = list(_tensors((args, kwargs)))
    if func in _COPIES:
        return device_of(given[0])
    found = dict.fromkeys(device_of(tensor) for tensor in given if tensor.dim() or device_of(tensor) != HOST)
    if func in _INDEXED:
        # Indices may lie on the host, whatever they index.
        own = device_of(args[0])
        found = dict.fromkeys(device for device in (own, *found) if device in (own,) or device != HOST)
    if len(found) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {getattr(func, '__name__', func)} got "
            f"{', '.join(map(str, found))}."
        )
    return next(iter(found), HOST)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)
