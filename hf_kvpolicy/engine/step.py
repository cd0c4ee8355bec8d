"""What the three kinds of forward share: candidate rows, attention over them, masks, accounting.

Letters: B batch rows, H KV heads, S stored heads, Q query heads, T new tokens, N attended rows, D head dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..backends import MASK_BLOCK_ELEMENTS, attend_view, refuse_unhandled, run_stock
from ..contract import Phase, Transaction
from ..errors import ConfigError, IntegrityError
from ..evidence import CarriedEvidence
from ..frame import KeptTokens, LayerRun, LayerStep, leave_forward
from ..masks import MaskRecord
from ..positions import AlibiSpec, Shift, alibi_in, local_shift, shift_keys
from ..storage import DenseRows, RowMap, stored_tensors
from ..weighting import PLAIN, Weighting
from .carry import Carry
from .foreign import settled_layers, working_layers
from .inputs import ForwardInputs, new_rows_map
from .replacing import merging_of
from .row_refusals import refuse_again, refuse_rows
from .snapshot import Snapshot
from .visibility import Visibility

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["Step"]


class Step(ABC):
    """One forward in flight. Subclasses decide where candidate rows go and which rows are published."""

    # Whether tokens are dropped between layers.
    prunes = False

    def __init__(self, runtime: Runtime, snapshot: Snapshot, inputs: ForwardInputs, transaction: Transaction) -> None:
        self.runtime, self.snapshot, self.inputs, self.transaction = runtime, snapshot, inputs, transaction
        geometry, policy = runtime.geometry, runtime.composition
        self.rows: dict[int, DenseRows] = {}
        # Ragged rows take their states along in their map, and a selection updates them owner by owner.
        evidence, dense = policy.evidence, policy.storage == "dense"
        self.carry = Carry(self, evidence) if dense and isinstance(evidence, CarriedEvidence) else None
        self.merging = merging_of(policy, snapshot)
        # How the layer in hand makes weights of its products.
        self.scaling, self.weighting = 1.0, PLAIN
        self.transient_bytes = 0
        self.width_after = snapshot.width + inputs.length
        self._expected = (inputs.batch, geometry.num_kv_heads, inputs.length, geometry.key_dim)
        self._dtype = snapshot.dtype
        self._repeats = policy.stored_heads(geometry) // geometry.num_kv_heads
        pinned = len(policy.pinned_tokens) if policy.positions == "cache_local" else 0
        self._pinned_rows = pinned if snapshot.evicted_at_column else 0
        self._moved: Sequence[Tensor] | None = None
        self._visibility: dict[int, Visibility] = {}
        self._new_map: RowMap | None = None
        self._view: RowMap | None = None
        self._columns: Tensor | None = None
        self._shift_BP: Tensor | None = None
        self.foreign = working_layers(snapshot.foreign, recording=runtime.recording)
        self._layers_left = len(geometry.attending_layers)

    # -- the two calls of a layer -------------------------------------------------------------------------------------

    def update(self, layer: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Take a layer's new rows; return the view attention will read."""
        self._admit_rows(layer, keys_BHTD, is_again=bool(self.transaction.layer_phase(layer)))
        self.transaction.enter(layer, Phase.APPEND)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.append(layer, keys_BHTD, values_BHTD)
        return self.append(layer, keys_BHTD, values_BHTD)

    def attend(
        self,
        backend: str | None,
        module: torch.nn.Module | None,
        query: Tensor,
        step: LayerStep,
        record: Any,
        kwargs: dict[str, Any],
    ) -> Tensor | None:
        """Attend over published and candidate rows, then decide; the last layer publishes. Returns [B, T, Q, D].

        Without a backend nobody reads the output, and none is computed: the layer's output is known already.
        """
        self._check_attention(backend, step, record, kwargs)
        try:
            self.transaction.enter(step.layer, Phase.ATTEND)
            self._take_weighting(kwargs)
            output = None
            if backend is not None and module is not None:
                self.admit(backend)
                output = self._attention(backend, module, query, step, record, kwargs)
            self.attended(step.layer, query, step, record, self.scaling)
            self._layer_done()
        except IntegrityError:
            # A forward that another thread began meanwhile aborts this one: that is the reason to name.
            self.runtime.require_current(self)
            raise
        return output

    def update_foreign(self, index: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Take the new rows of a layer no policy acts on; return what transformers' own layer would."""
        stock = self.foreign[index]
        if stock.get_seq_length() != self.snapshot.frontier.columns:
            refuse_again(self.runtime.geometry.foreign_layers[index])
        keys, values = stock.update(keys_BHTD, values_BHTD)
        return keys, values

    def attend_foreign(
        self,
        backend: str | None,
        module: torch.nn.Module | None,
        query: Tensor,
        step: LayerStep,
        record: Any,
        kwargs: dict[str, Any],
    ) -> Tensor | None:
        """Attend in a layer no policy acts on, as it would without us; the last layer publishes. [B, T, Q, D]."""
        self._check_attention(backend, step, record, kwargs)
        output = None
        if backend is not None and module is not None:
            mask = record.stock_on(query.device)
            output = run_stock(backend, module, query, step.keys, step.values, mask, **kwargs)[0]
        self._layer_done()
        return output

    def _check_attention(self, backend: str | None, step: LayerStep, record: Any, kwargs: dict[str, Any]) -> None:
        self.runtime.require_current(self)
        if not isinstance(record, MaskRecord):
            raise ConfigError(
                f"Layer {step.model_layer} received a ready-made attention mask ({type(record).__name__}) together "
                "with a policy cache. Pass a 2-D attention_mask; 4-D masks are tied to an uncompressed cache."
            )
        refuse_unhandled(kwargs, backend)

    def _take_weighting(self, kwargs: dict[str, Any]) -> None:
        self.scaling, self.weighting = float(kwargs["scaling"]), Weighting.of(kwargs)

    def _admit_rows(self, layer: int, keys_BHTD: Tensor, *, is_again: bool) -> None:
        """Refuse rows of another shape or type than the cache's, and those of a layer that brought its own already."""
        if keys_BHTD.shape != self._expected or keys_BHTD.dtype is not (self._dtype or keys_BHTD.dtype):
            refuse_rows(layer, keys_BHTD, self._expected, self._dtype)
        if is_again:
            refuse_again(layer)
        self._dtype = keys_BHTD.dtype

    def _layer_done(self) -> None:
        self._layers_left -= 1
        # States may change behind the last attention: then the decoder's return ends the forward.
        if not self._layers_left and not self.runtime.geometry.state_layers:
            self.finish()

    def finish(self) -> None:
        """Publish what this forward leaves, in all layers at once."""
        self.runtime.require_current(self)
        if self._layers_left:
            raise IntegrityError(
                f"The model returned before {self._layers_left} of its attention layers had run. Run the whole decoder."
            )
        with stored_tensors():
            successor = replace(self.successor(), foreign=settled_layers(self.foreign))
            if self.merging is not None:
                successor = self.merging.settled(successor)
            self.runtime.publish(self, successor)
        leave_forward()

    # -- what a kind of forward does ----------------------------------------------------------------------------------

    @abstractmethod
    def append(self, layer: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Place a layer's new rows without touching a live slot; return the attended view."""

    @abstractmethod
    def attended(self, layer: int, query_BQTD: Tensor, step: LayerStep, record: MaskRecord, scaling: float) -> None:
        """Score, protect, select and pack a layer, up to Phase.PACK."""

    @abstractmethod
    def successor(self) -> Snapshot:
        """Return what will be published."""

    def kept_tokens(self) -> KeptTokens | None:
        """Return which tokens the next decoder layer computes; None for all."""
        return None

    def layer_runs(self) -> Iterator[LayerRun] | None:
        """Begin one run of the decoder's layers after another; None where they run once, over all tokens."""
        return None

    # -- shared pieces ------------------------------------------------------------------------------------------------

    def view_map(self, layer: int) -> RowMap:
        """Return the map of the attended rows: published slots, then this forward's own."""
        if self._view is not None:
            return self._view
        new = self.new_map()
        view = self.snapshot.full_map(layer).then(new) if self.snapshot.maps else new
        if len(self.snapshot.maps) <= 1:
            # Kept only where all layers share it: the maps of every layer at once would be a transient of their own.
            self._view = view
        return view

    def new_map(self) -> RowMap:
        """Return the map of this forward's own rows."""
        if self._new_map is None:
            self._new_map = new_rows_map(self.inputs, self.snapshot)
        return self._new_map

    @property
    def candidate_counts(self) -> tuple[int, ...]:
        """Live rows per owner, published and new, for each batch row."""
        old = self.snapshot.counts or (0,) * self.inputs.batch
        return tuple(a + b for a, b in zip(old, self.inputs.new_tokens, strict=True))

    @property
    def candidate_rows(self) -> int:
        """Live rows of all owners, published and new."""
        geometry = self.runtime.geometry
        owners = geometry.num_layers * self.runtime.composition.stored_heads(geometry)
        return sum(self.candidate_counts) * owners

    @property
    def is_dense(self) -> bool:
        """Whether every attended slot holds a live row that the current mask shows."""
        return self.inputs.changed_mask_BF is None and all(n == self.width_after for n in self.candidate_counts)

    def visibility(self, record: MaskRecord) -> Visibility:
        """Return the masks of this forward under one rule."""
        found = self._visibility.get(id(record))
        if found is None:
            found = self._visibility[id(record)] = Visibility(
                record=record,
                columns_after=self.inputs.frontier_after.columns,
                dense=self.is_dense,
                changed_mask_BF=self.inputs.changed_mask_BF,
                pinned_shift_BP=self.pinned_shift() if self._pinned_rows else None,
                alibi=self.alibi,
            )
        return found

    @property
    def alibi(self) -> AlibiSpec | None:
        """How this model biases logits by distance; None where keys carry positions."""
        return alibi_in(self.runtime.alibi, self._dtype)

    def query_columns(self) -> Tensor:
        """Return the columns of this forward's queries, [1, T]."""
        if self._columns is None:
            first = self.snapshot.frontier.columns
            self._columns = torch.arange(first, first + self.inputs.length, device=self.inputs.device)[None]
        return self._columns

    @property
    def drops_rows(self) -> bool:
        """Whether a prompt segment is compressed by this forward."""
        return False

    @property
    def holds_rows(self) -> bool:
        """Whether new rows stay as they are until it is known which of them count."""
        return self.runtime.recording

    @property
    def waiting_queries(self) -> int:
        """How many of this forward's last queries enter no state before they are accepted."""
        return 0

    def stored(self, rows_BHTD: Tensor) -> Tensor:
        """Return new rows with one head per stored head."""
        return rows_BHTD if self._repeats == 1 else rows_BHTD.repeat_interleave(self._repeats, dim=1)

    def pinned_shift(self) -> Tensor:
        """Return how far each pinned row moves towards this forward's query, [B, P]."""
        if self._shift_BP is None:
            published = self.snapshot.full_map(0)
            query_token = torch.tensor(self.snapshot.frontier.tokens, device=published.live_BMW.device)
            tokens, live = published.tokens_BMW[:, 0], published.live_BMW[:, 0]
            self._shift_BP = local_shift(tokens, live, self._pinned_rows, query_token)
        return self._shift_BP

    def place_pinned(self, layer: int, rows: DenseRows) -> None:
        """Write the pinned rows' keys, moved for this forward's query, into their working slots.

        Working slots are derived data: every forward writes them anew from the pristine keys, so an aborted forward
        leaves nothing behind. Keys without a position in them stay as they are.
        """
        if not self._pinned_rows or self.runtime.alibi is not None:
            return
        if not self.runtime.rotary().rotates(layer):
            return  # working slots hold pristine keys: nothing in them depends on the position
        if self._moved is None:
            self._moved = self._move_pinned()
        rows.keys_BSCD.narrow(2, 0, self._pinned_rows).copy_(self._moved[layer])

    def _move_pinned(self) -> Sequence[Tensor]:
        shift = Shift.of(self.pinned_shift(), self.runtime.rotary())
        pristine = [rows.pinned_keys_BSPD for rows in self.snapshot.rows]
        kept = [keys for keys in pristine if keys is not None]
        if len({keys.device for keys in kept}) == 1:
            # All layers at once: one small rotation instead of one per layer.
            return shift_keys(torch.stack(kept), shift.to(kept[0].device)).unbind(0)
        return [shift_keys(keys, shift.to(keys.device)) for keys in kept]

    def note_transient(self, extra_bytes: int) -> None:
        """Remember the highest number of bytes alive at once: parent, successors so far, and workspace."""
        fresh_bytes = sum(tensor.nbytes for tensor in self.fresh_buffers())
        self.transient_bytes = max(self.transient_bytes, self.runtime.published_bytes() + fresh_bytes + extra_bytes)

    def note_view(self, layer: int) -> None:
        """As `note_transient`, of what the first layer's attention read where that was made for it."""
        rows = self.rows.get(layer) if layer == 0 else None
        if rows is not None and rows.coded_slots:
            self.note_transient(rows.view_bytes(self.width_after))

    def fresh_buffers(self) -> list[Tensor]:
        """Return the tensors of buffers that this forward made."""
        parent = {id(rows) for rows in self.snapshot.rows}
        merged = [] if self.merging is None else self.merging.fresh_tensors()
        return [tensor for rows in self.rows.values() if id(rows) not in parent for tensor in rows.tensors()] + merged

    def _attention(
        self, backend: str, module: torch.nn.Module, query: Tensor, step: LayerStep, record: MaskRecord, kwargs: Any
    ) -> Tensor:
        layer, keys, values = step.layer, step.keys, step.values
        if self.carry is not None and self.carry.shares_softmax(backend, query, keys, values, kwargs):
            view, visibility = self.view_map(layer), self.visibility(record)
            return self.carry.attend_prompt(layer, query, keys, values, view, visibility)
        if not self.snapshot.frontier.columns:
            if not record.has_stock:
                return self.attend_rows(backend, module, query, step, self.visibility(record), kwargs)
            # The view is exactly this forward's rows in order: the model's own backend and mask, bit for bit.
            # Columns, not rows: after a forward of pads alone nothing is held, but the stock mask counts them.
            return run_stock(backend, module, query, keys, values, record.stock_on(query.device), **kwargs)[0]
        return self.attend_history(backend, module, query, step, record, kwargs)

    def admit(self, backend: str) -> None:  # noqa: B027 - dense rows are read by every backend
        """Refuse a backend that could not read what this forward will store; any of them reads a rectangle."""

    def attend_history(
        self, backend: str, module: torch.nn.Module, query: Tensor, step: LayerStep, record: MaskRecord, kwargs: Any
    ) -> Tensor:
        """Attend over published and new rows. [B, T, Q, D]."""
        visibility = self.visibility(record)
        if self.carry is not None and self.inputs.length == 1:
            mask, dropout = self._mask(step, visibility), kwargs.get("dropout", 0.0)
            return self.carry.attend_one(step.layer, query, step.keys, step.values, mask, dropout=dropout)
        return self.attend_rows(backend, module, query, step, visibility, kwargs)

    def attend_rows(
        self,
        backend: str,
        module: torch.nn.Module,
        query: Tensor,
        step: LayerStep,
        visibility: Visibility,
        kwargs: Any,
        view: RowMap | None = None,
    ) -> Tensor:
        """Attend over the rectangle of rows that a layer's step carries, of this view or its own map. [B, T, Q, D]."""
        keys, values, tokens = step.keys, step.values, query.shape[2]
        if visibility.alibi is None or tokens == 1:
            mask = self._mask(step, visibility, view)
            return attend_view(backend, module, query, keys, values, mask, kwargs)
        # A bias differs by head: that of all queries at once would be as large as their logits.
        view, columns = view or self.view_map(step.layer), self.query_columns()
        width = max(1, MASK_BLOCK_ELEMENTS // (query.shape[0] * query.shape[1] * view.width))
        parts = []
        for start in range(0, tokens, width):
            part = slice(start, start + width)
            mask, seen = visibility.for_block(view, columns[:, part], start, tokens)
            shown = (query[:, :, part], keys[:, :, :seen], values[:, :, :seen])
            parts.append(attend_view(backend, module, *shown, mask, kwargs))
        return torch.cat(parts, dim=1)

    def _mask(self, step: LayerStep, visibility: Visibility, view: RowMap | None = None) -> Tensor | None:
        if visibility.is_plain and visibility.alibi is None and self.inputs.length == 1:
            return None
        mask = visibility.for_queries(view or self.view_map(step.layer), self.query_columns())
        return None if mask is None else mask.to(step.keys.device)
