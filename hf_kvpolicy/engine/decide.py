"""Score, protect, select and pack: from a layer's candidates to the rows that stay.

Letters: B batch rows, M map heads, S stored heads, N candidate rows, K kept rows, W observed queries, P pinned rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..contract import Phase, Transaction
from ..errors import SelectionError
from ..evidence import CarriedEvidence, LayerObservation
from ..geometry import CacheGeometry
from ..selection import Kept, keep_best, kept_index, reduce_heads
from ..storage import DenseRows, RowMap, gather_rows, growth_slots, pack_rows
from ..weighting import PLAIN, Weighting
from .composition import Composition
from .replacing import stored_fields
from .shared_evidence import evidence_once
from .visibility import SeenRows

if TYPE_CHECKING:
    from .merged import LayerMerging

__all__ = ["Candidates", "Decider", "Observed", "check_finite", "tensor_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """The rows of one layer among which is chosen."""

    keys_BSND: Tensor
    values_BSND: Tensor
    map: RowMap
    # States the rows carry, [B, S, N, X]; None for evidence without any.
    states_BSNX: Tensor | None = None
    # The store that the first of them lie in, if any do.
    stored: DenseRows | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observed:
    """The last queries of a segment in one layer, and how they see the candidates."""

    queries_BQWD: Tensor | None
    real_BW: Tensor | None
    visibility: SeenRows | None
    scaling: float
    weighting: Weighting = PLAIN


@dataclass(slots=True, eq=False)
class _Waiting:
    layer: int
    candidates: Candidates


class Decider:
    """One selection over all layers: decides per layer, after the deeper one of a pair, or after the last one."""

    def __init__(
        self,
        composition: Composition,
        geometry: CacheGeometry,
        transaction: Transaction,
        *,
        counts: Sequence[int],
        budget_rows: Sequence[int],
        newest_tokens: Sequence[int],
        brought: Sequence[bool],
        moves_keys: bool,
        justified: bool,
        ends_prompt: bool = True,
        merging: LayerMerging | None = None,
    ) -> None:
        """Open a selection.

        Args:
            counts: candidate rows per owner, for each batch row.
            budget_rows: rows each owner may keep, for each batch row.
            newest_tokens: real tokens of each batch row, so that the window's rows are known.
            brought: whether each batch row has a token in what ends here; one without keeps what it holds.
            moves_keys: whether rows at cache-local positions are attended through moved copies of their keys.
            justified: candidates come in ascending token order with dead slots, if any, first.
            ends_prompt: the selection closes a prompt segment (and not a decode step).
            merging: takes what stays of layers that share a store.
        """
        self.kept_counts = tuple(
            composition.kept_rows(count, budget) if own else count
            for count, budget, own in zip(counts, budget_rows, brought, strict=True)
        )
        self.ends_prompt, self._brought, self._moves_keys = ends_prompt, brought, moves_keys
        self._merging = merging
        self.states: dict[int, Tensor] = {}
        self.drops_rows = self.kept_counts != tuple(counts)
        self._composition, self._geometry, self._transaction = composition, geometry, transaction
        self._budget_rows, self._newest, self._justified = budget_rows, newest_tokens, justified
        self._shared: Kept | None = None
        self._shared_map: RowMap | None = None
        self._waiting: list[_Waiting] = []
        self._votes: Tensor | None = None
        self.rows: dict[int, DenseRows] = {}
        self.maps: dict[int, RowMap] = {}
        self.workspace_bytes = 0
        # Bytes of candidates held for layers to come, when the last layer came.
        self.held_bytes = 0
        # Coded slots of candidates, and whether others were coded.
        self._coded_before, self.codes_rows = 0, False
        self._finite: list[Tensor] = []

    @property
    def is_final(self) -> bool:
        """Whether what was fed before cannot be taken back: rows were dropped or coded."""
        return self.drops_rows or self.codes_rows

    def observe(self, layer: int, candidates: Candidates, seen: Observed) -> None:
        """Score one layer and, unless its unit spans layers, choose and pack its rows."""
        policy, enter = self._composition, self._transaction.enter
        enter(layer, Phase.SCORE)
        self.held_bytes = 0
        is_paired = policy.unit == "pair" and self._merging is not None and layer in self._merging
        if policy.is_positional:
            if self._shared is None:
                self._shared = self._choose(candidates.map, self._score(layer, candidates, seen))
            self._pack(layer, candidates, self._shared, shared=True)
        elif policy.decides_after_all_layers or is_paired:
            self._waiting.append(_Waiting(layer, candidates))
            self.held_bytes = sum(tensor_bytes(w.candidates.keys_BSND, w.candidates.values_BSND) for w in self._waiting)
            if self.drops_rows:
                votes = self._score(layer, candidates, seen)
                self._votes = votes if self._votes is None else self._votes + votes
            if is_paired and len(self._waiting) == 2:
                self._choose_together(shared=False)
        else:
            votes_or_none = self._score(layer, candidates, seen) if self.drops_rows else None
            self._pack(layer, candidates, self._choose(candidates.map, votes_or_none), shared=False)

    def finish(self, num_layers: int) -> dict[str, Any]:
        """Complete the selection; return all layers' buffers and maps (one where all share it), as snapshot fields.

        Raises:
            SelectionError: a score is not finite; the model's activations are broken.
        """
        if self._waiting:
            self._choose_together(shared=True)
        check_finite(self._finite)
        maps = (self._shared_map,) if self._shared_map is not None else tuple(self.maps[i] for i in range(num_layers))
        if self._composition.quantizes and self.is_final:
            from .coded_again import drop_dead_blocks  # not imported where rows stay as they are

            maps = drop_dead_blocks(self._coded_before, self.rows, maps, self.states)
        return {**stored_fields(self._merging, self.rows), "maps": maps}

    # -- score ------------------------------------------------------------------------------------------------------

    def _score(self, layer: int, candidates: Candidates, seen: Observed) -> Tensor:
        """Return a layer's votes, where its map lies: rows may lie elsewhere."""
        policy, device = self._composition, candidates.keys_BSND.device
        observation = LayerObservation(
            layer=layer,
            queries_BQWD=seen.queries_BQWD,
            observed_BW=None if seen.real_BW is None else seen.real_BW.to(device),
            keys_BHND=candidates.keys_BSND,
            tokens_BMN=candidates.map.tokens_BMW.to(device),
            visibility=seen.visibility,
            scaling=seen.scaling,
            weighting=seen.weighting,
            state_BSNX=candidates.states_BSNX,
        )
        heads = policy.stored_heads(self._geometry)
        votes = evidence_once(
            policy.evidence,
            ("votes", layer, policy.group, heads),
            lambda: policy.evidence.votes(observation, group=policy.group, score_heads=heads),
        )
        self.workspace_bytes = max(
            self.workspace_bytes,
            _vote_workspace(observation, self._geometry) + tensor_bytes(votes) + _bias_bytes(seen),
        )
        votes = reduce_heads(votes, policy.unit) if policy.evidence.differs_by_layer else votes
        return votes.to(candidates.map.device)

    # -- protect and select -----------------------------------------------------------------------------------------

    def _choose(self, table: RowMap, votes_BMN: Tensor | None) -> Kept:
        """Return gather indices into the candidates, in ascending token order, pinned rows first if any are pinned."""
        order = None if self._justified else _ascending(table)
        if order is not None:
            table = table.gathered(order, torch.ones_like(order, dtype=torch.bool), ordered=True)
        keep = table.live_BMW
        if self.drops_rows:
            assert votes_BMN is not None
            keep = self._keep(table, votes_BMN if order is None else _along(votes_BMN, order))
        kept = self._index(table, keep)
        if order is None:
            return kept
        index = order.expand(kept.index_BMK.shape[0], kept.index_BMK.shape[1], -1).gather(2, kept.index_BMK)
        return Kept(index_BMK=index, live_BMK=kept.live_BMK)

    def _keep(self, table: RowMap, votes_BMN: Tensor) -> Tensor:
        policy = self._composition
        live = table.live_BMW
        if live.shape[1] < votes_BMN.shape[1]:
            live = live.expand(-1, votes_BMN.shape[1], -1)
        scores = votes_BMN
        if policy.evidence.differs_by_layer:
            # Votes of window rows are dropped before pooling: the window stays anyway and must not lend its votes.
            open_columns = max(0, table.width - policy.window_rows)
            prefix = votes_BMN[:, :, :open_columns].masked_fill(~live[:, :, :open_columns], 0.0)
            refined = policy.evidence.refine(prefix) if open_columns else prefix
            scores = torch.zeros_like(votes_BMN)
            scores[:, :, :open_columns] = refined
            self._finite.append(torch.isfinite(scores).all())
        protected = self._protected(table).expand_as(live) & live
        newest = isinstance(policy.evidence, CarriedEvidence) and policy.evidence.keeps_newest_on_ties
        return keep_best(scores, live, protected, self.kept_counts, keeps_newest_on_ties=newest)

    def _protected(self, table: RowMap) -> Tensor:
        policy = self._composition
        tokens = table.tokens_BMW
        protected = self._recent(tokens)
        if policy.sinks:
            protected = protected | (tokens < policy.sinks)
        if policy.protect:
            protected = protected | torch.isin(tokens, torch.tensor(policy.protect, device=tokens.device))
        return protected

    def _recent(self, tokens_BMN: Tensor) -> Tensor:
        """Return which rows are among the newest ones that this selection protects."""
        pairs = zip(self._newest, self._budget_rows, strict=True)
        first = [newest - self._composition.window_for(budget) for newest, budget in pairs]
        return tokens_BMN >= torch.tensor(first, device=tokens_BMN.device).view(-1, 1, 1)

    def _index(self, table: RowMap, keep: Tensor) -> Kept:
        pinned = self._pinned
        if not pinned:
            return kept_index(keep, self.kept_counts)
        wanted = torch.tensor(pinned, device=keep.device).view(1, 1, -1, 1)
        found = (table.tokens_BMW[:, :, None, :] == wanted) & keep[:, :, None, :]
        is_pinned = found.any(2)
        rest = keep & ~is_pinned
        rest_counts = [int(n) for n in rest.sum(-1).amax(1).tolist()]
        others = kept_index(rest, rest_counts)
        return Kept(
            index_BMK=torch.cat([found.int().argmax(-1), others.index_BMK], dim=2),
            live_BMK=torch.cat([found.any(-1), others.live_BMK], dim=2),
        )

    @property
    def _pinned(self) -> tuple[int, ...]:
        return self._composition.pinned_tokens if self._composition.positions == "cache_local" else ()

    def _choose_together(self, *, shared: bool) -> None:
        """Choose one set for the layers that wait, by the sum of their votes."""
        kept = self._choose(self._waiting[0].candidates.map, self._votes)
        for waiting in self._waiting:
            self._pack(waiting.layer, waiting.candidates, kept, shared=shared)
        self._waiting.clear()
        self._votes = None

    # -- pack -------------------------------------------------------------------------------------------------------

    def _pack(self, layer: int, candidates: Candidates, kept: Kept, *, shared: bool) -> None:
        enter, policy = self._transaction.enter, self._composition
        for phase in (Phase.PROTECT, Phase.SELECT, Phase.VALIDATE, Phase.ADMIT, Phase.RESERVE):
            enter(layer, phase)
        coded = candidates.stored if candidates.stored is not None and candidates.stored.coded_slots else None
        if coded is not None:
            from .coded_again import kept_in_blocks  # not imported where rows stay as they are

            kept = kept_in_blocks(kept, coded, candidates.map.width)
        if not shared or self._shared_map is None:
            # Pinned rows come first whatever their token, so the order is ascending only without them.
            ordered = not self._pinned and (coded is None or candidates.map.ordered)
            packed = candidates.map.gathered(kept.index_BMK, kept.live_BMK, ordered=ordered)
            if shared:
                self._shared_map = packed
            else:
                self.maps[layer] = packed
        if policy.quantizes:
            live_BMK = (self.maps[layer] if self._shared_map is None else self._shared_map).live_BMW
            self.rows[layer] = self._coded_rows(candidates, coded, kept, live_BMK)
        else:
            self._pack_rows(layer, candidates, kept)
        if candidates.states_BSNX is not None:
            self._pack_states(layer, candidates, candidates.states_BSNX, kept.index_BMK)
        enter(layer, Phase.PACK)

    def _pack_rows(self, layer: int, candidates: Candidates, kept: Kept) -> None:
        capacity, kept_rows = self._capacity(kept.index_BMK.shape[2]), kept.index_BMK.shape[2]
        shares_store = self._merging is not None and layer in self._merging
        rows = self._packed(candidates, kept, kept_rows if shares_store else capacity)
        if self._merging is None or not shares_store:
            self.rows[layer] = rows
            return
        index = kept.index_BMK.to(candidates.keys_BSND.device)
        workspace_bytes = self._merging.pack(layer, rows, index, kept.live_BMK, capacity)
        self.workspace_bytes = max(self.workspace_bytes, workspace_bytes)

    def _coded_rows(self, candidates: Candidates, coded: DenseRows | None, kept: Kept, live_BMK: Tensor) -> DenseRows:
        from .coded import code_layer  # not imported where rows stay as they are
        from .coded_again import packed_behind

        if coded is None:
            rows = self._packed(candidates, kept, self._capacity(kept.index_BMK.shape[2]))
        else:
            rows, self._coded_before = packed_behind(coded, kept, partial(self._packed, candidates)), coded.coded_slots
        rows = code_layer(self._composition, rows, kept.index_BMK.shape[2], live_BMK)
        self.codes_rows = self.codes_rows or rows.coded_slots > self._coded_before
        return rows

    def _packed(self, candidates: Candidates, kept: Kept, capacity: int) -> DenseRows:
        return pack_rows(
            candidates.keys_BSND,
            candidates.values_BSND,
            kept.index_BMK.to(candidates.keys_BSND.device),
            stored_heads=self._composition.stored_heads(self._geometry),
            capacity=capacity,
            pinned=len(self._pinned) if self._moves_keys else 0,
        )

    def _pack_states(self, layer: int, candidates: Candidates, states_BSNX: Tensor, index_BMK: Tensor) -> None:
        evidence = self._composition.evidence
        assert isinstance(evidence, CarriedEvidence)
        packed = gather_rows(states_BSNX, index_BMK.to(states_BSNX.device), states_BSNX.shape[1])
        if self.ends_prompt:
            tokens = candidates.map.tokens_BMW.expand(-1, index_BMK.shape[1], -1).gather(2, index_BMK)
            recent = self._recent(tokens).to(packed.device)
            for row, own in enumerate(self._brought):
                if own:
                    evidence.close_prompt_(packed[row], recent[row])
        self.states[layer] = packed.to(candidates.map.device)

    def stacked_states(self) -> Tensor | None:
        """Return the kept rows' states of all layers, [L, B, S, K, X]; None for evidence without any."""
        if not self.states:
            return None
        return torch.stack([self.states[i] for i in range(len(self.states))])

    def _capacity(self, kept: int) -> int:
        """A full every-step cache needs one spare slot for ever; others grow."""
        if self._composition.schedule == "every_step" and kept >= max(self._budget_rows):
            return kept + 1
        return growth_slots(kept)


