"""Layers merged two by two, during one forward or one selection: what they bring, and what their stores become.

Every kind of step runs such layers as it runs others, on rows that their store restores. Only where new rows stay
differs: once the deeper layer of a pair has attended, those of both are merged into spare slots of the store, and let
go. Where rows compete, the choice comes first: of a pair's new rows those that stay are merged, and rows that were
merged before are taken as they are. So a row is merged once and never again, and nothing drifts.

Tokens that wait for acceptance, and prompts that are held, are not merged yet: which of their rows stay, and which the
threshold is taken from, is known when they end (`with_merged`).

Letters: B batch rows, H KV heads, M map heads (H or 1), T new rows, K rows kept, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import IntegrityError
from ..frame import LayerStep
from ..representation import DepthPairs, RowRepresentation
from ..representation.slerp import merge_block_rows, merge_rows, merge_workspace_bytes
from ..storage import DenseRows, growth_slots, stored_tensors
from ..storage.merged import MergedPair, MergedTensor
from .snapshot import Snapshot

if TYPE_CHECKING:
    from .step import Step

__all__ = ["LayerMerging", "depth_pairs", "with_merged"]

_Rows = tuple[Tensor, Tensor]
"""Keys and values of one layer, [B, H, T, D]."""


class LayerMerging:
    """The stores of layer pairs while a forward, or a selection, goes through the layers."""

    def __init__(self, representation: RowRepresentation, published: Snapshot) -> None:
        self._rule, self._published = depth_pairs(representation), published
        self._index = {layer: index for index, pair in enumerate(self._rule.pairs) for layer in pair}
        # Of layers whose partner has not come yet: what they brought, or what a selection kept of them.
        self._brought: dict[int, _Rows] = {}
        self._kept: dict[int, _Rows] = {}
        self._pairs: dict[int, MergedPair] = {}

    def __contains__(self, layer: int) -> bool:
        """Whether a layer shares its store."""
        return layer in self._index

    def is_lower(self, layer: int) -> bool:
        """Whether a layer is the first of a pair."""
        return layer in self and layer == self._rule.pairs[self._index[layer]][0]

    def bring(self, layer: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> None:
        """Note what a layer of a pair brings."""
        self._brought[layer] = (keys_BHTD.detach(), values_BHTD.detach())

    def attended(self, step: Step, layer: LayerStep, slots: int | Tensor, *, limit: int | None = None) -> None:
        """Merge what a pair brought once its deeper layer has attended, or hold it where it cannot be merged yet.

        Args:
            slots: the first slot of the new rows, or a slot [B, M] for the one new row of each owner.
            limit: the most slots there will ever be.
        """
        index, workspace_bytes = self._index[layer.layer], 0
        pair = () if self.is_lower(layer.layer) else self._rule.pairs[index]
        if pair:
            rows_2 = _where_deeper([self._brought[each] for each in pair])
            with stored_tensors():
                self._pairs[index] = self._with_new(step, index, rows_2, slots, limit)
            workspace_bytes = 0 if step.holds_rows else merge_workspace_bytes(rows_2[0][0])
        read = [layer.keys, layer.values] if self._published.width else []
        alive = [*(rows for brought in self._brought.values() for rows in brought), *read]
        step.note_transient(sum(rows.numel() * rows.element_size() for rows in alive) + workspace_bytes)
        for each in pair:
            del self._brought[each]

    def pack(self, layer: int, rows: DenseRows, index_BMK: Tensor, live_BMK: Tensor, capacity: int) -> int:
        """Take what a selection keeps of a layer; both layers of a pair make a store. Returns the workspace in bytes.

        Args:
            rows: the layer's kept rows, restored where they were merged before.
            index_BMK: where they came from, among the published slots and the new rows behind them.
        """
        self._kept[layer] = rows.view(index_BMK.shape[2])
        if self.is_lower(layer):
            return 0
        index = self._index[layer]
        rows_2 = _where_deeper([self._kept.pop(each) for each in self._rule.pairs[index]])
        pair = self._published_pair(index, rows_2[0], 0)
        self._pairs[index] = _packed(self._rule, pair, rows_2, index_BMK, live_BMK[:, 0], capacity)
        return merge_workspace_bytes(rows_2[0][0]) + 2 * rows.slot_bytes

    @property
    def pairs(self) -> tuple[MergedPair, ...]:
        """The stores to publish, in order of depth, once every layer has come."""
        return tuple(self._pairs[index] for index in range(len(self._rule.pairs)))

    def fresh_tensors(self) -> list[Tensor]:
        """Return the tensors that were made since: stores, and kept rows that wait for their partner."""
        published = {id(tensor) for pair in self._published.pairs for tensor in pair.tensors()}
        kept = [rows for both in self._kept.values() for rows in both]
        made = [tensor for pair in self._pairs.values() for tensor in pair.tensors() if id(tensor) not in published]
        return [*kept, *made]

    def settled(self, successor: Snapshot) -> Snapshot:
        """Return what will be published, with what a prompt's end fixes."""
        return successor if any(pair.unmerged for pair in successor.pairs) else _fixed(self._rule, successor)

    def _with_new(
        self, step: Step, index: int, rows_2: Sequence[_Rows], slots: int | Tensor, limit: int | None
    ) -> MergedPair:
        length = rows_2[0][0].shape[2]
        pair = self._published_pair(index, rows_2[0], 0 if step.holds_rows else growth_slots(length))
        if step.holds_rows:
            return pair.holding(self._published.width, rows_2)
        assert not pair.unmerged, "what is held ends before anything is merged behind it"
        live_BT = step.new_map().live_BMW[:, 0].to(pair.device)
        return _merged_into(self._rule, pair, slots, live_BT, rows_2, limit)

    def _published_pair(self, index: int, like: _Rows, capacity: int) -> MergedPair:
        """Return a pair as it is published; an empty one before anything is."""
        if self._published.pairs:
            return self._published.pairs[index]
        return MergedPair.allocate(self._rule.pairs[index], *like, capacity)


