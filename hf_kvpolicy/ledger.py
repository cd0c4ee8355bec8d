"""What a cache holds, byte for byte: declared by formula, measured from tensor storages (sections 0x02A-0x02F).

Terms: payload = live rows, those of merged layers with all it takes to restore them; slack = slots that hold no live
row; positions = columns, token positions and slots of rows; offsets = where ragged owners begin and how long they are;
validity = live flags, the mask of columns fed and the kinds of their tokens; scores = states that rows carry (of merged
tokens their masses), queries held for a later selection and thresholds of merging; protected = pristine keys of
re-rotated rows. Transient peak is the most that was alive at once during a forward, or as tokens were accepted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from torch import Tensor

from .contract import Ratio
from .engine import Runtime, Snapshot, layer_tensors
from .storage import RowMap

__all__ = ["Ledger", "account"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The bytes of one cache. `declared_bytes` is the sum of the terms; `measured_bytes` must equal it exactly."""

    payload_bytes: int
    slack_bytes: int
    positions_bytes: int
    # Where owners of unequal length begin and end (ragged storage).
    offsets_bytes: int
    validity_bytes: int
    scores_bytes: int
    protected_bytes: int
    # Tokens of a finished forward that wait for acceptance, and the queries held for them.
    waiting_bytes: int
    # Keys and values of layers no policy acts on, measured: transformers' own layers hold them as they like.
    foreign_bytes: int
    measured_bytes: int
    transient_peak_bytes: int
    # K/V of a cache that had kept every real token.
    full_payload_bytes: int
    payload_rows: int
    # Rows among them that were appended after the last selection (end-of-prefill policies grow by these).
    tail_rows: int

    @property
    def declared_bytes(self) -> int:
        """Bytes by formula, all terms."""
        return (
            self.payload_bytes
            + self.slack_bytes
            + self.positions_bytes
            + self.offsets_bytes
            + self.validity_bytes
            + self.scores_bytes
            + self.protected_bytes
            + self.waiting_bytes
            + self.foreign_bytes
        )

    @property
    def kept_ratio(self) -> Ratio:
        """K/V payload held over the payload of a full cache."""
        return Ratio(numerator=self.payload_bytes, denominator=self.full_payload_bytes)

    def faults(self) -> list[str]:
        """Return what contradicts the measurement."""
        if self.declared_bytes == self.measured_bytes:
            return []
        return [f"{self.declared_bytes} bytes are declared, but the storages hold {self.measured_bytes}"]

    def to_dict(self) -> dict[str, int]:
        """Return all terms as plain numbers."""
        return {**asdict(self), "declared_bytes": self.declared_bytes}

    def __str__(self) -> str:
        """Draw the terms as an aligned table."""
        rows = [
            (name.removesuffix("_bytes"), value) for name, value in self.to_dict().items() if name.endswith("_bytes")
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value:>14,} B" for name, value in rows]
        share = self.kept_ratio.value
        kept = "" if share is None else f" ({share:.1%} of the full cache's payload)"
        return "\n".join([f"{self.payload_rows:,} rows{kept}", *lines])


def account(runtime: Runtime) -> Ledger:
    """Return the ledger of everything the cache reaches now."""
    snapshot = runtime.snapshot
    layers, heads = runtime.geometry.num_layers, runtime.composition.stored_heads(runtime.geometry)
    row_bytes = snapshot.buffers[0].row_bytes if snapshot.buffers else 0
    payload = snapshot.payload_bytes(layers, heads)
    live = snapshot.total_rows(layers, heads) if snapshot.buffers else 0
    seen: dict[int, int] = {}
    measured = _measure(_tensors(snapshot), seen)
    waiting = 0 if runtime.waiting is None else _measure(_tensors(runtime.waiting.snapshot), seen)
    foreign = _measure(layer_tensors([*snapshot.foreign, *runtime.foreign]), seen)
    full_rows = sum(snapshot.frontier.tokens) * runtime.geometry.num_layers * runtime.geometry.num_kv_heads
    return Ledger(
        payload_bytes=payload,
        slack_bytes=_slot_bytes(snapshot, heads) - payload,
        positions_bytes=sum(_positions_bytes(part) for part in _maps(snapshot)) + _ragged_positions_bytes(snapshot),
        offsets_bytes=_ragged_offsets_bytes(snapshot),
        validity_bytes=sum(part.live_BMW.numel() for part in _maps(snapshot)) + _seen_bytes(snapshot),
        scores_bytes=_scores_bytes(snapshot),
        protected_bytes=_pinned_bytes(snapshot),
        waiting_bytes=waiting,
        foreign_bytes=foreign,
        measured_bytes=measured + waiting + foreign,
        transient_peak_bytes=max(runtime.statistics.transient_peak_bytes, measured + waiting + foreign),
        full_payload_bytes=full_rows * row_bytes,
        payload_rows=live,
        tail_rows=sum(snapshot.tail_counts) * len(snapshot.storing(layers)) * heads if snapshot.buffers else 0,
    )


