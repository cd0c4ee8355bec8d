"""What ragged forwards share: appended rows behind every owner's own, attention over both, candidates.

Letters: B batch rows, S stored heads, O owners, T new tokens, N flat slots, n rows of one owner, D head dimension.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...backends import MASK_BLOCK_ELEMENTS
from ...frame import LayerStep
from ...masks import MaskRecord
from ...ragged_attention import admit_ragged, attend_ragged
from ...storage import RaggedMap, RaggedRows, RowMap, growth_slots
from ..step import Step
from .attend_one import attend_one
from .owners import LiveTail, OwnerCandidates
from .visibility import RaggedVisibility

__all__ = ["RaggedForward"]


class RaggedForward(Step):
    """A forward over ragged storage; combined with the kind of forward it is."""

    @cached_property
    def buffers(self) -> dict[int, RaggedRows]:
        """Buffers that hold this forward's rows, by layer."""
        return {}

    @property
    def heads(self) -> int:
        """Stored heads of a batch row."""
        return self.runtime.composition.stored_heads(self.runtime.geometry)

    @cached_property
    def new_counts(self) -> tuple[int, ...]:
        """Live rows among this forward's own, per batch row."""
        return self.inputs.new_tokens

    @cached_property
    def tail_after(self) -> RowMap:
        """Every appended row, this forward's own last."""
        old = self.snapshot.tail
        return self.new_map() if old is None else old.then(self.new_map())

    @cached_property
    def live_tail(self) -> LiveTail:
        """The live rows among them."""
        return LiveTail(self.tail_after)

    @cached_property
    def candidates_LO(self) -> list[list[int]]:
        """Rows that each layer's owners hold, published and new."""
        tails = self.snapshot.tail_counts or (0,) * self.inputs.batch
        new = [a + b for a, b in zip(tails, self.inputs.new_tokens, strict=True) for _ in range(self.heads)]
        layers = range(self.runtime.geometry.num_layers)
        return [[a + b for a, b in zip(self.base(layer).lengths, new, strict=True)] for layer in layers]

    @property
    def candidate_rows(self) -> int:
        """Rows of all owners, published and new."""
        return sum(map(sum, self.candidates_LO))

    def base(self, layer: int) -> RaggedMap:
        """Return the rows a layer's owners held when the tail began."""
        return self.snapshot.ragged[layer].map if self.snapshot.ragged else self._nothing[layer]

    def place(self, layer: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> RaggedRows:
        """Write a layer's new rows behind its owners' published ones; no live slot is touched."""
        keys, values = self.stored(keys_BHTD), self.stored(values_BHTD)
        base, before, length = self.base(layer), self.snapshot.tail_width, keys.shape[2]
        if self.snapshot.ragged:
            used = [rows + before for rows in base.lengths]
            rows = self.snapshot.ragged[layer].rows.grown(used, [slots + length for slots in used])
        else:
            rows = RaggedRows.allocate(keys, values, [growth_slots(length)] * len(base.lengths), self.heads)
        rows.write(base.lengths_O, before, keys, values)
        self.buffers[layer] = rows
        return rows

    def narrow(self, table: RowMap, counts: tuple[int, ...]) -> None:
        """Go on with fewer rows of this forward's own, the same for every layer from now on."""
        self._new_map, self._columns, self.new_counts = table, table.columns_BMW[:, 0].long(), counts
        batch, heads, _, dim = self._expected
        self._expected = (batch, heads, table.width, dim)
        self._records.clear()
        for derived in ("tail_after", "live_tail"):
            self.__dict__.pop(derived, None)

    def is_new_buffer(self, layer: int) -> bool:
        """Whether a layer's buffers were made by this forward."""
        published = self.runtime.snapshot.ragged
        return not published or self.buffers[layer] is not published[layer].rows

    def fresh_buffers(self) -> list[Tensor]:
        """Return the tensors of buffers that this forward made."""
        return [t for layer, rows in self.buffers.items() for t in self.made(layer, rows)]

    def made(self, layer: int, rows: RaggedRows) -> list[Tensor]:
        """Return the tensors of a layer's buffers that are not published: blocks of coded rows may be shared."""
        published = self.runtime.snapshot.ragged
        if not published or (rows is not published[layer].rows and not rows.coded_slots):
            return list(rows.tensors())
        old = {id(tensor) for tensor in published[layer].rows.tensors()}
        return [tensor for tensor in rows.tensors() if id(tensor) not in old]

    def note_view(self, layer: int) -> None:
        """As `note_transient`, of what a layer's attention read where that was made for it."""
        rows = self.buffers[layer]
        if rows.coded_slots:
            behind = self.tail_after.width
            self.note_transient(sum(length + behind for length in self.base(layer).lengths) * rows.row_bytes)

    def admit(self, backend: str) -> None:
        """Refuse a backend that could not read what this forward will store, before anything is stored."""
        admit_ragged(backend)

    def attend_history(
        self, backend: str, module: torch.nn.Module, query: Tensor, step: LayerStep, record: MaskRecord, kwargs: Any
    ) -> Tensor:
        """Attend over every owner's own rows. [B, T, Q, D]."""
        base = self.base(step.layer)
        view = self.buffers[step.layer].view(base, self.tail_after.width)
        visibility = self._masks(record)
        masks = visibility.masks(base)
        dropout = kwargs.get("dropout", 0.0)
        if self.inputs.length == 1 and self.runtime.composition.carries_scores:
            # The arithmetic of a decode step, so that a token that waits for acceptance is the one that decodes.
            shown = visibility.biased(base, masks)
            return attend_one(query, view, shown, self.scaling, self.weighting, dropout=dropout)[0]
        options = {"scaling": self.scaling, "dropout": dropout, "weighting": self.weighting}
        width = query.shape[2]
        if self.alibi is not None:
            width = max(1, MASK_BLOCK_ELEMENTS // (query.shape[0] * query.shape[1] * max(view.lengths)))
        parts = []
        for start in range(0, query.shape[2], width):
            part = slice(start, start + width)
            shown = visibility.biased(base, masks, part)
            parts.append(attend_ragged(backend, query[:, :, part], view, shown, **options))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def candidates(self, layer: int, step: LayerStep | None = None) -> OwnerCandidates:
        """Return the rows of one layer among which is chosen; a first prompt's are those of its step."""
        base, width = self.base(layer), self.live_tail.width
        stored: RaggedRows | None = None
        if not self.snapshot.frontier.columns:
            # A first prompt competes where the model made it; it was never copied into slots.
            assert step is not None
            keys, values, heads = step.keys.detach(), step.values.detach(), self.heads
            group = heads // keys.shape[1]

            def slots(owner: int) -> tuple[Tensor, Tensor]:
                row, head = owner // heads, owner % heads // group
                return keys[row, head], values[row, head]

        else:
            rows = stored = self.buffers[layer]

            def slots(owner: int) -> tuple[Tensor, Tensor]:
                return rows.owner(owner, base.lengths[owner] + width)

        return OwnerCandidates(slots=slots, base=base, tail=self.live_tail, stored=stored)

    def nothing(self) -> RaggedMap:
        """Return a map in which no owner holds a row."""
        return RaggedMap.empty(self.inputs.batch, self.heads, self.inputs.device)

    @cached_property
    def _nothing(self) -> list[RaggedMap]:
        # One for each layer, so that bytes are charged to the layer they belong to.
        layers, inputs = range(self.runtime.geometry.num_layers), self.inputs
        return [RaggedMap.empty(inputs.batch, self.heads, inputs.device) for _ in layers]

    @cached_property
    def _records(self) -> dict[int, RaggedVisibility]:
        return {}

    def _masks(self, record: MaskRecord) -> RaggedVisibility:
        found = self._records.get(id(record))
        if found is None:
            tails = self.snapshot.tail_counts or (0,) * self.inputs.batch
            live = [a + b for a, b in zip(tails, self.new_counts, strict=True)]
            found = self._records[id(record)] = RaggedVisibility(
                record,
                self.tail_after,
                self.query_columns(),
                columns_after=self.inputs.frontier_after.columns,
                changed_mask_BF=self.inputs.changed_mask_BF,
                is_full=all(count == self.tail_after.width for count in live),
                alibi=self.alibi,
            )
        return found
