"""Profile heads after a prompt, give each a family of policies, and select the rows its family keeps (0x08H).

Letters: L layers, O owners (b * S + s), B batch rows, S stored heads, G query heads of one owner, T new tokens, W held
queries, Q query heads, D head dimension, n rows of one owner, X state channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...allocation import FULL_FAMILY, FamilyRule, HeadMass
from ...contract import Phase, Transaction
from ...evidence import MeanAttention
from ...selection import ProtectedParts, class_ranks, keep_by_class, row_classes
from ...storage import RaggedLayer, RowMap
from ..composition import Composition
from ..decide import check_finite
from ..evidence_blocks import SegmentQueries, attend_queries, observe_queries, workspace_bytes
from ..snapshot import Frontier, Snapshot
from ..token_kinds import PUNCTUATION_TOKEN, SPECIAL_TOKEN
from .owners import OwnerCandidates, OwnerQueries
from .pack import OwnerDecider, pack_owners

__all__ = ["FamilyDecider"]

_MEANS = MeanAttention()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Owner:
    """One owner's candidates."""

    number: int
    row: int  # batch row
    head: int  # stored head
    table: RowMap
    kinds_n: Tensor  # `engine/token_kinds.py`


class FamilyDecider(OwnerDecider):
    """One selection in which every owner has a policy of its own."""

    def __init__(
        self,
        composition: Composition,
        rule: FamilyRule,
        transaction: Transaction,
        *,
        heads: int,
        before: Snapshot,
        frontier: Frontier,
        budget_rows: Sequence[int],
        ends_prompt: bool,
    ) -> None:
        """Open a selection.

        Args:
            heads: stored heads of a batch row.
            before: what was published, with the families chosen then.
            frontier: how far each batch row has come, candidates included.
            budget_rows: rows each owner may keep, for each batch row.
            ends_prompt: the selection closes a prompt segment (and not a decode step).
        """
        self._policy, self._rule, self._transaction = composition, rule, transaction
        self._heads, self._frontier, self._budget_rows = heads, frontier, budget_rows
        self._families_LO = before.families_LO
        self._profile_tokens = list(before.profile_tokens or (0,) * len(budget_rows))
        again = ends_prompt and composition.on_append == "recompress"
        self._measures = [again or not tokens for tokens in self._profile_tokens]
        self._chosen_LO: list[tuple[int, ...]] = []
        self._finite: list[Tensor] = []
        # States of the layer whose queries have attended, until its rows are chosen.
        self._attended: list[Tensor] | None = None
        self._dropped = 0
        self.layers: dict[int, RaggedLayer] = {}

    @property
    def observes(self) -> bool:
        """Every query counts: in a profile, and in the rows' means."""
        return True

    @property
    def drops_rows(self) -> bool:
        """Whether an owner lost a row."""
        return self._dropped > 0

    @property
    def may_attend(self) -> bool:
        """Whether a prompt's output may come from the softmax of its profile: one that is kept whole equals stock."""
        return self._rule.recovery < 1.0

    def attend(self, layer: int, candidates: OwnerCandidates, queries_BQTD: Tensor, seen: OwnerQueries) -> Tensor:
        """Attend with a prompt's queries over every owner's rows and add them to the states at once. [B, T, Q, D]."""
        batch, heads, tokens, _ = queries_BQTD.shape
        dim = candidates.rows(0)[1].shape[-1]
        output_BTQD = queries_BQTD.new_zeros((batch, tokens, heads, dim))
        self._attended = self._states(layer, candidates, queries_BQTD, seen, output_BTQD)
        return output_BTQD

    def observe(
        self, layer: int, candidates: OwnerCandidates, queries_BQWD: Tensor | None, seen: OwnerQueries | None
    ) -> None:
        """Profile, choose and pack one layer."""
        enter = self._transaction.enter
        enter(layer, Phase.SCORE)
        attended, self._attended = self._attended, None
        states = self._states(layer, candidates, queries_BQWD, seen) if attended is None else attended
        maps, families, chosen = candidates.maps(), [], []
        for number, (table, state_nX) in enumerate(zip(maps, states, strict=True)):
            owner = self._owner(number, table)
            family = self._families_LO[layer][number] if self._families_LO else FULL_FAMILY
            if self._evidence(owner.row).local_rows is not None:
                family = self._profile(state_nX, owner)
            families.append(family)
            chosen.append(self._kept(state_nX, owner, family))
        for phase in (Phase.PROTECT, Phase.SELECT, Phase.VALIDATE, Phase.ADMIT, Phase.RESERVE):
            enter(layer, phase)
        self._chosen_LO.append(tuple(families))
        self._dropped += sum(m.width - k.shape[0] for m, k in zip(maps, chosen, strict=True) if k is not None)
        kept_states = [state_nX[:, :2] for state_nX in states]
        self.layers[layer] = pack_owners(candidates, maps, chosen, self._heads, kept_states)
        enter(layer, Phase.PACK)

    def finish(self, num_layers: int) -> tuple[RaggedLayer, ...]:
        """Return all layers.

        Raises:
            SelectionError: a score is not finite; the model's activations are broken.
        """
        check_finite(self._finite)
        return tuple(self.layers[layer] for layer in range(num_layers))

    def decided(self) -> dict[str, Any]:
        """Return the families, and the tokens they were chosen by."""
        return {"families_LO": tuple(self._chosen_LO), "profile_tokens": tuple(self._profile_tokens)}

    # -- score --------------------------------------------------------------------------------------------------------

    def _states(
        self,
        layer: int,
        candidates: OwnerCandidates,
        queries_BQWD: Tensor | None,
        seen: OwnerQueries | None,
        output_BTQD: Tensor | None = None,
    ) -> list[Tensor]:
        """Return every owner's states with the observed queries added, and write their output where it is wanted."""
        if seen is not None and not layer:
            self._open_profiles(seen)
        base, states = candidates.base, list[Tensor]()
        held = base.ordered().states_PX
        carried = None if held is None else torch.split(held, list(base.lengths))
        for number, table in enumerate(candidates.maps()):
            row, head = divmod(number, self._heads)
            evidence = self._evidence(row)
            keys_nD, values_nD = candidates.rows(number)
            state_nX = torch.zeros(table.width, evidence.channels, device=keys_nD.device)
            if carried is not None:
                state_nX[: base.lengths[number], :2] = carried[number].to(state_nX.device)
            if seen is not None and queries_BQWD is not None and seen.count(row):
                queries = self._queries(layer, row, head, table, keys_nD, queries_BQWD, seen)
                self.workspace_bytes = max(
                    self.workspace_bytes, workspace_bytes(evidence, queries.queries_BQTD, table.width)
                )
                if output_BTQD is None:
                    observe_queries(evidence, self._policy.group, state_nX[None, None], queries)
                else:
                    attended = attend_queries(
                        evidence, self._policy.group, state_nX[None, None], queries, values_nD[None, None]
                    )
                    seen.place(output_BTQD, attended, row, head, self._heads)
                self._finite.append(torch.isfinite(state_nX).all())
            states.append(state_nX.to(table.device))
        return states

    def _open_profiles(self, seen: OwnerQueries) -> None:
        """Fix which batch rows are profiled: those that brought queries, and were not profiled or are to be again."""
        for row, measures in enumerate(self._measures):
            self._measures[row] = measures and seen.count(row) > 0
            if self._measures[row]:
                self._profile_tokens[row] = self._frontier.tokens[row]

    def _evidence(self, row: int) -> MeanAttention:
        tokens = self._profile_tokens[row]
        return MeanAttention(local_rows=self._rule.local_rows(tokens) if self._measures[row] and tokens else None)

    def _owner(self, number: int, table: RowMap) -> _Owner:
        row, head = divmod(number, self._heads)
        assert self._frontier.kinds_BF is not None, "families know the tokens of every column"
        kinds_n = self._frontier.kinds_BF[row].index_select(0, table.columns_BMW[0, 0].long())
        return _Owner(number=number, row=row, head=head, table=table, kinds_n=kinds_n)

    def _queries(
        self,
        layer: int,
        row: int,
        head: int,
        table: RowMap,
        keys_nD: Tensor,
        queries_BQWD: Tensor,
        seen: OwnerQueries,
    ) -> SegmentQueries:
        """Return the observed queries of one owner and the rows they may see."""
        queries_1GWD = seen.of_owner(queries_BQWD, row, head, self._heads)
        shown, newest = seen.seen(row, head, self._heads, table), self._frontier.tokens[row]
        tokens_1W = torch.arange(newest - queries_1GWD.shape[2], newest, device=keys_nD.device)[None]
        return SegmentQueries(
            layer=layer,
            queries_BQTD=queries_1GWD,
            columns_BT=shown.columns_BW,
            query_tokens_BT=tokens_1W,
            real_BT=None,
            clock_BT=torch.zeros_like(tokens_1W),
            keys_BSND=keys_nD[None, None],
            view=table,
            visibility=shown.visibility,
            scaling=seen.scaling,
            weighting=seen.weighting.of_owners([head], self._heads),
        )

    # -- choose, protect, select --------------------------------------------------------------------------------------

    def _profile(self, state_nX: Tensor, owner: _Owner) -> int:
        """Return the family that is enough for one owner."""
        tokens_n, tokens = owner.table.tokens_BMW[0, 0], self._profile_tokens[owner.row]
        pinned = torch.tensor(self._policy.pinned_tokens, dtype=tokens_n.dtype, device=tokens_n.device)
        head = HeadMass(
            mass_N=state_nX[:, 2],
            band_N=state_nX[:, 3],
            mean_N=_MEANS.scores(state_nX, tokens_n),
            always_N=(owner.kinds_n == SPECIAL_TOKEN) | torch.isin(tokens_n, pinned),
            punctuation_N=owner.kinds_n == PUNCTUATION_TOKEN,
            newest_N=tokens_n >= tokens - self._rule.local_rows(tokens),
        )
        return self._rule.choose(head, tokens, self._budget_rows[owner.row])

    def _kept(self, state_nX: Tensor, owner: _Owner, family: int) -> Tensor | None:
        """Return which rows of one owner stay; None where all do."""
        tokens_n = owner.table.tokens_BMW[0, 0]
        terms = self._rule.terms(family, self._profile_tokens[owner.row], self._frontier.tokens[owner.row])
        parts = ProtectedParts(
            sinks=self._policy.sinks,
            protect=self._policy.protect,
            newest_from=terms.newest_from,
            punctuation=terms.punctuation,
        )
        marks = (owner.kinds_n == SPECIAL_TOKEN, owner.kinds_n == PUNCTUATION_TOKEN)
        classes = row_classes(tokens_n, *marks, parts)
        ranks = class_ranks(_MEANS.scores(state_nX, tokens_n), classes, tokens_n)
        return keep_by_class(classes, ranks, terms.quota_rows, self._budget_rows[owner.row])
