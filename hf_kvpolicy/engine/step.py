"""What the three kinds of forward share: candidate rows, attention over them, masks, accounting.

Letters: B batch rows, H KV heads, S stored heads, Q query heads, T new tokens, N attended rows, D head dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..backends import attend_view, stock_attention
from ..contract import Phase, Transaction
from ..errors import ConfigError
from ..frame import LayerStep
from ..masks import MaskRecord
from ..positions import Shift, local_shift, shift_keys
from ..storage import DenseRows, RowMap
from .inputs import ForwardInputs
from .snapshot import Snapshot
from .visibility import Visibility

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["Step", "new_rows_map"]


class Step(ABC):
    """One forward in flight. Subclasses decide where candidate rows go and which rows are published."""

    def __init__(self, runtime: Runtime, snapshot: Snapshot, inputs: ForwardInputs, transaction: Transaction) -> None:
        self.runtime, self.snapshot, self.inputs, self.transaction = runtime, snapshot, inputs, transaction
        self.rows: dict[int, DenseRows] = {}
        self.transient_bytes = 0
        self.width_after = snapshot.width + inputs.length
        self._visibility: dict[int, Visibility] = {}
        self._new_map: RowMap | None = None
        self._view: RowMap | None = None
        self._columns: Tensor | None = None
        self._shift: tuple[Tensor, Shift] | None = None
        self._layers_done = 0

    # -- the two calls of a layer -------------------------------------------------------------------------------------

    def update(self, layer: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Take a layer's new rows; return the view attention will read."""
        self._check_shape(layer, keys_BHTD)
        self.transaction.enter(layer, Phase.APPEND)
        # Buffers must outlive inference mode: grad modes may mix over the life of a cache.
        with torch.inference_mode(False), torch.no_grad():
            return self.append(layer, keys_BHTD, values_BHTD)

    def attend(
        self, backend: str, module: torch.nn.Module, query: Tensor, step: LayerStep, record: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        """Attend over published and candidate rows, then decide; the last layer publishes. Returns [B, T, Q, D]."""
        self.runtime.require_current(self)
        if not isinstance(record, MaskRecord):
            raise ConfigError(
                f"Layer {step.layer} received a ready-made attention mask ({type(record).__name__}) together with a policy "
                "cache. Pass a 2-D attention_mask; 4-D masks are tied to an uncompressed cache."
            )
        self.transaction.enter(step.layer, Phase.ATTEND)
        output = self._attention(backend, module, query, step, record, kwargs)
        with torch.inference_mode(False), torch.no_grad():
            self.attended(step.layer, query.detach(), step, record, float(kwargs["scaling"]))
            self._layers_done += 1
            if self._layers_done == self.runtime.geometry.num_layers:
                self.runtime.publish(self, self.successor())
        return output

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
    def is_dense(self) -> bool:
        """Whether every attended slot holds a live row that the current mask shows."""
        return self.inputs.changed_mask_BF is None and all(n == self.width_after for n in self.candidate_counts)

    def visibility(self, record: MaskRecord) -> Visibility:
        """Return the masks of this forward under one rule."""
        if id(record) not in self._visibility:
            shift = self.pinned_shift()
            self._visibility[id(record)] = Visibility(
                record=record,
                columns_after=self.inputs.frontier_after.columns,
                dense=self.is_dense,
                changed_mask_BF=self.inputs.changed_mask_BF,
                pinned_shift_BP=None if shift is None else shift[0],
            )
        return self._visibility[id(record)]

    def query_columns(self) -> Tensor:
        """Return the columns of this forward's queries, [1, T]."""
        if self._columns is None:
            first = self.snapshot.frontier.columns
            self._columns = torch.arange(first, first + self.inputs.length, device=self.inputs.device)[None]
        return self._columns

    def stored(self, rows_BHTD: Tensor) -> Tensor:
        """Return new rows with one head per stored head."""
        if self.runtime.composition.owner == "kv_head":
            return rows_BHTD
        return rows_BHTD.repeat_interleave(self.runtime.geometry.group_size, dim=1)

    def pinned_shift(self) -> tuple[Tensor, Shift] | None:
        """Return how far pinned rows move this forward, or None where nothing was ever evicted."""
        policy = self.runtime.composition
        pinned = len(policy.pinned_tokens) if policy.positions == "cache_local" else 0
        if not pinned or not self.snapshot.evicted_at_column:
            return None
        if self._shift is None:
            published = self.snapshot.full_map(0)
            query_token = torch.tensor(self.snapshot.frontier.tokens, device=published.live_BMW.device)
            moved = local_shift(published.tokens_BMW[:, 0], published.live_BMW[:, 0], pinned, query_token)
            self._shift = (moved, Shift.of(moved, self.runtime.rotary()))
        return self._shift

    def place_pinned(self, rows: DenseRows) -> None:
        """Write the pinned rows' keys, moved for this forward's query, into their working slots."""
        shift = self.pinned_shift()
        if shift is not None and rows.pinned_keys_BSPD is not None:
            rows.keys_BSCD[:, :, : shift[0].shape[1]] = shift_keys(rows.pinned_keys_BSPD, shift[1])

    def note_transient(self, extra_bytes: int) -> None:
        """Remember the highest number of bytes alive at once: parent, successors so far, and workspace."""
        parent = {id(rows) for rows in self.snapshot.rows}
        fresh = [rows for rows in self.rows.values() if id(rows) not in parent]
        fresh_bytes = sum(t.numel() * t.element_size() for rows in fresh for t in rows.tensors())
        self.transient_bytes = max(self.transient_bytes, self.runtime.published_bytes() + fresh_bytes + extra_bytes)

    def _attention(
        self, backend: str, module: torch.nn.Module, query: Tensor, step: LayerStep, record: MaskRecord, kwargs: Any
    ) -> Tensor:
        if not self.snapshot.width:
            # The view is exactly this forward's rows in order: the model's own backend and mask, bit for bit.
            output: Tensor = stock_attention(backend, module)(
                module, query, step.keys, step.values, record.stock, **kwargs
            )[0]
            return output
        extras = dict(kwargs)
        scaling, dropout = float(extras.pop("scaling")), float(extras.pop("dropout", 0.0))
        visibility = self.visibility(record)
        plain = visibility.dense and record.is_causal_for(visibility.columns_after) and self.inputs.length == 1
        mask = None
        if not plain:
            view = self.view_map(step.layer)
            mask = visibility.for_queries(view, self.query_columns())
        return attend_view(
            backend, module, query, step.keys, step.values, mask, scaling=scaling, dropout=dropout, extras=extras
        )

    def _check_shape(self, layer: int, keys_BHTD: Tensor) -> None:
        geometry = self.runtime.geometry
        expected = (self.inputs.batch, geometry.num_kv_heads, self.inputs.length, geometry.key_dim)
        if keys_BHTD.shape != expected:
            raise ConfigError(
                f"Layer {layer} brings keys of shape {tuple(keys_BHTD.shape)}, but this cache was made for {expected} "
                "(batch, KV heads, tokens, head dimension). Make the cache for this model."
            )
        if self.snapshot.rows and keys_BHTD.dtype != self.snapshot.rows[0].keys_BSCD.dtype:
            raise ConfigError(
                f"Layer {layer} brings keys in {keys_BHTD.dtype}, but the cache holds {self.snapshot.rows[0].keys_BSCD.dtype}."
                " Keep one dtype for the life of a cache, or call cache.reset() first."
            )


def new_rows_map(inputs: ForwardInputs, snapshot: Snapshot) -> RowMap:
    """Return the map of a forward's own columns, one map head; pads are dead from the start."""
    batch, length, device = inputs.batch, inputs.length, inputs.device
    first = snapshot.frontier.columns
    old = snapshot.frontier.tokens or (0,) * batch
    columns = (
        torch.arange(first, first + length, dtype=torch.int32, device=device).repeat(batch, 1, 1).view(batch, 1, -1)
    )
    start = torch.tensor(old, dtype=torch.int32, device=device).view(-1, 1, 1)
    if inputs.real_BT is None:
        live = torch.ones((batch, 1, length), dtype=torch.bool, device=device)
        tokens = start + torch.arange(length, dtype=torch.int32, device=device)
    else:
        live = inputs.real_BT[:, None, :].clone()
        tokens = start + live.cumsum(-1, dtype=torch.int32) - 1
    return RowMap(columns_BMW=columns, tokens_BMW=tokens, live_BMW=live, ordered=True)
