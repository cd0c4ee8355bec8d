"""A forward of a policy that merges consecutive tokens: decide, average, attend over what is stored, close segments.

Every owner has closed segments in its slots, rotated at their newest token, and one trailing segment beside them. A
query sees the closed segments and the trailing one as it is after the query's own token. For many tokens at once every
state of the trailing segment is a row of its own, and a later query sees those that a token closed: what the tokens
would see one by one. One token needs no mask: its row, and before it the segment it closes, are written behind the
closed ones, where nothing published lies.

Tokens that wait for acceptance are not merged yet. They are kept with what they decide and merged as they are accepted.

Letters: B batch rows, H KV heads, Q query heads, T new tokens, S states (one before the tokens, then one after each), O
owners (b * H + h), P rows of all owners, N rows, X channels of keys and values together, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ..backends import MASK_BLOCK_ELEMENTS
from ..contract import Phase, Transaction
from ..errors import IntegrityError
from ..frame import LayerStep
from ..masks import MaskRecord
from ..positions import shift_keys
from ..ragged_attention import attend_ragged
from ..representation.token_segments import TokenSegments, partial_means
from ..storage import RaggedLayer, RaggedMap, RaggedRows, RaggedView, stored_tensors
from ..storage.trailing import PendingTokens, TrailingSegments
from .inputs import ForwardInputs
from .ragged.layers import RaggedForward
from .snapshot import Frontier, Snapshot
from .token_frame import TokenFrame, frame_of

if TYPE_CHECKING:
    from ..representation import RowRepresentation
    from .runtime import Runtime

__all__ = ["MergedTokensStep", "merge_pending", "token_segments"]

# Some of a forward's queries, and their masks by owner; None where they see all rows.
_Block: TypeAlias = tuple[slice, list[Tensor | None] | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _States:
    """The trailing segment of every owner before the new tokens and after each of them."""

    means_BHSX: Tensor
    masses_BHS: Tensor
    # Which of them a token closed: its segment is a stored row from then on.
    closed_BHS: Tensor
    # What attention reads of them, in the rows' dtype.
    keys_BHSD: Tensor
    values_BHSD: Tensor


class MergedTokensStep(RaggedForward):
    """Merges every new token into its owner's trailing segment, or begins another."""

    def __init__(self, runtime: Runtime, snapshot: Snapshot, inputs: ForwardInputs, transaction: Transaction) -> None:
        super().__init__(runtime, snapshot, inputs, transaction)
        self._rule, self._rotary = token_segments(runtime.composition.representation), runtime.rotary()
        self._layers: dict[int, RaggedLayer] = {}
        self._pending: dict[int, PendingTokens] = {}
        self._dense_bytes = 0

    def append(self, layer: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store nothing yet: what becomes of a row is decided by its query too."""
        return keys_BHTD, values_BHTD

    def _attention(
        self, backend: str, module: torch.nn.Module, query: Tensor, step: LayerStep, record: MaskRecord, kwargs: Any
    ) -> Tensor:
        layer, old = step.layer, self._before(step.layer, step.keys, step.values)
        frame = self._frame.to(step.keys.device)
        query, new = self._decided(layer, query, step, frame)
        rotated = self._rotary.rotates(layer)
        states = _states(self._rule, old, new, frame, rotated=rotated, like=step.keys)
        # Slots carry no gradient, so that a token that learns reads scratch rows too.
        learns = torch.is_grad_enabled() and (query.requires_grad or step.keys.requires_grad)
        if self.inputs.length == 1 and not learns:
            view, masks = self._one_token(old, states, record, frame)
            blocks: Iterable[_Block] = [(slice(None), masks)]
        else:
            view = _scratch(old, states)
            blocks = self._blocks(old.map, states, record, frame, view)
        options = {"scaling": self.scaling, "dropout": kwargs.get("dropout", 0.0), "weighting": self.weighting}
        parts = [attend_ragged(backend, query[:, :, part], view, masks, **options) for part, masks in blocks]
        output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        with stored_tensors():
            if self.runtime.recording:
                self._pending[layer], self._layers[layer] = new.copied(), old
            else:
                self._layers[layer] = _packed(old, states, frame)
        self.buffers[layer] = self._layers[layer].rows
        self._dense_bytes = sum(part.nbytes for part in (states.means_BHSX, states.keys_BHSD, states.values_BHSD))
        self._dense_bytes += 0 if view.keys_ND is self.buffers[layer].keys_ND else view.keys_ND.nbytes
        return output

    def attended(self, layer: int, query_BQTD: Tensor, step: LayerStep, record: MaskRecord, scaling: float) -> None:
        """Nothing is left to pack: the rows lie where they are published."""
        self.note_transient(self._dense_bytes)
        self.transaction.enter_through(layer, Phase.PACK)

    @property
    def candidate_rows(self) -> int:
        """Rows that are published: a merged token is not dropped."""
        layers = self.runtime.geometry.num_layers
        trailing = layers * self.heads * sum(tokens > 0 for tokens in self.inputs.frontier_after.tokens)
        return trailing + sum(sum(layer.map.lengths) for layer in self._layers.values())

    def successor(self) -> Snapshot:
        old, inputs, layers = self.snapshot, self.inputs, range(self.runtime.geometry.num_layers)
        after = replace(
            old,
            generations=self.transaction.successor,
            frontier=inputs.frontier_after,
            ragged=tuple(self._layers[i] for i in layers),
            segment_tokens=old.ended(inputs.frontier_after.tokens, inputs.brought)
            if inputs.length > 1 or not old.segment_tokens
            else old.segment_tokens,
            last_was_segment=inputs.length > 1,
        )
        if self.runtime.recording:
            pending = tuple(self._pending[i] for i in layers)
            held = old.tail_counts or (0,) * inputs.batch
            counts = tuple(a + b for a, b in zip(held, inputs.new_tokens, strict=True))
            return replace(after, pending=pending, tail=self.new_map(), tail_counts=counts)
        return _merged(after, before=old.frontier)

    @cached_property
    def _frame(self) -> TokenFrame:
        offsets = self.inputs.frontier_after.position_offsets
        return frame_of(self.new_map(), self.snapshot.frontier, offsets, self._rotary)

    def _before(self, layer: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> RaggedLayer:
        if self.snapshot.ragged:
            return self.snapshot.ragged[layer]
        batch, heads, device = self.inputs.batch, self.heads, keys_BHTD.device
        with stored_tensors():
            nothing = torch.empty(0, dtype=torch.int32, device=self.inputs.device)
            masses = torch.empty((0, 1), dtype=torch.float32, device=self.inputs.device)
            owners = batch * heads
            return RaggedLayer(
                rows=RaggedRows.allocate(keys_BHTD, values_BHTD, (0,) * owners, heads),
                map=RaggedMap.of([(nothing, nothing)] * owners, heads, [masses] * owners),
                trailing=TrailingSegments.none(batch, heads, keys_BHTD.shape[3] + values_BHTD.shape[3], device),
            )

    def _decided(
        self, layer: int, query_BQTD: Tensor, step: LayerStep, frame: TokenFrame
    ) -> tuple[Tensor, PendingTokens]:
        """Return queries without the deciding channel, and the new tokens with what they decide."""
        keys, queries = step.keys.float(), query_BQTD.float()
        rotated = self._rotary.rotates(layer)
        if rotated:
            keys, queries = shift_keys(keys, frame.back), shift_keys(queries, frame.back)
        made = self._rule.decide(keys, queries)
        new = PendingTokens(
            rows_BHTX=torch.cat([self._rule.without_control(keys), step.values.float()], dim=3),
            accumulates_BHT=made.accumulates_BHT,
            weights_BHT=made.weights_BHT,
        )
        queries = self._rule.without_control(queries)
        if rotated:
            queries = self._rule.without_control(shift_keys(queries, frame.own))
        return queries.to(query_BQTD.dtype), new

    def _one_token(
        self, old: RaggedLayer, states: _States, record: MaskRecord, frame: TokenFrame
    ) -> tuple[RaggedView, list[Tensor | None] | None]:
        """Return what one token reads: closed segments, one it closes itself, and its own row behind them."""
        used = old.map.lengths
        closes_BH = states.closed_BHS[:, :, 0]
        rows = old.rows.grown(used, [length + 2 for length in used])
        # Where nothing is closed, the token's own row comes first and the slot behind it is not read.
        at_first = closes_BH[..., None, None]
        pairs = []
        for part in (states.keys_BHSD, states.values_BHSD):
            pairs.append(torch.cat([torch.where(at_first, part[:, :, :1], part[:, :, 1:]), part[:, :, 1:]], dim=2))
        with torch.no_grad():
            rows.write(old.map.lengths_O, 0, *pairs)
        closes_O = closes_BH.flatten().tolist()
        lengths = tuple(length + 1 + int(closes) for length, closes in zip(used, closes_O, strict=True))
        view = RaggedView(
            keys_ND=rows.keys_ND, values_ND=rows.values_ND, heads=self.heads, starts=rows.starts, lengths=lengths
        )
        if self._shows_all(record):
            return view, None
        base, own = self._shown(old.map, states, record, frame, slice(0, 1))
        masks: list[Tensor | None] = []
        for owner, (held, closes) in enumerate(zip(base, closes_O, strict=True)):
            masks.append(torch.cat([held, own[owner][:, 0 if closes else 1 :]], dim=1))
        return view, masks

    def _blocks(
        self, base: RaggedMap, states: _States, record: MaskRecord, frame: TokenFrame, view: RaggedView
    ) -> Iterator[_Block]:
        """Yield runs of queries with their masks by owner: all of them together would be as large as logits."""
        width = max(1, MASK_BLOCK_ELEMENTS // max(1, sum(view.lengths)))
        for start in range(0, self.inputs.length, width):
            part = slice(start, min(start + width, self.inputs.length))
            held, own = self._shown(base, states, record, frame, part)
            yield part, [torch.cat(both, dim=1) for both in zip(held, own, strict=True)]

    def _shows_all(self, record: MaskRecord) -> bool:
        return self.inputs.changed_mask_BF is None and record.is_causal_for(self.inputs.frontier_after.columns)

    def _shown(
        self, base: RaggedMap, states: _States, record: MaskRecord, frame: TokenFrame, part: slice
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return which closed segments and which states some of the queries see, per owner, bool [t, n] and [t, S]."""
        device, everything = states.masses_BHS.device, self._shows_all(record)
        queries = torch.arange(self.inputs.length, device=device)[part]
        count = queries.shape[0]
        index_S = torch.arange(states.masses_BHS.shape[2], device=device)
        # State s is closed by token s, and after its own token t a query is at state t + 1.
        past_tS, own_tS = index_S <= queries[:, None], index_S == queries[:, None] + 1
        own_BHtS = states.closed_BHS[:, :, None] & past_tS
        base_tP = torch.ones((1, 1), dtype=torch.bool, device=device).expand(count, sum(base.lengths))
        if not everything:
            own_BHtS = own_BHtS & self._allowed(record, frame.columns_BS, part)[:, None]
            owners = torch.arange(len(base.lengths), device=base.device) // base.heads
            batch_P = torch.repeat_interleave(owners, base.lengths_O.long(), output_size=sum(base.lengths))
            base_tP = self._allowed_rows(record, base.columns_P, batch_P, part).to(device)
        own_OtS = (own_BHtS | own_tS).flatten(0, 1)
        return list(torch.split(base_tP, list(base.lengths), dim=1)), list(own_OtS.unbind(0))

    def _allowed(self, record: MaskRecord, columns_BS: Tensor, part: slice) -> Tensor:
        """Return which rows at these columns some queries may see, bool [B, t, S]."""
        columns = columns_BS.long().clamp(min=0)
        queries = self.query_columns().long().to(columns.device)[:, part]
        allowed = record.allows(queries[:, None, :, None], columns[:, None, None, :])[:, 0]
        changed = self.inputs.changed_mask_BF
        return allowed if changed is None else allowed & changed.to(columns.device).gather(1, columns)[:, None]

    def _allowed_rows(self, record: MaskRecord, columns_P: Tensor, batch_P: Tensor, part: slice) -> Tensor:
        """Return the same of flat rows, bool [t, P]."""
        queries = self.query_columns().long().to(columns_P.device)[:, part]
        allowed = record.allows(queries[:1, None, :, None], columns_P.long()[None, None, None])[0, 0]
        changed = self.inputs.changed_mask_BF
        return allowed if changed is None else allowed & changed.to(columns_P.device)[batch_P, columns_P.long()]


def token_segments(representation: RowRepresentation) -> TokenSegments:
    """Return a representation that merges tokens; any other has no step here."""
    if not isinstance(representation, TokenSegments):
        raise IntegrityError(f"{representation.name} replaces rows in a way that no step of the engine knows.")
    return representation


def merge_pending(runtime: Runtime, accepted: Snapshot, length: int) -> Snapshot:
    """Return an accepted snapshot whose last `length` columns, which waited, are merged as if they were fed now."""
    rule, spec = token_segments(runtime.composition.representation), runtime.rotary()
    frontier, tail = accepted.frontier, accepted.tail
    assert tail is not None, "what waits was appended"
    columns, seen = frontier.columns - length, frontier.seen_BF
    new = tail.live_BMW[:, 0].sum(-1).tolist()
    before = Frontier(
        columns=columns,
        tokens=tuple(now - own for now, own in zip(frontier.tokens, new, strict=True)),
        seen_BF=None if seen is None else seen[:, :columns],
    )
    shared, layers = frame_of(tail, before, frontier.position_offsets, spec), []
    for layer, (old, waiting) in enumerate(zip(accepted.ragged, accepted.pending, strict=True)):
        assert isinstance(waiting, PendingTokens), "this step left them"
        frame, rotated = shared.to(waiting.device), spec.rotates(layer)
        states = _states(rule, old, waiting.first(length), frame, rotated=rotated, like=old.rows.keys_ND)
        layers.append(_packed(old, states, frame))
    merged = replace(accepted, ragged=tuple(layers), pending=(), tail=None)
    return _merged(merged, before=before)


def _merged(snapshot: Snapshot, *, before: Frontier) -> Snapshot:
    """Return a snapshot with its trailing segments counted; what was merged cannot be taken back."""
    now, old = snapshot.frontier, before.tokens or (0,) * snapshot.batch_size
    return replace(
        snapshot,
        tail_counts=tuple(int(tokens > 0) for tokens in now.tokens),
        evicted_at_column=now.columns if now.tokens != old else snapshot.evicted_at_column,
    )


def _states(
    rule: TokenSegments, old: RaggedLayer, new: PendingTokens, frame: TokenFrame, *, rotated: bool, like: Tensor
) -> _States:
    """Average new tokens into the trailing segments, state by state."""
    assert old.trailing is not None, "a layer that merges tokens has a trailing segment"
    live_B1T = frame.live_BS[:, None, 1:]
    # A batch row's first token begins whatever it decides.
    first_B1T = frame.fresh_B[:, None, None] & (live_B1T.cumsum(-1) == 1)
    begins = live_B1T & (~new.accumulates_BHT | first_B1T)
    means, masses = partial_means(
        torch.cat([old.trailing.means_BHX[:, :, None], new.rows_BHTX], dim=2),
        torch.cat([old.trailing.masses_BH[:, :, None], new.weights_BHT], dim=2),
        torch.cat([torch.ones_like(begins[:, :, :1]), begins], dim=2),
        frame.live_BS if frame.has_pads else None,
    )
    keys, values = torch.split(means, [old.rows.keys_ND.shape[1], old.rows.values_ND.shape[1]], dim=3)
    if rotated:
        keys = rule.without_control(shift_keys(keys, frame.there))
    return _States(
        means_BHSX=means,
        masses_BHS=masses,
        closed_BHS=torch.cat([begins, torch.zeros_like(begins[:, :, :1])], dim=2) & (masses > 0),
        keys_BHSD=keys.to(like.dtype),
        values_BHSD=values.to(like.dtype),
    )


def _scratch(old: RaggedLayer, states: _States) -> RaggedView:
    """Return closed segments and all states of every owner, back to back."""
    lengths, count = old.map.lengths, states.keys_BHSD.shape[2]
    flat = []
    for stored, part in ((old.rows.keys_ND, states.keys_BHSD), (old.rows.values_ND, states.values_BHSD)):
        own_OSD = part.flatten(0, 1)
        pieces = [own_OSD.flatten(0, 1)]
        if any(lengths):
            held = [stored[begin : begin + rows] for begin, rows in zip(old.rows.starts, lengths, strict=True)]
            pieces = [rows for both in zip(held, own_OSD.unbind(0), strict=True) for rows in both]
        flat.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
    sizes = [rows + count for rows in lengths]
    starts = tuple(sum(sizes[:owner]) for owner in range(len(sizes)))
    return RaggedView(keys_ND=flat[0], values_ND=flat[1], heads=old.rows.heads, starts=starts, lengths=tuple(sizes))


def _packed(old: RaggedLayer, states: _States, frame: TokenFrame) -> RaggedLayer:
    """Return the layer with newly closed segments behind its others, and the trailing ones as they are now."""
    closed_OS = states.closed_BHS.flatten(0, 1)
    counts = closed_OS.sum(-1).tolist()
    trailing = TrailingSegments(
        means_BHX=states.means_BHSX[:, :, -1].detach().clone(), masses_BH=states.masses_BHS[:, :, -1].detach().clone()
    )
    used = old.map.lengths
    # Two slots more: what the next token reads.
    rows = old.rows.grown(used, [held + own + 2 for held, own in zip(used, counts, strict=True)])
    if not any(counts):
        return replace(old, rows=rows, trailing=trailing)
    owner_N, state_N = closed_OS.nonzero().unbind(1)
    rank_N = (closed_OS.cumsum(-1) - 1)[owner_N, state_N]
    slots_N = (rows.starts_O + old.map.lengths_O.to(rows.device)).long()[owner_N] + rank_N
    keys, values = (part.detach().flatten(0, 1) for part in (states.keys_BHSD, states.values_BHSD))
    rows.put(slots_N, keys[owner_N, state_N], values[owner_N, state_N])
    batch_N, device = owner_N // rows.heads, old.map.device
    columns, tokens, masses = (
        part.to(device)
        for part in (
            frame.columns_BS[batch_N, state_N],
            frame.tokens_BS[batch_N, state_N],
            states.masses_BHS.detach().flatten(0, 1)[owner_N, state_N, None],
        )
    )
    return RaggedLayer(rows=rows, map=old.map.extended(counts, columns, tokens, masses), trailing=trailing)
