"""Dense K/V buffers of one layer: rectangles of slots, written only where no published map names a slot.

Letters: B batch rows, S stored heads, C capacity in slots, T new rows, D head dimension, P pinned rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DenseRows", "growth_slots", "stored_tensors"]

_MIN_SLACK, _MAX_SLACK = 16, 256


class stored_tensors:
    """Make tensors that outlive a forward: outside inference mode, so that grad modes may mix, and without a graph.

    A plain class and no generator: one that an interrupt left suspended would switch grad modes when it is collected.
    """

    __slots__ = ("_grad", "_inference")

    def __enter__(self) -> None:
        self._inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if self._inference is not None:
            self._inference.__enter__()
        self._grad = torch.is_grad_enabled()
        torch.set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch.set_grad_enabled(self._grad)
        if self._inference is not None:
            self._inference.__exit__(None, None, None)


def growth_slots(needed: int) -> int:
    """Return the capacity to allocate when `needed` slots are asked for: amortised O(1) appends, bounded slack."""
    return needed + min(_MAX_SLACK, max(_MIN_SLACK, needed // 16))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseRows:
    """The K/V buffers of one layer. The object is immutable; slots outside the published map may be written."""

    keys_BSCD: Tensor
    values_BSCD: Tensor
    # Rows whose attended copy is re-rotated (cache-local positions) keep their pristine key here, by pinned rank.
    pinned_keys_BSPD: Tensor | None = None

    @classmethod
    def allocate(cls, keys_BSTD: Tensor, values_BSTD: Tensor, capacity: int, pinned: int = 0) -> DenseRows:
        """Return empty buffers shaped like the given rows; `pinned` pristine key rows are zero-filled."""
        with stored_tensors():
            keys = _empty_slots(keys_BSTD, capacity)
            values = _empty_slots(values_BSTD, capacity)
            pristine = _empty_slots(keys_BSTD, pinned).zero_() if pinned else None
        return cls(keys_BSCD=keys, values_BSCD=values, pinned_keys_BSPD=pristine)

    @property
    def capacity(self) -> int:
        """Slots per stored head."""
        return self.keys_BSCD.shape[2]

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self.keys_BSCD.device

    @property
    def coded_slots(self) -> int:
        """Slots whose rows are coded in few bits: none here (`CodedRows` has some)."""
        return 0

    @property
    def residual(self) -> int:
        """The first slot that is neither pinned nor coded."""
        return 0 if self.pinned_keys_BSPD is None else self.pinned_keys_BSPD.shape[2]

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots, live or not."""
        return self.keys_BSCD.shape[0] * self.keys_BSCD.shape[1] * self.capacity * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one K/V row pair of one stored head, as the model made it."""
        key_bytes = self.keys_BSCD.shape[3] * self.keys_BSCD.element_size()
        return key_bytes + self.values_BSCD.shape[3] * self.values_BSCD.element_size()

    def grown(self, used: int, needed: int, *, limit: int | None = None) -> DenseRows:
        """Return buffers with room for `needed` slots and the first `used` slots copied; self when there is room.

        `limit` is the most slots this layer will ever use; slack beyond it would be waste.
        """
        if needed <= self.capacity:
            return self
        slots = growth_slots(needed)
        slots = slots if limit is None else max(needed, min(slots, limit))
        larger = DenseRows.allocate(self.keys_BSCD, self.values_BSCD, slots)
        larger.keys_BSCD[:, :, :used] = self.keys_BSCD[:, :, :used]
        larger.values_BSCD[:, :, :used] = self.values_BSCD[:, :, :used]
        return DenseRows(
            keys_BSCD=larger.keys_BSCD, values_BSCD=larger.values_BSCD, pinned_keys_BSPD=self.pinned_keys_BSPD
        )

    def write(self, slot: int, keys_BSTD: Tensor, values_BSTD: Tensor) -> None:
        """Write rows into consecutive slots, the same in every batch row and head."""
        rows = keys_BSTD.shape[2]
        self.keys_BSCD.narrow(2, slot, rows).copy_(keys_BSTD)
        self.values_BSCD.narrow(2, slot, rows).copy_(values_BSTD)

    def view(self, width: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first `width` slots, [B, S, width, D]."""
        if width == self.capacity:
            return self.keys_BSCD, self.values_BSCD
        return self.keys_BSCD.narrow(2, 0, width), self.values_BSCD.narrow(2, 0, width)

    def held(self, slot: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of consecutive slots, [B, S, rows, D], which lie in the buffers as they are."""
        return self.keys_BSCD.narrow(2, slot, rows), self.values_BSCD.narrow(2, slot, rows)

    def view_bytes(self, width: int) -> int:
        """Bytes that `view` makes: none, it shows the buffers."""
        return 0

    def write_at(self, slot_B: Tensor, keys_BS1D: Tensor, values_BS1D: Tensor) -> None:
        """Write one row per batch row, each into a slot of its own (the same for all heads)."""
        slot_B = slot_B.to(self.device)
        batch = torch.arange(slot_B.shape[0], device=slot_B.device)
        self.keys_BSCD[batch, :, slot_B] = keys_BS1D[:, :, 0]
        self.values_BSCD[batch, :, slot_B] = values_BS1D[:, :, 0]

    def batch(self, index_B: Tensor) -> DenseRows:
        """Return buffers with their batch rows selected, repeated or reordered (always a copy)."""
        return self.of([tensor.index_select(0, index_B) for tensor in self.tensors()])

    def copied(self) -> DenseRows:
        """Return an independent copy."""
        return self.of([tensor.clone() for tensor in self.tensors()])

    def to(self, device: torch.device) -> DenseRows:
        """Return the buffers on another device; self when they lie there."""
        return self if device == self.device else self.of([tensor.to(device) for tensor in self.tensors()])

    def of(self, tensors: Sequence[Tensor]) -> DenseRows:
        """Return the same rows over other tensors, in the order of `tensors()`."""
        keys, values, *pinned = tensors
        return DenseRows(keys_BSCD=keys, values_BSCD=values, pinned_keys_BSPD=pinned[0] if pinned else None)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor this object keeps alive."""
        pinned = () if self.pinned_keys_BSPD is None else (self.pinned_keys_BSPD,)
        return (self.keys_BSCD, self.values_BSCD, *pinned)


def _empty_slots(like_BSTD: Tensor, slots: int) -> Tensor:
    batch, heads, _, dim = like_BSTD.shape
    return torch.empty((batch, heads, slots, dim), dtype=like_BSTD.dtype, device=like_BSTD.device)