def _slot_bytes(snapshot: Snapshot, heads: int) -> int:
    """Return the bytes of all slots, live or not."""
    dense = sum(rows.slot_bytes for rows in snapshot.rows)
    ragged = sum(layer.slot_bytes for layer in snapshot.ragged)
    return dense + ragged + sum(pair.slot_bytes for pair in snapshot.pairs)


def _maps(snapshot: Snapshot) -> list[RowMap]:
    return [*snapshot.maps, *([] if snapshot.tail is None else [snapshot.tail])]


def _tensors(snapshot: Snapshot) -> list[Tensor]:
    """Return every tensor a snapshot reaches."""
    tensors = [tensor for rows in (*snapshot.buffers, *snapshot.pending) for tensor in rows.tensors()]
    tensors += [tensor for layer in snapshot.ragged for tensor in layer.tensors()]
    for part in _maps(snapshot):
        tensors += [part.columns_BMW, part.tokens_BMW, part.live_BMW]
    frontier = snapshot.frontier
    tensors += [part for part in (frontier.seen_BF, frontier.kinds_BF) if part is not None]
    if snapshot.scores_LBSWX is not None:
        tensors.append(snapshot.scores_LBSWX)
    if snapshot.open_segment is not None:
        tensors += snapshot.open_segment.tensors()
    return tensors


def _measure(tensors: list[Tensor], seen: dict[int, int]) -> int:
    """Return the bytes of storages not seen yet. Storages, not tensors: a slice keeps its whole parent alive."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen[storage.data_ptr()] = storage.nbytes()
            total += storage.nbytes()
    return total


def _positions_bytes(part: RowMap) -> int:
    return _declared((part.columns_BMW, part.tokens_BMW))


def _ragged_positions_bytes(snapshot: Snapshot) -> int:
    maps = [layer.map for layer in snapshot.ragged]
    return sum(_declared((part.columns_P, part.tokens_P)) for part in maps)


def _ragged_offsets_bytes(snapshot: Snapshot) -> int:
    return sum(_declared((part.map.lengths_O, part.map.spare_O, part.rows.starts_O)) for part in snapshot.ragged)


def _seen_bytes(snapshot: Snapshot) -> int:
    """Return the bytes of the mask and of the kinds of columns fed, one byte a column each."""
    kept = [part for part in (snapshot.frontier.seen_BF, snapshot.frontier.kinds_BF) if part is not None]
    return len(kept) * snapshot.batch_size * snapshot.frontier.columns


def _scores_bytes(snapshot: Snapshot) -> int:
    held = () if snapshot.open_segment is None else snapshot.open_segment.tensors()
    carried = (snapshot.scores_LBSWX, *(layer.map.states_PX for layer in snapshot.ragged))
    masses = tuple(None if layer.trailing is None else layer.trailing.masses_BH for layer in snapshot.ragged)
    thresholds = [tensor for pair in snapshot.pairs for tensor in pair.thresholds]
    return _declared(held) + _declared(carried) + _declared(masses) + _declared(tuple(thresholds))


def _pinned_bytes(snapshot: Snapshot) -> int:
    return _declared(tuple(rows.pinned_keys_BSPD for rows in snapshot.rows))


def _declared(tensors: tuple[Tensor | None, ...]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
