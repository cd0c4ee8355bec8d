"""One decode token over heads with policies of their own: a spare slot is filled, at most one row of each owner dies.

While the token attends every slot of an owner is live, so no mask is needed; a row that dies leaves the slot that the
owner's next row takes, and nothing published is overwritten. All layers are decided at once after the last one.
`RaggedSegmentStep` with the same families is the oracle.

Letters: B batch rows, S stored heads, G query heads of one, O owners of one layer (b * S + s), R owners of one length,
T query tokens, n rows of one owner, N rows, F columns ever fed, P slots of all owners.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...contract import Phase, Transaction
from ...evidence import reduce_group
from ...frame import LayerStep
from ...masks import MaskRecord
from ...storage import RaggedLayer, RaggedMap
from ..inputs import ForwardInputs
from ..snapshot import Frontier, Snapshot
from .attend_one import attend_one
from .layers import RaggedForward
from .replace_rows import NewRows, OwnerKind, OwnerLimits, Replaced, replace_rows

if TYPE_CHECKING:
    from ..runtime import Runtime

__all__ = ["RaggedDecodeStep"]


class RaggedDecodeStep(RaggedForward):
    """Scored retention of one new row per batch row, by the family of each owner."""

    def __init__(
        self,
        runtime: Runtime,
        snapshot: Snapshot,
        inputs: ForwardInputs,
        transaction: Transaction,
        budget: tuple[int, ...],
    ) -> None:
        super().__init__(runtime, snapshot, inputs, transaction)
        self.budget_rows = budget
        # Per layer, of every owner's first n + 1 slots, in parts: attention over its query heads, and what was seen.
        self._received: dict[int, list[Tensor]] = {}
        self._seen: dict[int, Tensor | None] = {}
        # A mean is a sum until it is divided, once, after the last layer.
        self._means = runtime.composition.group == "mean"

    def append(self, layer: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new row of every owner into its spare slot."""
        base, rows = self.base(layer), self.snapshot.ragged[layer].rows
        keys, values = self.stored(keys_BHTD), self.stored(values_BHTD)
        needed = [length + 1 for length in base.lengths]
        if all(slots <= room for slots, room in zip(needed, rows.capacities, strict=True)):
            rows.write_at(self._next_slots[layer], keys, values)
        else:
            used = [min(slots, room) for slots, room in zip(needed, rows.capacities, strict=True)]
            rows = rows.grown(used, needed)
            rows.write(base.next_slots_O, 0, keys, values)
        self.buffers[layer] = rows
        return keys_BHTD, values_BHTD

    def attend_history(
        self, backend: str, module: torch.nn.Module, query: Tensor, step: LayerStep, record: MaskRecord, kwargs: Any
    ) -> Tensor:
        """Attend over every owner's own rows; output and evidence share one softmax. [B, 1, Q, D]."""
        base = self.base(step.layer)
        view, shown = self.buffers[step.layer].view(base, 1), self._shown(base, record)
        masks: list[Tensor | None] | None = None if shown is None else [mask[None] for mask in shown]
        masks = self._masks(record).biased(base, masks)
        dropout = kwargs.get("dropout", 0.0)
        output, parts = attend_one(query, view, masks, self.scaling, self.weighting, dropout=dropout)
        how = "sum" if self._means else self.runtime.composition.group
        self._received[step.layer] = [reduce_group(part.detach()[None], how).flatten() for part in parts]
        self._seen[step.layer] = None if shown is None else torch.cat(shown)
        return output

    def attended(self, layer: int, query_BQTD: Tensor, step: LayerStep, record: MaskRecord, scaling: float) -> None:
        """Nothing is packed: the row already lies in its slot."""
        self.note_view(layer)
        if self.is_new_buffer(layer):
            self.note_transient(0)
        self.transaction.enter_through(layer, Phase.PACK)

    def successor(self) -> Snapshot:
        """Return the snapshot in which every owner has taken the new row and dropped at most one."""
        layers, frontier, old = range(self.runtime.geometry.num_layers), self.inputs.frontier_after, self.snapshot
        self.note_transient(self._received_bytes())
        replaced = self._replaced()
        # A batch row whose first token comes in decode holds a prompt of one token.
        profiled = zip(old.profile_tokens, frontier.tokens, strict=True)
        return replace(
            old,
            generations=self.transaction.successor,
            frontier=frontier,
            ragged=tuple(RaggedLayer(rows=self.buffers[i], map=replaced.maps[i]) for i in layers),
            profile_tokens=tuple(tokens or min(1, now) for tokens, now in profiled),
            budget_rows=self.budget_rows,
            last_was_segment=False,
            decision_epoch=old.decision_epoch + 1,
            evicted_at_column=frontier.columns if replaced.drops_rows else old.evicted_at_column,
        )

    @cached_property
    def _next_slots(self) -> list[Tensor]:
        """Which slots of its buffers each layer's new rows fill, int64 [O]."""
        rows, maps = zip(
            *((layer.rows.starts_O, layer.map.next_slots_O) for layer in self.snapshot.ragged), strict=True
        )
        if len({part.device for part in (*rows, *maps)}) > 1:
            return [(starts + slots.to(starts.device)).long() for starts, slots in zip(rows, maps, strict=True)]
        # All layers at once: one small sum instead of one per layer.
        return list(torch.split((torch.cat(rows) + torch.cat(maps)).long(), [part.shape[0] for part in maps]))

    def _shown(self, base: RaggedMap, record: MaskRecord) -> list[Tensor] | None:
        """Return per owner which of its first n + 1 slots the query sees, bool [n + 1]; None where it sees all."""
        masks = self._masks(record).masks(base)
        if masks is None:
            return None
        slots, found = torch.split(base.slots(), list(base.lengths)), []
        for owner, mask in enumerate(masks):
            # A token sees itself; a pad too, so that its output is finite.
            shown = torch.ones(base.lengths[owner] + 1, dtype=torch.bool, device=base.device)
            if mask is not None:
                shown[slots[owner]] = mask[0, :-1]
            found.append(shown)
        return found

    def _replaced(self) -> Replaced:
        policy, old, layers = self.runtime.composition, self.snapshot, self.runtime.geometry.num_layers
        rule, frontier, device = policy.families, self.inputs.frontier_after, old.device
        assert rule is not None, "this step runs policies with families"
        assert frontier.kinds_BF is not None, "families know the tokens of every column"
        rows = [row for row in range(old.batch_size) for _ in range(self.heads)]
        owners = [owner for layer in old.families_LO for owner in zip(layer, rows, strict=True)]
        kinds = {
            (family, row): OwnerKind(
                terms=rule.terms(family, old.profile_tokens[row], frontier.tokens[row]),
                row=row,
                most_rows=self.budget_rows[row],
                brings=self.inputs.new_tokens[row] > 0,
            )
            for family, row in dict.fromkeys(owners)
        }
        places = {kind: place for place, kind in enumerate(kinds)}
        new = self.new_map()
        parts = [part.to(device) for i in range(layers) for part in self._received[i]]
        return replace_rows(
            [self.base(i) for i in range(layers)],
            NewRows(
                columns_B=new.columns_BMW[:, 0, 0],
                tokens_B=new.tokens_BMW[:, 0, 0],
                tokens_BF=_token_positions(frontier).to(device),
                kinds_BF=frontier.kinds_BF.to(device),
                received_P=torch.cat(parts).div_(self._divisor()),
                seen_P=self._seen_everywhere(device),
            ),
            OwnerLimits.of([*kinds.values()], [places[owner] for owner in owners], device),
            sinks=policy.sinks,
            protect=policy.protect,
        )

    def _divisor(self) -> int:
        """Return what sums over a group are divided by."""
        return self.runtime.geometry.num_query_heads // self.heads if self._means else 1

    def _received_bytes(self) -> int:
        """Return what the attention of all layers takes: fp32, a number a slot."""
        slots = sum(sum(self.base(layer).lengths) + len(self.base(layer).lengths) for layer in self._received)
        return 4 * slots

    def _seen_everywhere(self, device: torch.device) -> Tensor | None:
        """Return which slots of all layers were seen; None where all were."""
        if all(part is None for part in self._seen.values()):
            return None
        found = []
        for layer, parts in sorted(self._received.items()):
            seen = self._seen[layer]
            found += [torch.ones(part.shape, dtype=torch.bool) for part in parts] if seen is None else [seen]
        return torch.cat([part.to(device) for part in found])


def _token_positions(frontier: Frontier) -> Tensor:
    """Return the token position of every column, int32 [B, F]; of a pad that of the token before it."""
    seen, kinds = frontier.seen_BF, frontier.kinds_BF
    assert kinds is not None, "families know the tokens of every column"
    if seen is None:
        return torch.arange(frontier.columns, dtype=torch.int32, device=kinds.device).expand(kinds.shape)
    return seen.cumsum(-1, dtype=torch.int32) - 1
