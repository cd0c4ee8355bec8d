"""What a fixed-size memory stores: five kinds of object, their bytes and who can read them (0x00H, 0x0D).

"512 slots" is no size before it is said what one slot is. Bytes are payload: no parameters, workspace, positions or
slack. Three of the kinds are read by the model that was trained with them and by no other, so no cache of this library
holds them; the names of their methods are reserved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..errors import ConfigError, did_you_mean
from ._checks import check_choice, check_int
from .tensor_contract import SCALAR_BYTES

__all__ = ["RESERVED_POLICIES", "STATE_KINDS", "StateDescription", "checkpoint_needed", "describe_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDescription:
    """One memory, named by what it stores.

    Attributes:
        stored_object: what one slot is.
        bytes: payload bytes of all slots.
        consumer: what reads the object.
        checkpoint_needed: the checkpoint without which it means nothing; None where any checkpoint of the family reads
            it.
    """

    stored_object: str
    bytes: int
    consumer: str
    checkpoint_needed: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    axes: tuple[str, ...]
    scalars: Callable[[Mapping[str, int]], int]
    stored_object: str
    consumer: str
    checkpoint_needed: str | None = None


def _kv_scalars(shape: Mapping[str, int]) -> int:
    return shape["layers"] * shape["rows"] * 2 * shape["kv_heads"] * shape["head_dim"]


_KINDS = {
    "raw_kv": _Kind(
        axes=("layers", "kv_heads", "rows", "head_dim"),
        scalars=_kv_scalars,
        stored_object="a key row and a value row of one original token, per layer and KV head",
        consumer="the checkpoint's own attention",
    ),
    "merged_kv": _Kind(
        axes=("layers", "kv_heads", "rows", "head_dim"),
        scalars=_kv_scalars,
        stored_object="a key row and a value row that stand for several original rows, which cannot be recovered",
        consumer="attention behind the restore rule of the policy that merged the rows",
    ),
    "hidden_memory": _Kind(
        axes=("layers", "slots", "d_model"),
        scalars=lambda shape: shape["layers"] * shape["slots"] * shape["d_model"],
        stored_object="a hidden state of a layer for one token of an earlier segment",
        consumer="the layer's key and value projections, once a segment, under relative positions",
        checkpoint_needed="a Transformer-XL checkpoint, trained with segment recurrence and relative positions",
    ),
    "dual_activation": _Kind(
        axes=("layers", "local_slots", "compressed_slots", "d_model"),
        scalars=lambda shape: shape["layers"] * (shape["local_slots"] + shape["compressed_slots"]) * shape["d_model"],
        stored_object="a hidden state of a recent token, or one that a trained function made of several older ones",
        consumer="the layer's key and value projections over the fine and the coarse memory",
        checkpoint_needed="a Compressive Transformer checkpoint, trained together with its compression function",
    ),
    "segment_summaries": _Kind(
        axes=("segment", "summary_tokens", "d_model"),
        scalars=lambda shape: (shape["segment"] - 1) * shape["summary_tokens"] * shape["d_model"],
        stored_object="a final hidden state at a summary token of an earlier segment",
        consumer="the input of the next segment, as a soft prompt that the model projects into keys and values anew",
        checkpoint_needed="an AutoCompressor checkpoint, trained with summary tokens and their accumulation",
    ),
}
STATE_KINDS = tuple(_KINDS)

# Methods that no cache can add to an ordinary checkpoint, and the kind of memory each would hold.
RESERVED_POLICIES = {
    "transformer_xl": "hidden_memory",
    "compressive_transformer": "dual_activation",
    "autocompressor": "segment_summaries",
}


def describe_state(
    kind: str, *, shape: Mapping[str, int], dtype: str | torch.dtype, batch_rows: int = 1
) -> StateDescription:
    """Return what a memory stores, its payload bytes, and who can read it.

    Args:
        kind: "raw_kv" and "merged_kv" (2 L R H_kv d_h b bytes), "hidden_memory" (L M d_model b), "dual_activation"
            (L (M_local + M_comp) d_model b) or "segment_summaries" ((i - 1) kappa d_model b before segment i, from 1).
        shape: the sizes of the kind's axes, each by name: `layers`, `kv_heads`, `rows`, `head_dim`; `layers`, `slots`,
            `d_model`; `layers`, `local_slots`, `compressed_slots`, `d_model`; `segment`, `summary_tokens`, `d_model`.
        dtype: of every scalar, as a torch dtype or its name.
        batch_rows: sequences held.

    Raises:
        ConfigError: an unknown kind or dtype, no mapping, or an axis that is missing, foreign or negative.
    """
    check_choice("kind", kind, STATE_KINDS)
    scalar = str(dtype).removeprefix("torch.")
    check_choice("dtype", scalar, tuple(SCALAR_BYTES))
    check_int("batch_rows", batch_rows, minimum=1)
    found = _KINDS[kind]
    if not isinstance(shape, Mapping):
        raise ConfigError(
            f"The size of {kind} is a mapping that names its axes ({', '.join(found.axes)}); got {shape!r}. Give for "
            f"example {{{found.axes[0]!r}: 2, ...}}."
        )
    for axis in shape:
        if axis not in found.axes:
            raise ConfigError(
                f"{kind} has no axis {axis!r}; it has {', '.join(found.axes)}.{did_you_mean(axis, found.axes)}"
            )
    for axis in found.axes:
        if axis not in shape:
            raise ConfigError(f"The size of {kind} needs its axis {axis!r}; give all of {', '.join(found.axes)}.")
        check_int(axis, shape[axis], minimum=1 if axis == "segment" else 0)
    return StateDescription(
        stored_object=found.stored_object,
        bytes=batch_rows * found.scalars(shape) * SCALAR_BYTES[scalar],
        consumer=found.consumer,
        checkpoint_needed=found.checkpoint_needed,
    )


def checkpoint_needed(policy: str) -> str | None:
    """Return the checkpoint that a reserved policy would need; None for a name that is not reserved."""
    kind = RESERVED_POLICIES.get(policy)
    return None if kind is None else _KINDS[kind].checkpoint_needed
