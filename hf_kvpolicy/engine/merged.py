"""A forward of a policy that merges rows across depth: restore, attend, append, merge.

A layer by itself runs as in `AppendStep`. A layer of a pair attends over what its store restores and its own new rows;
when the deeper one has attended, the new rows of both are merged into spare slots of their store, and the dense rows
are let go. A row is merged once and never again, so that nothing drifts.

Tokens that wait for acceptance are not merged yet: how many of them the prompt's threshold is taken from is known when
they are accepted (`merge_pending`).

Letters: B batch rows, H KV heads, T new rows, N attended rows, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..contract import Phase, Transaction
from ..errors import IntegrityError
from ..frame import LayerStep
from ..masks import MaskRecord
from ..representation import DepthPairs, RowRepresentation
from ..representation.slerp import merge_block_rows, merge_rows, merge_workspace_bytes
from ..storage import DenseRows, RowMap, growth_slots, stored_tensors
from ..storage.merged import MergedPair, MergedTensor
from .append import AppendStep
from .inputs import ForwardInputs
from .snapshot import Snapshot

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["MergedStep", "depth_pairs", "merge_pending"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _NewRows:
    """What a layer of a pair brought."""

    keys_BHTD: Tensor
    values_BHTD: Tensor

    def to(self, device: torch.device) -> _NewRows:
        """Return them on another device."""
        return _NewRows(keys_BHTD=self.keys_BHTD.to(device), values_BHTD=self.values_BHTD.to(device))


class MergedStep(AppendStep):
    """Appends to layers by themselves, merges into the stores of pairs."""

    def __init__(self, runtime: Runtime, snapshot: Snapshot, inputs: ForwardInputs, transaction: Transaction) -> None:
        super().__init__(runtime, snapshot, inputs, transaction)
        self._rule = depth_pairs(runtime.composition.representation)
        self._pair_of = {layer: index for index, pair in enumerate(self._rule.pairs) for layer in pair}
        self._alone = [layer for layer in range(runtime.geometry.num_layers) if layer not in self._pair_of]
        self._new: dict[int, _NewRows] = {}
        self._pairs: dict[int, MergedPair] = {}
        self._pending: dict[int, tuple[DenseRows, DenseRows]] = {}

    def append(self, layer: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self._pair_of:
            return super().append(layer, keys_BHTD, values_BHTD)
        self._new[layer] = _NewRows(keys_BHTD=keys_BHTD.detach(), values_BHTD=values_BHTD.detach())
        width, length = self.snapshot.width, self.inputs.length
        if not width:
            return keys_BHTD, values_BHTD
        old = self.snapshot.pairs[self._pair_of[layer]]
        if keys_BHTD.requires_grad or values_BHTD.requires_grad:
            keys, values = (rows.to(keys_BHTD.device) for rows in old.restored(layer, width))
            return torch.cat([keys, keys_BHTD], dim=2), torch.cat([values, values_BHTD], dim=2)
        keys, values = (rows.to(keys_BHTD.device) for rows in old.restored(layer, width, length))
        keys[:, :, width:], values[:, :, width:] = keys_BHTD, values_BHTD
        return keys, values

    def attended(self, layer: int, query_BQTD: Tensor, step: LayerStep, record: MaskRecord, scaling: float) -> None:
        index = self._pair_of.get(layer)
        if index is None:
            super().attended(layer, query_BQTD, step, record, scaling)
            return
        lower, deeper = self._rule.pairs[index]
        workspace_bytes = 0
        if layer == deeper:
            with stored_tensors():
                self._take_in(index, self._new[lower], self._new[deeper])
            workspace_bytes = merge_workspace_bytes(self._new[lower].keys_BHTD)
        brought = [rows for new in self._new.values() for rows in (new.keys_BHTD, new.values_BHTD)]
        attended = [step.keys, step.values] if self.snapshot.width else []
        held_bytes = sum(rows.numel() * rows.element_size() for rows in (*brought, *attended))
        self.note_transient(held_bytes + workspace_bytes)
        if layer == deeper:
            del self._new[lower], self._new[deeper]
        self.transaction.enter_through(layer, Phase.PACK)

    def fresh_buffers(self) -> list[Tensor]:
        published = {id(tensor) for pair in self.snapshot.pairs for tensor in pair.tensors()}
        made = [tensor for pair in self._pairs.values() for tensor in pair.tensors() if id(tensor) not in published]
        waiting = [tensor for both in self._pending.values() for rows in both for tensor in rows.tensors()]
        return [*super().fresh_buffers(), *made, *waiting]

    def placed(self) -> dict[str, Any]:
        indices = range(len(self._rule.pairs))
        return {
            "rows": tuple(self.rows[layer] for layer in self._alone),
            "pairs": tuple(self._pairs[index] for index in indices),
            "pending": tuple(rows for index in indices for rows in self._pending.get(index, ())),
            "maps": self.snapshot.maps or (RowMap.empty(self.inputs.batch, self.inputs.device),),
            "counts": self.candidate_counts,
        }

    def successor(self) -> Snapshot:
        after = super().successor()
        if self.runtime.recording:
            return after
        return _fixed_by(self._rule, after, [new > 0 for new in self.inputs.new_tokens])

    def _take_in(self, index: int, lower: _NewRows, deeper: _NewRows) -> None:
        length, pairs = self.inputs.length, self.snapshot.pairs
        # A pair lies where its deeper layer does.
        lower = lower.to(deeper.keys_BHTD.device)
        pair = pairs[index] if pairs else None
        if pair is None:
            capacity = 0 if self.runtime.recording else growth_slots(length)
            pair = MergedPair.allocate(self._rule.pairs[index], lower.keys_BHTD, lower.values_BHTD, capacity)
        if self.runtime.recording:
            self._pending[index] = (_held(lower), _held(deeper))
        else:
            live_BT = self.new_map().live_BMW[:, 0].to(pair.device)
            pair = _merged_into(self._rule, pair, self.snapshot.width, live_BT, (lower, deeper))
        self._pairs[index] = pair

    def is_new_buffer(self, layer: int) -> bool:
        return not self.snapshot.rows or self.rows[layer] is not self.snapshot.rows[self._alone.index(layer)]

    def _buffers(self, layer: int, keys: Tensor, values: Tensor) -> DenseRows:
        used, length = self.snapshot.width, self.inputs.length
        if not self.snapshot.rows:
            return DenseRows.allocate(keys, values, growth_slots(length))
        return self.snapshot.rows[self._alone.index(layer)].grown(used, used + length)


def depth_pairs(representation: RowRepresentation) -> DepthPairs:
    """Return a representation that merges layers; any other has no step here."""
    if not isinstance(representation, DepthPairs):
        raise IntegrityError(f"{representation.name} replaces rows in a way that no step of the engine knows.")
    return representation


def merge_pending(representation: RowRepresentation, accepted: Snapshot, length: int) -> Snapshot:
    """Return an accepted snapshot whose last `length` columns, which waited, are merged as if they were fed now."""
    rule, used = depth_pairs(representation), accepted.width - length
    assert accepted.tail is not None, "what waits was appended"
    live_BT = accepted.tail.live_BMW[:, 0, accepted.tail.width - length :]
    pairs = []
    for index, pair in enumerate(accepted.pairs):
        both = accepted.pending[2 * index : 2 * index + 2]
        layers = [rows.view(length) for rows in both if isinstance(rows, DenseRows)]
        lower, deeper = (_NewRows(keys_BHTD=keys, values_BHTD=values) for keys, values in layers)
        pairs.append(_merged_into(rule, pair, used, live_BT.to(pair.device), (lower, deeper)))
    merged = replace(accepted, pairs=tuple(pairs), pending=())
    return _fixed_by(rule, merged, live_BT.any(-1).tolist())


def _fixed_by(rule: DepthPairs, snapshot: Snapshot, brought: list[bool]) -> Snapshot:
    """Return the snapshot with what a prompt's end fixes: nothing of a prompt that has a threshold is taken back.

    Args:
        brought: whether each batch row has a real token among the newest columns.
    """
    before = snapshot.profile_tokens or (0,) * snapshot.batch_size
    fixes = [own and not old for own, old in zip(brought, before, strict=True)]
    now = zip(snapshot.frontier.tokens, before, fixes, strict=True)
    evicted = snapshot.frontier.columns if any(fixes) and not rule.merges_none else snapshot.evicted_at_column
    return replace(
        snapshot,
        profile_tokens=tuple(tokens if own else old for tokens, old, own in now),
        evicted_at_column=evicted,
    )


def _held(new: _NewRows) -> DenseRows:
    rows = DenseRows.allocate(new.keys_BHTD, new.values_BHTD, new.keys_BHTD.shape[2])
    rows.write(0, new.keys_BHTD, new.values_BHTD)
    return rows


def _merged_into(
    rule: DepthPairs, pair: MergedPair, used: int, live_BT: Tensor, new: tuple[_NewRows, _NewRows]
) -> MergedPair:
    keys = _merged_tensor(rule, pair.keys, used, live_BT, (new[0].keys_BHTD, new[1].keys_BHTD))
    values = _merged_tensor(rule, pair.values, used, live_BT, (new[0].values_BHTD, new[1].values_BHTD))
    return replace(pair, keys=keys, values=values)


def _merged_tensor(
    rule: DepthPairs, store: MergedTensor, used: int, live_BT: Tensor, rows_2BHTD: tuple[Tensor, Tensor]
) -> MergedTensor:
    lower, deeper = rows_2BHTD
    length, block, distances = lower.shape[2], merge_block_rows(lower), []
    store = store.grown(used, used + length)
    for start in range(0, length, block):
        here = slice(start, start + block)
        merged = merge_rows(lower[:, :, here], deeper[:, :, here], rule.interpolation)
        store.write(used + start, merged.shared_BHTD, merged.magnitudes_2BHT)
        distances.append(merged.distances_BHT)
    distances_BHT, fixed = torch.cat(distances, dim=2), store.thresholds_BH
    thresholds = torch.where(fixed.isnan(), rule.prompt_thresholds(distances_BHT, live_BT), fixed)
    apart = rule.exceptions(distances_BHT, thresholds, live_BT)
    return replace(store.note(used, apart, rows_2BHTD), thresholds_BH=thresholds)