def _where_deeper(rows_2: Sequence[_Rows]) -> list[_Rows]:
    """Return the rows of both layers where the pair lies: with its deeper layer."""
    device = rows_2[1][0].device
    return [(keys.to(device), values.to(device)) for keys, values in rows_2]


def depth_pairs(representation: RowRepresentation) -> DepthPairs:
    """Return a representation that merges layers; any other has no step here."""
    if not isinstance(representation, DepthPairs):
        raise IntegrityError(f"{representation.name} replaces rows in a way that no step of the engine knows.")
    return representation


def with_merged(representation: RowRepresentation, snapshot: Snapshot) -> Snapshot:
    """Return a snapshot, about to be published, whose pairs hold no row as it was; itself where none does.

    Rows of a prompt that is held are not merged before it is chosen from.
    """
    rule = depth_pairs(representation)
    if snapshot.open_segment is not None or not any(pair.unmerged for pair in snapshot.pairs):
        return snapshot
    used = snapshot.pairs[0].merged_slots
    live_BT = snapshot.full_map(0).live_BMW[:, 0, used:]
    with stored_tensors():
        merged = [
            _merged_into(rule, pair, used, live_BT.to(pair.device), pair.held(used, snapshot.width - used))
            for pair in snapshot.pairs
        ]
    pairs = tuple(replace(pair, unmerged=()) for pair in merged)
    return _fixed(rule, replace(snapshot, pairs=pairs))


def _fixed(rule: DepthPairs, snapshot: Snapshot) -> Snapshot:
    """Return a snapshot whose rows are merged with what that fixes: of a prompt with a threshold nothing is taken back.

    A batch row has thresholds once it has rows.
    """
    before, tokens = snapshot.profile_tokens or (0,) * snapshot.batch_size, snapshot.frontier.tokens
    now = tuple(old or fed for old, fed in zip(before, tokens, strict=True))
    moves = now != before and not rule.merges_none
    return replace(
        snapshot,
        profile_tokens=now,
        evicted_at_column=snapshot.frontier.columns if moves else snapshot.evicted_at_column,
    )


def _merged_into(
    rule: DepthPairs,
    pair: MergedPair,
    slots: int | Tensor,
    live_BT: Tensor,
    rows_2: Sequence[_Rows],
    limit: int | None = None,
) -> MergedPair:
    (lower_keys, lower_values), (deeper_keys, deeper_values) = rows_2
    keys = _merged_tensor(rule, pair.keys, slots, live_BT, (lower_keys, deeper_keys), limit)
    values = _merged_tensor(rule, pair.values, slots, live_BT, (lower_values, deeper_values), limit)
    width = slots + live_BT.shape[1] if isinstance(slots, int) else pair.merged_slots
    return replace(pair, keys=keys, values=values, merged_slots=width)


