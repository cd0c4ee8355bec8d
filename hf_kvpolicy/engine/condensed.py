"""A forward of a model most of whose layers read rows that another layer makes.

Only producers have buffers. A forward of several tokens runs the decoder's layers several times, all in one
transaction: the last run is the one that walks its phases and publishes. Nothing is kept between runs but the
producers' new rows, which lie in spare slots behind the published ones:

* token by token, each run finds the rows of all tokens before its own, as decode does;
* iterated, each run computes all tokens, and a layer that reads a later one finds its rows of the run before (zeros in
  the first). A producer writes over them when its turn comes, so that the layers above it read the run's own.

A layer that reads a later one does not see a token's own row. A query that sees no row at all has the output zero: its
attention is over a dummy row of zeros, as the paper has it for the first token.

Letters: B batch rows, H KV heads, Q query heads, T tokens of a run, N attended rows, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..backends import MASK_BLOCK_ELEMENTS, attend_view
from ..contract import Transaction
from ..errors import ConfigError, IntegrityError
from ..frame import LayerRun, LayerStep
from ..masks import MaskRecord
from ..representation import CondensedLayers, RowRepresentation
from ..storage import DenseRows, RowMap, growth_slots
from .append import AppendStep
from .inputs import ForwardInputs
from .snapshot import Snapshot
from .visibility import Visibility

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["CondensedStep", "condensed_layers"]


class CondensedStep(AppendStep):
    """Appends the rows of the layers that make some; the others read theirs."""

    def __init__(self, runtime: Runtime, snapshot: Snapshot, inputs: ForwardInputs, transaction: Transaction) -> None:
        super().__init__(runtime, snapshot, inputs, transaction)
        self._graph = condensed_layers(runtime.composition.representation)
        self._runs = _runs(self._graph, inputs.length)
        # The run in hand; a forward of several has none until the decoder's own loop asks for it.
        self._run = self._runs[0] if len(self._runs) == 1 else None
        self._is_iterated = self._graph.is_cyclic and self._runs[0].tokens.stop > 1
        self._brought: set[int] = set()
        self._attended_maps: dict[int, RowMap] = {}
        self._own_columns: Tensor | None = None
        # A batch row without a row has queries that see nothing, and so may one whose rows are hidden or far away.
        hides = inputs.changed_mask_BF is not None or any(runtime.geometry.window_tokens)
        self._may_see_nothing = hides or 0 in (snapshot.counts or (0,))

    def layer_runs(self) -> Iterator[LayerRun] | None:
        return None if len(self._runs) == 1 else self._begun()

    def _begun(self) -> Iterator[LayerRun]:
        for run in self._runs:
            self._run = run
            self._expected = (*self._expected[:2], run.tokens.stop - run.tokens.start, self._expected[3])
            self._brought = set()
            # Each run has a mask record, and a token by itself a view, of its own.
            self._visibility.clear()
            self._attended_maps.clear()
            self._own_columns = None
            yield run

    @property
    def _tokens(self) -> slice:
        assert self._run is not None, "update refuses a forward that no run was begun of"
        return self._run.tokens

    # -- the two calls of a layer -------------------------------------------------------------------------------------

    def update(self, layer: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        if self._run is None:
            raise ConfigError(
                "The layers of this model are run several times over a prompt, but its decoder was not made ready for "
                "it. Call hf_kvpolicy.attach(model) again: its config has changed since."
            )
        keys, values = self._take(layer, keys_BHTD, values_BHTD)
        if keys_BHTD.requires_grad:
            # A producer writes into what layers below it have read, which their backward still needs.
            return keys.clone(), values.clone()
        return keys, values

    def _take(self, layer: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        if self._run is self._runs[-1]:
            return super().update(layer, keys_BHTD, values_BHTD)
        self._admit_rows(layer, keys_BHTD, is_again=layer in self._brought)
        self._brought.add(layer)
        with torch.no_grad():
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
        if self._run is self._runs[-1]:
            return super().attend(backend, module, query, step, record, kwargs)
        assert backend is not None, "a prompt of several runs is never replayed"
        assert module is not None, "whoever names a backend has a module"
        self._check_attention(backend, step, record, kwargs)
        self._take_weighting(kwargs)
        return self._attention(backend, module, query, step, record, kwargs)

    def append(self, layer: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        producer, used = self._graph.producers[layer], self.snapshot.width
        rows = self._working(producer, keys_BHTD, values_BHTD)
        if layer == producer:
            # A reader below it may lie elsewhere, and have come first.
            rows = self.rows[layer] = rows.to(keys_BHTD.device)
            rows.write(used + self._tokens.start, keys_BHTD, values_BHTD)
        keys, values = rows.view(self._attended_rows(layer))
        return keys.to(keys_BHTD.device), values.to(values_BHTD.device)

    # -- attention ----------------------------------------------------------------------------------------------------

    def _attention(
        self, backend: str, module: torch.nn.Module, query: Tensor, step: LayerStep, record: MaskRecord, kwargs: Any
    ) -> Tensor:
        if not step.keys.shape[2]:
            batch, heads, tokens, _ = query.shape
            return query.new_zeros((batch, tokens, heads, step.values.shape[3]))
        visibility, tokens, parts = self.visibility(record), query.shape[2], []
        if visibility.is_plain and tokens == 1:
            return attend_view(backend, module, query, step.keys, step.values, None, kwargs)
        view, columns = self._attended_map(step.layer), self._query_columns()
        block = max(1, MASK_BLOCK_ELEMENTS // view.width)
        for start in range(0, tokens, block):
            part = slice(start, min(start + block, tokens))
            mask, seen = self._mask_of(step.layer, visibility, view, columns, part)
            mask = None if mask is None else mask.to(query.device)
            shown = (query[:, :, part], step.keys[:, :, :seen], step.values[:, :, :seen])
            if mask is None or not self._may_see_nothing:
                parts.append(attend_view(backend, module, *shown, mask, kwargs))
                continue
            sees = mask.any(-1, keepdim=True)
            output = attend_view(backend, module, *shown, mask | ~sees, kwargs)
            parts.append(output.where(sees.transpose(1, 2), output.new_zeros(())))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _mask_of(
        self, layer: int, visibility: Visibility, view: RowMap, columns_BT: Tensor, part: slice
    ) -> tuple[Tensor | None, int]:
        """Return what some of a run's queries see, bool [B or 1, 1, T, N] or None for all, and how many first rows."""
        tokens = columns_BT.shape[1]
        if tokens == 1:
            return visibility.for_queries(view, columns_BT), view.width
        mask, seen = visibility.for_block(view, columns_BT[:, part], part.start, tokens)
        masks_own = self._graph.reads_later(layer)
        if not masks_own and (mask is None or mask.shape[3] == seen):
            return mask, seen
        # The newest rows are the queries' own.
        newest = view.width - tokens + part.start - masks_own
        before = torch.ones((part.stop - part.start, seen), dtype=torch.bool, device=view.device).tril(newest)
        return (before[None, None] if mask is None or mask.shape[3] < seen else mask & before), seen

    def _attended_map(self, layer: int) -> RowMap:
        rows = self._attended_rows(layer)
        if rows not in self._attended_maps:
            view = self.view_map(layer)
            self._attended_maps[rows] = view if rows == view.width else view.first(rows)
        return self._attended_maps[rows]

    def _query_columns(self) -> Tensor:
        """Return the columns of this run's queries, [1, T]."""
        if self._own_columns is None:
            self._own_columns = self.query_columns()[:, self._tokens]
        return self._own_columns

    def _attended_rows(self, layer: int) -> int:
        """Return how many slots a layer reads in this run; a token by itself has no row in those of a later layer."""
        tokens = self._tokens
        is_without_own = self._graph.reads_later(layer) and tokens.stop - tokens.start == 1
        rows: int = self.snapshot.width + tokens.stop
        return rows - is_without_own

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _working(self, producer: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> DenseRows:
        """Return a producer's buffers, with room for this forward's rows; on its own device once it has written."""
        rows, used, length = self.rows.get(producer), self.snapshot.width, self.inputs.length
        if rows is None:
            if self.snapshot.rows:
                rows = self.snapshot.rows[self._graph.stored.index(producer)].grown(used, used + length)
            else:
                rows = DenseRows.allocate(keys_BHTD, values_BHTD, growth_slots(length))
            if self._is_iterated:
                for part in (rows.keys_BSCD, rows.values_BSCD):
                    part.narrow(2, used, length).zero_()
        self.rows[producer] = rows
        return rows

    def is_new_buffer(self, layer: int) -> bool:
        rows, published = self.rows.get(layer), self.snapshot.rows
        return rows is not None and (not published or rows is not published[self._graph.stored.index(layer)])

    @property
    def candidate_rows(self) -> int:
        return sum(self.candidate_counts) * len(self._graph.stored) * self.runtime.geometry.num_kv_heads

    def placed(self) -> dict[str, Any]:
        return {
            "rows": tuple(self.rows[layer] for layer in self._graph.stored),
            "producers": self._graph.producers,
            "maps": self.snapshot.maps or (RowMap.empty(self.inputs.batch, self.inputs.device),),
            "counts": self.candidate_counts,
        }


def condensed_layers(representation: RowRepresentation) -> CondensedLayers:
    """Return a representation whose layers share rows; any other has no step here."""
    if not isinstance(representation, CondensedLayers):
        raise IntegrityError(f"{representation.name} replaces rows in a way that no step of the engine knows.")
    return representation


def _runs(graph: CondensedLayers, length: int) -> tuple[LayerRun, ...]:
    """Return the runs of the decoder's layers that so many new tokens take."""
    if length == 1 or not graph.is_cyclic:
        return (LayerRun(tokens=slice(0, length), is_output=True),)
    if graph.is_sequential(length):
        return tuple(LayerRun(tokens=slice(i, i + 1), is_output=True) for i in range(length))
    last = graph.passes - 1
    return tuple(LayerRun(tokens=slice(0, length), is_output=i == last) for i in range(graph.passes))
