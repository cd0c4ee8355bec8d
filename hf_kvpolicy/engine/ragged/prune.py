"""A prompt segment whose tokens are dropped between layers: deeper layers compute only what the layer below passed on.

Letters: B batch rows, S stored heads, Q query heads, W tokens a layer computes, L layers, n rows of one owner, D head
dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...backends import run_stock
from ...contract import Phase, Transaction
from ...evidence import LayerObservation, RecentAttention
from ...frame import KeptTokens, LayerStep
from ...masks import MaskRecord
from ...selection import keep_best, kept_index
from ...storage import RowMap, stored_tensors
from ..decide import check_finite
from ..inputs import ForwardInputs
from ..snapshot import Snapshot
from ..visibility import SeenRows, Visibility
from .owners import LiveTail, OwnerCandidates
from .selection import RaggedSelection
from .shared_sets import SharedSets

if TYPE_CHECKING:
    from ..runtime import Runtime

__all__ = ["PruningPlan", "PruningStep", "plan_pruning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningPlan:
    """How many rows stay where, known before the first layer; per batch row."""

    budget_rows: tuple[int, ...] | None
    # Newest tokens of the segment: their queries vote, and they reach every layer.
    recent_B: tuple[int, ...]
    # Rows among the others, held ones and new ones, that each layer keeps.
    context_BL: tuple[tuple[int, ...], ...]
    drops_rows: bool


def plan_pruning(runtime: Runtime, inputs: ForwardInputs, budget: tuple[int, ...] | None) -> PruningPlan:
    """Return the plan of a segment under a budget in rows, if there is one."""
    policy, snapshot, layers = runtime.composition, runtime.snapshot, runtime.geometry.num_layers
    assert policy.pruning is not None
    assert isinstance(policy.evidence, RecentAttention)
    heads = policy.stored_heads(runtime.geometry)
    recents, contexts, drops = [], [], False
    for row, new in enumerate(inputs.new_tokens):
        newest = inputs.frontier_after.tokens[row]
        recent = policy.evidence.recent_tokens(new if budget is None else min(new, budget[row]))
        if budget is not None and recent:
            # Protected rows are inside the budget, and older than recent ones.
            recent = max(1, min(recent, budget[row] - len(policy.pinned_tokens)))
        held_L = [snapshot.owner_rows(layer, heads)[row][0] if snapshot.buffers else 0 for layer in range(layers)]
        kept_L = (
            tuple(held_L)
            if not new
            else policy.pruning.kept_rows(
                held_L,
                new - recent,
                pinned=sum(token < newest - recent for token in policy.pinned_tokens),
                mean_rows=None if budget is None else budget[row] - recent,
            )
        )
        drops = drops or sum(kept_L) < sum(held_L) + layers * (new - recent)
        recents.append(recent)
        contexts.append(kept_L)
    return PruningPlan(budget_rows=budget, recent_B=tuple(recents), context_BL=tuple(contexts), drops_rows=drops)


class SeenByRecent(SeenRows):
    """What the newest queries see: under plain causality only their own tokens need a mask."""

    __slots__ = ()

    def block(self, start: int, stop: int) -> tuple[Tensor | None, int]:
        """Return the mask of some queries over the last of the rows they see, and how many these are."""
        if not self.visibility.is_plain or self.visibility.alibi is not None:
            return SeenRows.block(self, start, stop)
        ones = torch.ones((stop - start, stop - start), dtype=torch.bool, device=self.columns_BW.device)
        return ones.tril()[None, None], self.view.width - self.columns_BW.shape[1] + stop


class PruningStep(SharedSets, RaggedSelection):
    """Chooses a layer's rows by the attention of its newest queries; the next layer computes only the chosen tokens."""

    prunes = True

    def __init__(
        self, runtime: Runtime, snapshot: Snapshot, inputs: ForwardInputs, transaction: Transaction, plan: PruningPlan
    ) -> None:
        super().__init__(runtime, snapshot, inputs, transaction)
        self.budget_rows, self._plan = plan.budget_rows, plan
        self._finite: list[Tensor] = []
        # Bytes of scoring one head.
        self._workspace_bytes = 0
        # Where the tokens in flight lie among all of the forward's, and what the hook has not handed over yet.
        self._among_new_BW: Tensor | None = None
        self._among_present_BW: Tensor | None = None

    def kept_tokens(self) -> KeptTokens | None:
        """Return which tokens the next layer computes; the hidden states are pruned once, rotations in every layer."""
        if self._among_new_BW is None:
            return None
        present, self._among_present_BW = self._among_present_BW, None
        return KeptTokens(among_present_BW=present, among_new_BW=self._among_new_BW)

    def attended(self, layer: int, query_BQTD: Tensor, step: LayerStep, record: MaskRecord, scaling: float) -> None:
        """Score, select and pack one layer, and note which tokens the next one computes."""
        with stored_tensors():
            candidates = self.candidates(layer, step)
            maps, batch = candidates.maps(), self.inputs.batch
            self.transaction.enter(layer, Phase.SCORE)
            chosen = [
                self._chosen(layer, row, candidates, maps[row * self.heads], query_BQTD.detach(), record, scaling)
                for row in range(batch)
            ]
            for phase in (Phase.PROTECT, Phase.SELECT, Phase.VALIDATE, Phase.ADMIT, Phase.RESERVE):
                self.transaction.enter(layer, phase)
            self.pack_sets(layer, candidates, maps, chosen)
            self.transaction.enter(layer, Phase.PACK)
            keys, values = step.keys, step.values
            layer_bytes = keys.numel() * keys.element_size() + values.numel() * values.element_size()
            self.note_transient(layer_bytes + self._workspace_bytes)
            if self.snapshot.frontier.columns:
                self.note_view(layer)
            self.buffers.pop(layer, None)
            if layer + 1 < self.runtime.geometry.num_layers:
                self._pass_on([maps[row * self.heads].width for row in range(batch)], chosen)

    def successor(self) -> Snapshot:
        """Return the snapshot in which every layer holds what was chosen for it."""
        check_finite(self._finite)
        scores = self.snapshot.scores_without(self.inputs.brought)
        return self.selected(self.packed_in_order(), drops_rows=self._plan.drops_rows, scores_LBSWX=scores)

    # -- attention ----------------------------------------------------------------------------------------------------

    def _attention(
        self, backend: str, module: torch.nn.Module, query: Tensor, step: LayerStep, record: MaskRecord, kwargs: Any
    ) -> Tensor:
        if self._among_new_BW is None or self.snapshot.frontier.columns:
            return super()._attention(backend, module, query, step, record, kwargs)
        # A first prompt whose tokens were dropped: the stock mask is of another size, but kept tokens keep their order.
        table = self.new_map()
        dense = all(count == table.width for count in self.new_counts)
        columns_after = self.inputs.frontier_after.columns
        visibility = Visibility(
            record=record, columns_after=columns_after, dense=dense, changed_mask_BF=None, alibi=self.alibi
        )
        if visibility.is_plain and record.has_stock and (backend == "sdpa" or backend.startswith("flash")):
            return run_stock(backend, module, query, step.keys, step.values, None, **kwargs)[0]
        return self.attend_rows(backend, module, query, step, visibility, kwargs, table)

    # -- score and select ---------------------------------------------------------------------------------------------

    def _chosen(
        self,
        layer: int,
        row: int,
        candidates: OwnerCandidates,
        table: RowMap,
        query_BQWD: Tensor,
        record: MaskRecord,
        scaling: float,
    ) -> Tensor | None:
        """Return which of one batch row's candidates stay, ascending; None where all do."""
        context = table.width - self._plan.recent_B[row]
        kept = min(self._plan.context_BL[row][layer], context)
        if kept == context:
            return None
        votes = self._votes(layer, row, candidates, table, query_BQWD, record, scaling)[:context]
        self._finite.append(torch.isfinite(votes).all())
        first, device = table.first(context), votes.device
        pinned = torch.tensor(self.runtime.composition.pinned_tokens, dtype=torch.int32, device=device)
        protected = torch.isin(first.tokens_BMW, pinned)
        keep = keep_best(votes[None, None], first.live_BMW, protected, [kept])
        index = kept_index(keep, [kept]).index_BMK[0, 0]
        return torch.cat([index, torch.arange(context, table.width, device=device)])

    def _votes(
        self,
        layer: int,
        row: int,
        candidates: OwnerCandidates,
        table: RowMap,
        query_BQWD: Tensor,
        record: MaskRecord,
        scaling: float,
    ) -> Tensor:
        """Return votes [n] of one batch row's candidates, summed over heads."""
        policy, recent = self.runtime.composition, self._plan.recent_B[row]
        assert isinstance(policy.evidence, RecentAttention)
        columns = table.columns_BMW[0, :, table.width - recent :].long()
        slots = self._present.slots(row)
        queries_1QWD = query_BQWD[row : row + 1]
        if slots is None:
            queries_1QWD = queries_1QWD[:, :, queries_1QWD.shape[2] - recent :]
        else:
            queries_1QWD = queries_1QWD.index_select(2, slots[slots.shape[0] - recent :].to(query_BQWD.device))
        changed = self.inputs.changed_mask_BF
        mask = None if changed is None else changed[row : row + 1]
        visibility = Visibility(
            record=record,
            columns_after=self.inputs.frontier_after.columns,
            dense=mask is None,
            changed_mask_BF=mask,
            alibi=self.alibi,
        )
        group, total = queries_1QWD.shape[1] // self.heads, None
        workspace_bytes = policy.evidence.workspace_bytes(queries_1QWD[:, :group], table.width)
        if slots is not None:
            # Of a padded row the queries and a head's rows are copies.
            workspace_bytes += queries_1QWD.numel() * queries_1QWD.element_size()
            workspace_bytes += table.width * self.runtime.geometry.row_bytes(queries_1QWD.element_size())
        self._workspace_bytes = max(self._workspace_bytes, workspace_bytes)
        for head in range(self.heads):
            keys, _ = candidates.rows(row * self.heads + head)
            observation = LayerObservation(
                layer=layer,
                queries_BQWD=queries_1QWD[:, head * group : (head + 1) * group],
                observed_BW=None,
                keys_BHND=keys[None, None],
                tokens_BMN=table.tokens_BMW,
                visibility=SeenByRecent(
                    visibility=visibility.of_owner(head, self.heads), view=table, columns_BW=columns
                ),
                scaling=scaling,
                weighting=self.weighting.of_owners([head], self.heads),
            )
            votes = policy.evidence.votes(observation, group=policy.group, score_heads=1)[0, 0]
            total = votes if total is None else total + votes
        assert total is not None
        # Rows may lie elsewhere than their map, where the choice is made.
        return total.to(table.device)

    # -- pass on ------------------------------------------------------------------------------------------------------

    @property
    def _present(self) -> LiveTail:
        """The live ones among the tokens in flight."""
        return LiveTail(self.new_map())

    def _pass_on(self, candidates: list[int], chosen: list[Tensor | None]) -> None:
        """Narrow the tokens in flight to those that stay; each batch row's real ones move to the end."""
        present, table = self._present, self.new_map()
        slots, dropped = [], False
        for row, index in enumerate(chosen):
            live = present.slots(row)
            if live is None:
                live = torch.arange(table.width, device=table.live_BMW.device)
            if index is not None:
                own = index[index >= candidates[row] - live.shape[0]] - (candidates[row] - live.shape[0])
                dropped = dropped or own.shape[0] < live.shape[0]
                live = live.index_select(0, own.to(live.device))
            slots.append(live)
        if not dropped:
            return
        counts = tuple(live.shape[0] for live in slots)
        index_BW = torch.zeros((len(slots), max(counts)), dtype=torch.int64, device=table.live_BMW.device)
        live_BW = torch.zeros_like(index_BW, dtype=torch.bool)
        for row, live in enumerate(slots):
            index_BW[row, max(counts) - counts[row] :] = live
            live_BW[row, max(counts) - counts[row] :] = True
        before = self._among_new_BW
        self._among_new_BW = index_BW if before is None else before.gather(1, index_BW)
        self._among_present_BW = index_BW
        self.narrow(table.gathered(index_BW[:, None], live_BW[:, None], ordered=True), counts)