def _merged_tensor(
    rule: DepthPairs,
    store: MergedTensor,
    slots: int | Tensor,
    live_BT: Tensor,
    rows_2BHTD: tuple[Tensor, Tensor],
    limit: int | None,
) -> MergedTensor:
    lower, deeper = rows_2BHTD
    if not isinstance(slots, int):
        merged = merge_rows(lower, deeper, rule.interpolation)
        slot_BM = slots.to(lower.device)
        store.write_at(slot_BM, merged.shared_BHTD, merged.magnitudes_2BHT)
        thresholds, apart = _apart(rule, store, merged.distances_BHT, live_BT)
        return replace(store.note_at(slot_BM, apart, rows_2BHTD), thresholds_BH=thresholds)
    store, distances = store.grown(slots, slots + lower.shape[2], limit=limit), []
    for start, block in _blocks(lower):
        merged = merge_rows(lower[:, :, block], deeper[:, :, block], rule.interpolation)
        store.write(slots + start, merged.shared_BHTD, merged.magnitudes_2BHT)
        distances.append(merged.distances_BHT)
    thresholds, apart = _apart(rule, store, torch.cat(distances, dim=2), live_BT)
    return replace(store.note(slots, apart, rows_2BHTD), thresholds_BH=thresholds)


def _packed(
    rule: DepthPairs,
    pair: MergedPair,
    rows_2: Sequence[_Rows],
    index_BMK: Tensor,
    live_BK: Tensor,
    capacity: int,
) -> MergedPair:
    """Return a store of kept rows only: those merged before as they were, the others merged now."""
    (lower_keys, lower_values), (deeper_keys, deeper_values) = rows_2
    index, live = index_BMK.to(pair.device), live_BK.to(pair.device)
    merged_before = index < pair.merged_slots
    source = index.clamp(max=max(0, pair.merged_slots - 1))
    parts = ((pair.keys, (lower_keys, deeper_keys)), (pair.values, (lower_values, deeper_values)))
    keys, values = (_packed_tensor(rule, store, rows, source, merged_before, live, capacity) for store, rows in parts)
    return replace(pair, keys=keys, values=values, merged_slots=index.shape[2], unmerged=())


def _packed_tensor(
    rule: DepthPairs,
    store: MergedTensor,
    rows_2BHKD: tuple[Tensor, Tensor],
    source_BMK: Tensor,
    merged_before_BMK: Tensor,
    live_BK: Tensor,
    capacity: int,
) -> MergedTensor:
    lower, deeper = rows_2BHKD
    if not store.capacity:
        packed, was_apart = replace(MergedTensor.allocate(lower, capacity), thresholds_BH=store.thresholds_BH), None
    else:
        packed, was_apart = store.taken(source_BMK, capacity)
    distances = []
    for _, block in _blocks(lower):
        merged = merge_rows(lower[:, :, block], deeper[:, :, block], rule.interpolation)
        new_BM1 = ~merged_before_BMK[:, :, block]
        shared, magnitudes = packed.shared_BHCD[:, :, block], packed.magnitudes_2BHC[..., block]
        shared.copy_(torch.where(new_BM1[..., None], merged.shared_BHTD, shared))
        magnitudes.copy_(torch.where(new_BM1, merged.magnitudes_2BHT, magnitudes))
        distances.append(merged.distances_BHT)
    thresholds, apart = _apart(rule, packed, torch.cat(distances, dim=2), live_BK)
    if was_apart is not None:
        apart = torch.where(merged_before_BMK, was_apart & live_BK[:, None], apart)
    return replace(packed.note(0, apart, rows_2BHKD), thresholds_BH=thresholds)


def _apart(rule: DepthPairs, store: MergedTensor, distances_BHT: Tensor, live_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the thresholds, fixed by these rows where none is yet, and which rows are kept as they were."""
    fixed = store.thresholds_BH
    thresholds = torch.where(fixed.isnan(), rule.prompt_thresholds(distances_BHT, live_BT), fixed)
    return thresholds, rule.exceptions(distances_BHT, thresholds, live_BT)


def _blocks(rows_BHTD: Tensor) -> list[tuple[int, slice]]:
    """Return the first row and the slice of blocks whose workspace does not grow with the prompt."""
    length, block = rows_BHTD.shape[2], merge_block_rows(rows_BHTD)
    return [(start, slice(start, min(start + block, length))) for start in range(0, length, block)]
