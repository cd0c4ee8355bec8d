"""Score, allocate, select and pack owners of unequal length.

The phase order of section 0x08A: scores of the whole prompt first, then budgets of layers, then of heads, then rows.

Letters: B batch rows, S stored heads, O owners (b * S + s), n candidate rows of one owner, D head dimension, Q query
heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...allocation import Demand
from ...contract import Phase, Transaction
from ...evidence import LayerObservation, reduce_group
from ...geometry import CacheGeometry
from ...selection import keep_best, kept_index
from ...storage import RaggedLayer, RowMap
from ...weighting import PLAIN
from ..composition import Composition
from ..decide import check_finite, tensor_bytes
from ..shared_evidence import evidence_once
from .owners import OwnerCandidates, OwnerQueries
from .pack import OwnerDecider, pack_owners

__all__ = ["RaggedDecider"]


@dataclass(slots=True, kw_only=True, eq=False)
class _Scored:
    """One layer that was seen: its rows, and the score of every competing row per owner."""

    candidates: OwnerCandidates
    maps: list[RowMap]
    # Final scores [n] of each owner's rows; none where nothing is dropped.
    scores: list[Tensor]


class RaggedDecider(OwnerDecider):
    """One selection over all layers; every owner keeps its own number of rows."""

    def __init__(
        self,
        composition: Composition,
        geometry: CacheGeometry,
        transaction: Transaction,
        *,
        candidates_LO: Sequence[Sequence[int]],
        budget_rows: Sequence[int],
        newest_tokens: Sequence[int],
        brought: Sequence[bool],
    ) -> None:
        """Open a selection.

        Args:
            candidates_LO: rows of each layer's owners that could stay.
            budget_rows: rows each owner may keep in the mean, for each batch row.
            newest_tokens: real tokens of each batch row.
            brought: whether each batch row has a token in what ends here; one without keeps what it holds.
        """
        self._policy, self._geometry, self._transaction = composition, geometry, transaction
        self._heads, self._newest, self._brought = composition.stored_heads(geometry), newest_tokens, brought
        self._demands = [
            self._demand(row, mean, [layer[row * self._heads : (row + 1) * self._heads] for layer in candidates_LO])
            for row, mean in enumerate(budget_rows)
        ]
        self._drops_rows = any(
            own and d.total_rows < sum(map(sum, d.caps_LS)) for d, own in zip(self._demands, brought, strict=True)
        )
        allocation = composition.allocation
        self._waits = self.drops_rows and allocation.measures_layers
        # Open rows per batch row, layer and head; unknown until all layers were measured.
        self._open_BLS = [] if self._waits else [allocation.open_rows(d, None) for d in self._demands]
        self._sensitivity: list[list[float]] = []
        self._waiting: dict[int, _Scored] = {}
        self._finite: list[Tensor] = []
        self.layers: dict[int, RaggedLayer] = {}

    @property
    def drops_rows(self) -> bool:
        """Whether the budget is smaller than what there is; known from the start."""
        return self._drops_rows

    @property
    def observes(self) -> bool:
        """Queries are needed only where rows compete."""
        return self._drops_rows

    def observe(
        self, layer: int, candidates: OwnerCandidates, queries_BQWD: Tensor | None, seen: OwnerQueries | None
    ) -> None:
        """Score one layer and, unless the allocation must see all layers first, choose and pack its rows."""
        self._transaction.enter(layer, Phase.SCORE)
        maps = candidates.maps()
        scored = _Scored(candidates=candidates, maps=maps, scores=[])
        if self.drops_rows:
            votes = self._votes(layer, candidates, maps, queries_BQWD, seen)
            scored.scores = [self._refined(part) for part in votes]
        if self._waits:
            self._waiting[layer] = scored
            self.held_bytes += sum(tensor_bytes(*candidates.slots(owner)) for owner in range(len(maps)))
        else:
            self._pack(layer, scored)

    def finish(self, num_layers: int) -> tuple[RaggedLayer, ...]:
        """Complete the selection and return all layers.

        Raises:
            SelectionError: a score is not finite; the model's activations are broken.
        """
        if self._waiting:
            measured = zip(*self._sensitivity, strict=True)  # per batch row, over layers
            self._open_BLS = [
                self._policy.allocation.open_rows(demand, values)
                for demand, values in zip(self._demands, measured, strict=True)
            ]
            for layer in range(num_layers):
                self._pack(layer, self._waiting.pop(layer))
        check_finite(self._finite)
        return tuple(self.layers[layer] for layer in range(num_layers))

    # -- demand -------------------------------------------------------------------------------------------------------

    def _demand(self, row: int, mean_rows: int, candidates: Sequence[Sequence[int]]) -> Demand:
        policy, newest = self._policy, self._newest[row]
        recent = range(max(0, newest - policy.window_for(mean_rows)), newest)
        pinned = {token for token in policy.pinned_tokens if token < newest}
        return Demand(
            mean_rows=mean_rows,
            protected_rows=len(pinned.union(recent)),
            candidates_LS=tuple(tuple(layer) for layer in candidates),
            tokens=newest,
        )

    # -- score --------------------------------------------------------------------------------------------------------

    def _votes(
        self,
        layer: int,
        candidates: OwnerCandidates,
        maps: list[RowMap],
        queries_BQWD: Tensor | None,
        seen: OwnerQueries | None,
    ) -> list[Tensor]:
        """Return votes [n] of each owner's rows, reduced over its query heads (and over heads for unit='layer')."""
        policy, heads, votes = self._policy, self._heads, []
        measured = []
        for row in range(len(self._demands)):
            per_head = []
            for head in range(heads):
                owner = row * heads + head
                keys, _ = candidates.rows(owner)
                votes_GN = self._owner_votes(layer, keys, maps[owner], queries_BQWD, seen, row, head)
                per_head.append(votes_GN)
            if policy.allocation.measures_layers:
                measured.append(policy.allocation.sensitivity(torch.cat(per_head)))
            reduced = [reduce_group(part[None, None, :, None], policy.group)[0, 0, 0] for part in per_head]
            votes += reduced if policy.unit == "head" else [torch.stack(reduced).sum(0)] * heads
        self._sensitivity.append(measured)
        return votes

    def _owner_votes(
        self,
        layer: int,
        keys_nD: Tensor,
        table: RowMap,
        queries_BQWD: Tensor | None,
        seen: OwnerQueries | None,
        row: int,
        head: int,
    ) -> Tensor:
        """Return one owner's votes per query head, [G, n], where its map lies: rows may lie elsewhere."""
        queries = shown = None
        if queries_BQWD is not None and seen is not None:
            queries, shown = (
                seen.of_owner(queries_BQWD, row, head, self._heads),
                seen.seen(row, head, self._heads, table),
            )
            workspace = 4 * keys_nD.shape[0] * (2 * queries.shape[1] * queries.shape[2] + keys_nD.shape[1])
            workspace += shown.bias_bytes(1, queries.shape[1])
            self.workspace_bytes = max(self.workspace_bytes, workspace)
        observation = LayerObservation(
            layer=layer,
            queries_BQWD=queries,
            observed_BW=None,
            keys_BHND=keys_nD[None, None],
            tokens_BMN=table.tokens_BMW.to(keys_nD.device),
            visibility=shown,
            scaling=1.0 if seen is None else seen.scaling,
            weighting=PLAIN if seen is None else seen.weighting.of_owners([head], self._heads),
            first_head=head,
        )
        group = 1 if queries is None else queries.shape[1]
        votes_GN = evidence_once(
            self._policy.evidence,
            ("owner votes", layer, row, head, group, self._policy.group),
            lambda: self._policy.evidence.votes(observation, group=self._policy.group, score_heads=group)[0],
        )
        return votes_GN.to(table.device)

    def _refined(self, votes_n: Tensor) -> Tensor:
        """Return pooled scores; the window's votes neither compete nor spread (see `Decider`)."""
        open_rows = max(0, votes_n.shape[0] - self._policy.window_rows)
        scores = torch.zeros_like(votes_n)
        if open_rows:
            scores[:open_rows] = self._policy.evidence.refine(votes_n[None, None, :open_rows])[0, 0]
        self._finite.append(torch.isfinite(scores).all())
        return scores

    # -- allocate, protect, select, pack ------------------------------------------------------------------------------

    def _pack(self, layer: int, scored: _Scored) -> None:
        enter = self._transaction.enter
        for phase in (Phase.PROTECT, Phase.SELECT, Phase.VALIDATE, Phase.ADMIT, Phase.RESERVE):
            enter(layer, phase)
        chosen = self._chosen(layer, scored)
        self.layers[layer] = pack_owners(scored.candidates, scored.maps, chosen, self._heads)
        enter(layer, Phase.PACK)

    def _chosen(self, layer: int, scored: _Scored) -> list[Tensor | None]:
        """Return per owner which candidates stay, ascending; None where all do."""
        if not self.drops_rows:
            return [None] * len(scored.maps)
        chosen: list[Tensor | None] = []
        for row, demand in enumerate(self._demands):
            owners = range(row * self._heads, (row + 1) * self._heads)
            if not self._brought[row]:
                chosen += [None] * self._heads
                continue
            open_rows = list(self._open_BLS[row][layer])
            protected = [self._protected(scored.maps[o].tokens_BMW, demand) for o in owners]
            if self._policy.allocation.splits_by_score:
                competing = [scored.scores[o][~p[0, 0]] for o, p in zip(owners, protected, strict=True)]
                open_rows = self._policy.allocation.split(sum(open_rows), competing)
            for owner, kept_open, is_protected in zip(owners, open_rows, protected, strict=True):
                rows, kept = scored.maps[owner].width, kept_open + demand.protected_rows
                if kept >= rows:
                    chosen.append(None)
                    continue
                live = scored.maps[owner].live_BMW
                keep = keep_best(scored.scores[owner][None, None], live, is_protected, [kept])
                chosen.append(kept_index(keep, [kept]).index_BMK[0, 0])
        return chosen

    def _protected(self, tokens_11n: Tensor, demand: Demand) -> Tensor:
        policy = self._policy
        protected = tokens_11n >= demand.tokens - policy.window_for(demand.mean_rows)
        if policy.pinned_tokens:
            protected = protected | torch.isin(tokens_11n, torch.tensor(policy.pinned_tokens, device=tokens_11n.device))
        return protected
