"""One decode token over heads with policies of their own: a spare slot is filled, at most one row of each owner dies.

While the token attends every slot of an owner is live, so no mask is needed; a row that dies leaves the slot that the
owner's next row takes, and nothing published is overwritten. All layers are decided at once after the last one.
`RaggedSegmentStep` with the same families is the oracle.

Letters: B batch rows, S stored heads, G query heads of one, O owners of one layer (b * S + s), T query tokens, n rows
of one owner, N rows, P slots of all owners.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...contract import Phase, Transaction
from ...evidence import reduce_group
from ...frame import LayerStep
from ...masks import MaskRecord
from ...storage import RaggedLayer, RaggedMap, stored_tensors
from ..decide import tensor_bytes
from ..inputs import ForwardInputs
from ..snapshot import Snapshot
from .attend_one import attend_one
from .layers import RaggedForward
from .replace_rows import NewRows, OwnerLimits, Replaced, replace_rows

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
        # Per layer, of every owner's first n + 1 slots: attention by query head [G, ...], and (as rows ascend) which
        # rows were seen.
        self._received: dict[int, Tensor] = {}
        self._seen: dict[int, Tensor | None] = {}

    def append(self, layer: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new row of every owner into its spare slot."""
        base, rows = self.base(layer), self.snapshot.ragged[layer].rows
        needed = [length + 1 for length in base.lengths]
        used = [min(slots, room) for slots, room in zip(needed, rows.capacities, strict=True)]
        rows = rows.grown(used, needed)
        rows.write(base.next_slots_O.to(rows.starts_O.device), 0, self.stored(keys_BHTD), self.stored(values_BHTD))
        self.buffers[layer] = rows
        return keys_BHTD, values_BHTD

    def attend_history(
        self, backend: str, module: torch.nn.Module, query: Tensor, step: LayerStep, record: MaskRecord, kwargs: Any
    ) -> Tensor:
        """Attend over every owner's own rows; output and evidence share one softmax. [B, 1, Q, D]."""
        base = self.base(step.layer)
        shown = self._shown(base, record)
        view, masks = self.buffers[step.layer].view(base, 1), None if shown is None else _by_slot(shown, base)
        output, parts = attend_one(query, view, masks, self.scaling, self.weighting)
        with stored_tensors():
            self._received[step.layer] = torch.cat([_by_query_head(part.detach()) for part in parts], dim=1)
            self._seen[step.layer] = None if shown is None else torch.cat(shown)
        return output

    def attended(self, layer: int, query_BQTD: Tensor, step: LayerStep, record: MaskRecord, scaling: float) -> None:
        """Nothing is packed: the row already lies in its slot."""
        if self.is_new_buffer(layer):
            self.note_transient(0)
        self.transaction.enter_through(layer, Phase.PACK)

    def successor(self) -> Snapshot:
        """Return the snapshot in which every owner has taken the new row and dropped at most one."""
        layers, frontier, old = range(self.runtime.geometry.num_layers), self.inputs.frontier_after, self.snapshot
        self.note_transient(tensor_bytes(*self._received.values()))
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

    def _shown(self, base: RaggedMap, record: MaskRecord) -> list[Tensor] | None:
        """Return per owner which of its rows, the new one last, the query sees, bool [n + 1]; None where all do."""
        masks = self._masks(record).masks(base)
        if masks is None:
            return None
        device = base.columns_N.device
        found = []
        for mask, rows in zip(masks, base.lengths, strict=True):
            seen = torch.ones(rows + 1, dtype=torch.bool, device=device) if mask is None else mask[0].clone()
            # A token sees itself; a pad too, so that its output is finite.
            seen[-1] = True
            found.append(seen)
        return found

    def _replaced(self) -> Replaced:
        policy, old, layers = self.runtime.composition, self.snapshot, self.runtime.geometry.num_layers
        rule, frontier, device = policy.families, self.inputs.frontier_after, old.device
        assert rule is not None, "this step runs policies with families"
        assert frontier.kinds_BF is not None, "families know the tokens of every column"
        owners = [(family, owner // self.heads) for layer in old.families_LO for owner, family in enumerate(layer)]
        terms = {
            (family, row): rule.terms(family, old.profile_tokens[row], frontier.tokens[row])
            for family, row in set(owners)
        }
        limits = [(terms[f, row], self.budget_rows[row], self.inputs.new_tokens[row] > 0) for f, row in owners]
        new = self.new_map()
        received_GP = torch.cat([self._received[i].to(device) for i in range(layers)], dim=1)
        # Query heads of a group lie on axis 2; once for all layers, because a call costs more than its sums.
        received_P = reduce_group(received_GP[None, None], policy.group)[0, 0]
        seen = [self._seen[i] for i in range(layers)]
        return replace_rows(
            [self.base(i) for i in range(layers)],
            NewRows(
                columns_B=new.columns_BMW[:, 0, 0],
                tokens_B=new.tokens_BMW[:, 0, 0],
                kinds_BF=frontier.kinds_BF.to(device),
                received_P=received_P,
                seen_P=_seen_everywhere(seen, [self._received[i].shape[1] for i in range(layers)], device),
            ),
            OwnerLimits.of(limits, device),
            sinks=policy.sinks,
            protect=policy.protect,
        )


def _by_query_head(attention_BSG1N: Tensor) -> Tensor:
    """Return attention as [G, B * S * N], owner after owner."""
    return attention_BSG1N.flatten(0, 1).squeeze(2).transpose(0, 1).flatten(1)


def _by_slot(shown: list[Tensor], base: RaggedMap) -> list[Tensor | None]:
    """Return masks [1, n + 1] in slot order: rows ascend in the map, but lie anywhere in their slots."""
    slots, spare, found = torch.split(base.slots(), list(base.lengths)), base.next_slots_O, list[Tensor | None]()
    for owner, seen in enumerate(shown):
        mask = torch.empty_like(seen)
        mask[slots[owner]], mask[spare[owner]] = seen[:-1], seen[-1]
        found.append(mask[None])
    return found


def _seen_everywhere(seen: list[Tensor | None], slots: list[int], device: torch.device) -> Tensor | None:
    """Return which rows were seen in all layers; a layer without a mask saw all of its `slots`."""
    if all(part is None for part in seen):
        return None
    pairs = zip(seen, slots, strict=True)
    return torch.cat([torch.ones(n, dtype=torch.bool, device=device) if s is None else s.to(device) for s, n in pairs])
