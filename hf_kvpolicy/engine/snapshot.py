"""What is published: one immutable record that every reader follows.

Letters: L layers, B batch rows, S stored heads, M map heads, W slots in use, D head dimension, X state channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..contract import Generations, producers_of_pairs
from ..storage import DenseRows, RaggedLayer, RaggedMap, RaggedRows, RowMap, owners_of
from .foreign import ForeignLayers, selected_layers
from .frontier import Frontier
from .open_segment import OpenSegment
from .placement import Moves, Placement

if TYPE_CHECKING:
    from ..storage.merged import MergedPair
    from ..storage.trailing import PendingTokens

__all__ = ["Frontier", "OpenSegment", "Snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """Everything a reader may see.

    Slots of a layer's buffers: first the slots of its map, then the slots of the tail. A cache is dense (`rows`,
    `maps`) or ragged (`ragged`); the tail is the same for both, since appended rows are the same for every owner. Of a
    dense cache, pairs of layers may have one store (`pairs`); `rows` are then those of the other layers.
    """

    generations: Generations
    frontier: Frontier
    rows: tuple[DenseRows, ...] = ()
    # One map for all layers, or one per layer.
    maps: tuple[RowMap, ...] = ()
    # Ragged storage instead: per layer its buffers and the rows each owner held when the tail began.
    ragged: tuple[RaggedLayer, ...] = ()
    # Stores of two layers each, ascending.
    pairs: tuple[MergedPair, ...] = ()
    # The layer whose rows each layer reads, where some layers store none; `rows` are then those of the layers that do.
    producers: tuple[int, ...] = ()
    # Tokens of each layer that wait for acceptance before they are merged.
    pending: tuple[PendingTokens, ...] = ()
    # Rows appended since the last selection, the same for every layer and head.
    tail: RowMap | None = None
    # Dense storage: live rows of each owner, per batch row (equal for all owners of a batch row).
    counts: tuple[int, ...] = ()
    # Rows among them that were appended after the last selection; where tokens are merged, segments that still grow.
    tail_counts: tuple[int, ...] = ()
    budget_rows: tuple[int, ...] | None = None
    # States that rows carry, [L, B, S, W, X], over all slots of dense rows; of an answer that is chosen from block by
    # block, over each batch row's undecided rows, oldest first, S = 1. None for evidence without any.
    scores_LBSWX: Tensor | None = None
    # The family of each owner, [L][O] (`allocation/families.py`), and per batch row how many tokens it had when its
    # heads were profiled, or the thresholds of merging were fixed (0: never); none for policies that do neither.
    families_LO: tuple[tuple[int, ...], ...] = ()
    profile_tokens: tuple[int, ...] = ()
    # Real tokens of each batch row when its last prompt segment ended: the clock of decode starts there.
    segment_tokens: tuple[int, ...] = ()
    # How many of its first tokens each batch row has decided on, once decode decided on a block.
    settled_tokens: tuple[int, ...] = ()
    open_segment: OpenSegment | None = None
    last_was_segment: bool = False
    decision_epoch: int = 0
    # Columns fed when rows were last dropped; nothing before it can be rolled back.
    evicted_at_column: int = 0
    # Where parts that were offloaded belong; None while nothing is away.
    home: Placement | None = None
    # Cache layers of transformers that hold the layers no policy acts on (`engine/foreign.py`).
    foreign: ForeignLayers = ()

    @property
    def batch_size(self) -> int:
        """Batch rows, 0 before the first forward."""
        return len(self.frontier.tokens)

    @property
    def settled(self) -> tuple[int, ...]:
        """How many of its first tokens each batch row has decided on: a prompt settles all, decode whole blocks."""
        pairs = zip(self.settled_tokens or self.segment_tokens, self.segment_tokens, strict=True)
        return tuple(max(pair) for pair in pairs)

    @property
    def undecided_tokens(self) -> tuple[int, ...]:
        """Decode tokens of each batch row behind these."""
        return tuple(tokens - settled for tokens, settled in zip(self.frontier.tokens, self.settled, strict=True))

    @property
    def brought(self) -> tuple[bool, ...]:
        """Whether each batch row has a real token in the open segment; all have where none is open."""
        segment, seen = self.open_segment, self.frontier.seen_BF
        if segment is None or seen is None:
            return (True,) * self.batch_size
        return tuple(seen[:, segment.start_column :].any(dim=1).tolist())

    def ended(self, tokens: Sequence[int], brought: Sequence[bool]) -> tuple[int, ...]:
        """Return `segment_tokens` after a segment that ends at so many tokens; who brought none did not take part."""
        before = self.segment_tokens or (0,) * len(tokens)
        return tuple(now if own else old for now, old, own in zip(tokens, before, brought, strict=True))

    def scores_without(self, settled: Sequence[bool]) -> Tensor | None:
        """Return the scores of undecided rows once a segment has settled the answers of some batch rows."""
        scores = self.scores_LBSWX
        if scores is None or all(settled):
            return None
        mask_B = torch.tensor(list(settled), device=scores.device)
        return scores.masked_fill(mask_B.view(1, -1, 1, 1, 1), 0.0)

    def storing(self, layers: int) -> Sequence[int]:
        """Return those of so many layers that store rows."""
        return sorted(set(self.producers)) or range(layers)

    @property
    def stores(self) -> tuple[tuple[int, ...], ...]:
        """The layers behind each of `buffers`: one, or the two of a pair."""
        if self.producers:
            return tuple((layer,) for layer in self.storing(0))
        layers = len(self.rows) + len(self.ragged) + 2 * len(self.pairs)
        return producers_of_pairs(layers, [pair.layers for pair in self.pairs])

    @property
    def buffers(self) -> tuple[DenseRows | RaggedRows | MergedPair, ...]:
        """The K/V buffers of all layers, in order of depth; none before the first publication."""
        if not self.pairs:
            return self.rows or tuple(layer.rows for layer in self.ragged)
        alone, paired = iter(self.rows), iter(self.pairs)
        return tuple(next(alone) if len(layers) == 1 else next(paired) for layers in self.stores)

    def each_buffer(self, act: Callable[[Any, int], Any]) -> Snapshot:
        """Return the snapshot over what an action makes of its buffers (of a pair's parts) and the store they are."""
        return self._with_buffers(
            [
                act(rows, store) if isinstance(rows, DenseRows | RaggedRows) else rows.each(partial(_at, act, store))
                for store, rows in enumerate(self.buffers)
            ]
        )

    def _with_buffers(self, buffers: Sequence[DenseRows | RaggedRows | MergedPair]) -> Snapshot:
        """Return the snapshot over other buffers that hold the same rows in the same slots."""
        return replace(
            self,
            rows=tuple(rows for rows in buffers if isinstance(rows, DenseRows)),
            pairs=tuple(rows for rows in buffers if not isinstance(rows, DenseRows | RaggedRows)),
            ragged=tuple(
                replace(layer, rows=rows)
                for rows, layer in zip(buffers, self.ragged, strict=False)
                if isinstance(rows, RaggedRows)
            ),
        )

    @property
    def layout(self) -> tuple[RowMap, ...] | tuple[RaggedMap, ...]:
        """The maps of all layers' first slots."""
        return self.maps or tuple(layer.map for layer in self.ragged)

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of stored keys; None before the first publication."""
        if self.pairs:
            return self.pairs[0].keys.shared_BHCD.dtype
        return self.rows[0].keys_BSCD.dtype if self.rows else self.ragged[0].rows.keys_ND.dtype if self.ragged else None

    @property
    def device(self) -> torch.device:
        """Where maps and frontier lie."""
        return self.maps[0].live_BMW.device if self.maps else self.ragged[0].map.device

    @property
    def tail_width(self) -> int:
        """Slots of the tail."""
        return self.tail.width if self.tail is not None else 0

    def view(self, layer: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return one layer's keys and values: slots in use [B, S, W, D] (restored, of a pair), or flat slots [N, D]."""
        if self.ragged:
            return self.ragged[layer].rows.flat()
        if not self.buffers:
            return None, None
        if self.producers:
            return self.rows[self.storing(0).index(self.producers[layer])].view(self.width)
        return self.opened(layer, self.width).view(self.width)

    def rows_of(self, layer: int) -> DenseRows | None:
        """Return the dense buffers of a layer by itself; None of a layer that shares a store, and before any."""
        if not self.pairs:
            return self.rows[layer] if self.rows else None
        below = [paired for pair in self.pairs for paired in pair.layers if paired <= layer]
        return None if layer in below else self.rows[layer - len(below)]

    def opened(
        self, layer: int, needed: int, limit: int | None = None, *, device: torch.device | None = None
    ) -> DenseRows:
        """Return a layer's buffers with room for so many slots; of a pair, a copy of what it restores.

        `limit` is the most slots there will ever be. A pair lies with its deeper layer, its copy on the `device` given.
        """
        own = self.rows_of(layer)
        if own is not None:
            return own.grown(self.width, needed, limit=limit)
        pair = next(pair for pair in self.pairs if layer in pair.layers)
        keys, values = pair.restored(layer, self.width, needed - self.width)
        return DenseRows(keys_BSCD=keys.to(device), values_BSCD=values.to(device))

    def owner_rows(self, layer: int, heads: int) -> list[list[int]]:
        """Return the live rows of one layer's owners, [B][S]."""
        if not self.ragged:
            stores = not self.producers or layer in self.producers
            return [[count if stores else 0] * heads for count in self.counts]
        lengths, tails = self.ragged[layer].map.lengths, self.tail_counts
        return [[rows + tail for rows in lengths[b * heads : (b + 1) * heads]] for b, tail in enumerate(tails)]

    def total_rows(self, layers: int, heads: int) -> int:
        """Return the live rows of all owners."""
        if not self.ragged:
            return sum(self.counts) * len(self.storing(layers)) * heads
        return sum(sum(layer.map.lengths) for layer in self.ragged) + sum(self.tail_counts) * layers * heads

    def without_dead_exceptions(self) -> Snapshot:
        """Return the snapshot whose pairs keep nothing of rows that died in their slots."""
        if not self.pairs:
            return self
        return replace(self, pairs=tuple(pair.living(self.full_map(pair.layers[0]).live_BMW) for pair in self.pairs))

    @property
    def holds_codes(self) -> bool:
        """Whether rows of a layer are coded in few bits."""
        return any(rows.coded_slots for rows in self.rows) or any(layer.rows.coded_slots for layer in self.ragged)

    def payload_bytes(self, layers: int, heads: int) -> int:
        """Return the bytes of live rows; of a pair's, with all that restores them in both layers."""
        if not self.buffers:
            return 0
        if self.holds_codes:
            from .coded import payload_bytes  # not imported where rows stay as they are

            return payload_bytes(self, heads)
        if self.ragged:
            return sum(layer.payload_bytes(sum(self.tail_counts) * heads) for layer in self.ragged)
        alone = layers - 2 * len(self.pairs)
        own_bytes = self.total_rows(alone, heads) * self.buffers[0].row_bytes
        live = [self.full_map(pair.layers[0]).live_BMW for pair in self.pairs]
        return own_bytes + sum(pair.payload_bytes(flags) for pair, flags in zip(self.pairs, live, strict=True))

    @property
    def width(self) -> int:
        """Dense storage: slots in use per owner, map plus tail (the same for every layer)."""
        return (self.maps[0].width if self.maps else 0) + self.tail_width

    def packed(self) -> Snapshot:
        """Return the snapshot without dead slots among its ragged rows (copied where there are any)."""
        if not any(layer.map.is_open for layer in self.ragged):
            return self
        return replace(self, ragged=tuple(layer.packed() for layer in self.ragged))

    def map_of(self, layer: int) -> RowMap:
        """Return the map of a layer's first slots."""
        return self.maps[layer] if len(self.maps) > 1 else self.maps[0]

    def full_map(self, layer: int) -> RowMap:
        """Return the map of all of a layer's slots."""
        base = self.map_of(layer)
        return base if self.tail is None else base.then(self.tail)

    @property
    def placement(self) -> Placement:
        """Where the parts of a snapshot that holds rows lie."""
        maps = tuple(part.device for part in self.layout)
        pairs = zip(self.stores, self.buffers, strict=True)
        devices = {layer: rows.device for layers, rows in pairs for layer in layers}
        read = self.producers or range(len(devices))
        return Placement(layers=tuple(devices[layer] for layer in read), maps=maps, shared=maps[0])

    def to(self, place: Placement, move: Moves) -> Snapshot:
        """Return the snapshot with every part on the device given for it; a part that lies there is not copied."""
        shared, segment = place.shared, self.open_segment
        # A pair moves with its deeper layer.
        devices = [place.layers[layers[-1]] for layers in self.stores]
        moved = self.each_buffer(lambda rows, store: move(rows, devices[store]))
        return replace(
            moved,
            frontier=self.frontier.to(shared, move),
            pending=tuple(move(rows, device) for rows, device in zip(self.pending, place.layers, strict=False)),
            maps=tuple(move(part, device) for part, device in zip(self.maps, place.maps, strict=not self.ragged)),
            ragged=tuple(
                replace(
                    layer,
                    map=move(layer.map, at),
                    trailing=None if layer.trailing is None else move(layer.trailing, layer.rows.device),
                )
                for layer, at in zip(moved.ragged, place.maps, strict=False)
            ),
            tail=None if self.tail is None else move(self.tail, shared),
            scores_LBSWX=None if self.scores_LBSWX is None else move(self.scores_LBSWX, shared),
            open_segment=None if segment is None else segment.to(place, move),
        )

    def offloaded(self, layer: int | None, device: torch.device, move: Moves) -> Snapshot:
        """Return the snapshot with a layer (all for None) on a device, and what layers share once all are there."""
        if not self.buffers:
            return self
        here = there = self.placement
        for part in self._moves_with(layer):
            there = there.without(part, device)
        home = self.home or here
        return replace(self.to(there, move), home=None if there == home else home)

    def brought_back(self, layer: int | None, move: Moves) -> Snapshot:
        """Return the snapshot with a layer (all for None), and what layers share, where it was before."""
        if self.home is None:
            return self
        there = self.placement
        for part in self._moves_with(layer):
            there = there.back(part, self.home)
        return replace(self.to(there, move), home=None if there == self.home else self.home)

    def _moves_with(self, layer: int | None) -> tuple[int | None, ...]:
        """Return what moves with a layer: nothing with one without a store, or a pair's lower one; else all readers."""
        if self.producers and layer is not None:
            return tuple(reader for reader, producer in enumerate(self.producers) if producer == layer)
        for pair in self.pairs:
            if layer in pair.layers:
                return pair.layers if layer == pair.layers[1] else ()
        return (layer,)

    def batch(self, index: Sequence[int]) -> Snapshot:
        """Return the snapshot with its batch rows selected, repeated or reordered; buffers are copied."""
        if not self.buffers:
            return self
        indices: dict[torch.device, Tensor] = {}

        def on(device: torch.device) -> Tensor:
            if device not in indices:
                indices[device] = torch.tensor(list(index), dtype=torch.int64, device=device)
            return indices[device]

        segment = self.open_segment
        return replace(
            self,
            frontier=self.frontier.batch(index, on(self.device)),
            rows=tuple(rows.batch(on(rows.keys_BSCD.device)) for rows in self.rows),
            maps=tuple(part.batch(on(part.live_BMW.device)) for part in self.maps),
            ragged=tuple(layer.batch(index) for layer in self.ragged),
            pairs=tuple(pair.batch(index) for pair in self.pairs),
            pending=tuple(rows.batch(on(rows.device)) for rows in self.pending),
            tail=None if self.tail is None else self.tail.batch(on(self.tail.live_BMW.device)),
            counts=tuple(self.counts[i] for i in index) if self.counts else (),
            tail_counts=tuple(self.tail_counts[i] for i in index),
            budget_rows=None if self.budget_rows is None else tuple(self.budget_rows[i] for i in index),
            scores_LBSWX=None
            if self.scores_LBSWX is None
            else self.scores_LBSWX.index_select(1, on(self.scores_LBSWX.device)),
            families_LO=tuple(
                tuple(layer[o] for o in owners_of(index, len(layer) // self.batch_size)) for layer in self.families_LO
            ),
            profile_tokens=tuple(self.profile_tokens[i] for i in index) if self.profile_tokens else (),
            segment_tokens=tuple(self.segment_tokens[i] for i in index) if self.segment_tokens else (),
            settled_tokens=tuple(self.settled_tokens[i] for i in index) if self.settled_tokens else (),
            open_segment=None if segment is None else segment.batch(on(self.device)),
            foreign=selected_layers(self.foreign, on(self.device)),
        )


def _at(act: Callable[[Any, int], Any], store: int, part: Any) -> Any:
    return act(part, store)