def check_finite(flags: Sequence[Tensor | bool]) -> None:
    """Refuse a selection by scores that are not numbers.

    Raises:
        SelectionError: a flag is false; the model's activations are broken.
    """
    if any(not bool(flag) for flag in flags):
        raise SelectionError(
            "A score is not finite: attention produced NaN or infinity, so no row can be chosen. Check the model's "
            "dtype (fp16 overflow) and inputs; the cache still holds the state before this forward."
        )


def _ascending(table: RowMap) -> Tensor:
    """Return indices [B, M, N] that bring dead slots first and live rows into ascending token order."""
    key = torch.where(table.live_BMW, table.tokens_BMW, -1)
    return torch.argsort(key, dim=-1, stable=True)


def _along(votes_BMN: Tensor, order_BMN: Tensor) -> Tensor:
    return votes_BMN.gather(2, order_BMN.expand(-1, votes_BMN.shape[1], -1))


def tensor_bytes(*tensors: Tensor) -> int:
    """Return the bytes of tensors' elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _bias_bytes(seen: Observed) -> int:
    if seen.queries_BQWD is None or seen.visibility is None:
        return 0
    return seen.visibility.bias_bytes(*seen.queries_BQWD.shape[:2])


def _vote_workspace(seen: LayerObservation, geometry: CacheGeometry) -> int:
    """Bytes of scoring one KV head at a time: fp32 logits and attention, and the head's keys in fp32."""
    if seen.queries_BQWD is None:
        return 0
    batch, _, window, dim = seen.queries_BQWD.shape
    rows = seen.keys_BHND.shape[2]
    return 4 * batch * rows * (2 * geometry.group_size * window + dim)
