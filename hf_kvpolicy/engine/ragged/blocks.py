"""One decode token of a policy that chooses among the tokens of its answer, block by block.

Rows are appended to the tail as in any answer. Every token's attention is added to the states of the undecided rows it
votes for; when the oldest undecided block is older than the recent tokens, each layer keeps the block's best rows, and
what is left is packed, as after a prompt segment. All layers are decided at once after the last one.

Letters: L layers, B batch rows, S stored heads, G query heads of one, W undecided rows, oldest first, X state channels,
n rows of one owner.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...allocation import BlockDecay
from ...contract import Transaction
from ...evidence import RecentAttention, reduce_group
from ...frame import LayerStep
from ...masks import MaskRecord
from ...selection import keep_best
from ..decide import check_finite
from ..inputs import ForwardInputs
from ..snapshot import Snapshot
from .append import RaggedAppendStep
from .attend_one import attend_one
from .shared_sets import SharedSets

if TYPE_CHECKING:
    from ..runtime import Runtime

__all__ = ["BlockDecodeStep", "due_blocks"]

# Logits and attention of one query, fp32.
_WEIGHT_BYTES = 8


def due_blocks(runtime: Runtime, inputs: ForwardInputs) -> tuple[bool, ...]:
    """Return for which batch rows this token makes a block older than the recent tokens."""
    policy, snapshot = runtime.composition, runtime.snapshot
    assert policy.decode_blocks is not None
    assert isinstance(policy.evidence, RecentAttention)
    held, due = snapshot.owner_rows(0, policy.stored_heads(runtime.geometry)), []
    for row, (undecided, new) in enumerate(zip(snapshot.undecided_tokens, inputs.new_tokens, strict=True)):
        recent = policy.evidence.recent_tokens(held[row][0] + new)
        due.append(new > 0 and undecided + new >= recent + policy.decode_blocks.tokens)
    return tuple(due)


class BlockDecodeStep(SharedSets, RaggedAppendStep):
    """Appends one token's rows, and drops rows of blocks that are due."""

    def __init__(
        self,
        runtime: Runtime,
        snapshot: Snapshot,
        inputs: ForwardInputs,
        transaction: Transaction,
        due: tuple[bool, ...],
    ) -> None:
        super().__init__(runtime, snapshot, inputs, transaction)
        self._due = due
        # Undecided rows of each batch row, this token's own among them.
        self._undecided = tuple(
            old + new for old, new in zip(snapshot.undecided_tokens, inputs.new_tokens, strict=True)
        )
        self._width = max(self._undecided)
        tails = zip(snapshot.tail_counts, inputs.new_tokens, strict=True)
        self._is_full = all(held + new == snapshot.tail_width + 1 for held, new in tails)
        self._received: dict[int, Tensor] = {}
        self._workspace_bytes = 0

    def attend_history(
        self, backend: str, module: torch.nn.Module, query: Tensor, step: LayerStep, record: MaskRecord, kwargs: Any
    ) -> Tensor:
        """Attend over every owner's own rows; output and evidence share one softmax. [B, 1, Q, D]."""
        base = self.base(step.layer)
        view = self.buffers[step.layer].view(base, self.tail_after.width)
        visibility = self._masks(record)
        masks = visibility.biased(base, visibility.masks(base))
        dropout = kwargs.get("dropout", 0.0)
        output, parts = attend_one(query, view, masks, self.scaling, self.weighting, dropout=dropout)
        self._received[step.layer] = self._of_undecided(step.layer, [part.detach() for part in parts])
        # Keys in fp32 are a copy unless they are that already.
        copied = 0 if query.dtype == torch.float32 else sum(view.lengths) * query.shape[3]
        workspace_bytes = _WEIGHT_BYTES * sum(part.numel() for part in parts) + 4 * copied
        self._workspace_bytes = max(self._workspace_bytes, workspace_bytes)
        return output

    def successor(self) -> Snapshot:
        """Return the snapshot with the new rows, and without what due blocks lose."""
        self.note_transient(self._workspace_bytes)
        successor, scores = super().successor(), self._scores_after()
        if not any(self._due):
            return replace(successor, scores_LBSWX=scores)
        layers = range(self.runtime.geometry.num_layers)
        chosen = [self._chosen(row, scores) if due else [None] * len(layers) for row, due in enumerate(self._due)]
        for layer in layers:
            candidates = self.candidates(layer)
            self.pack_sets(layer, candidates, candidates.maps(), [of_row[layer] for of_row in chosen])
            self.note_transient(0)
        drops = any(index is not None for of_row in chosen for index in of_row)
        due = zip(self.snapshot.settled, self._due, strict=True)
        return replace(
            successor,
            ragged=self.packed_in_order(),
            tail=None,
            tail_counts=(0,) * self.inputs.batch,
            scores_LBSWX=self._without_due(scores),
            settled_tokens=tuple(tokens + self._blocks.tokens * is_due for tokens, is_due in due),
            decision_epoch=successor.decision_epoch + 1,
            evicted_at_column=successor.frontier.columns if drops else successor.evicted_at_column,
        )

    # -- score --------------------------------------------------------------------------------------------------------

    def _of_undecided(self, layer: int, parts: list[Tensor]) -> Tensor:
        """Return what a layer's undecided rows received from this token, summed over heads, [B, 1, W]."""
        base, heads, batch, rows = self.base(layer), self.heads, self.inputs.batch, []
        if len(parts) == 1 and min(self._undecided) == self._width and self._is_full:
            return self._reduced(parts[0].view(batch, heads, *parts[0].shape[1:]), self._width)
        owners = [piece for part in parts for piece in torch.split(part, 1)]
        for row in range(batch):
            own = torch.cat(owners[row * heads : (row + 1) * heads])[None]
            undecided = self._undecided[row]
            index = None if self._is_full else self.live_tail.index(row, base.lengths[row * heads])
            own = own if index is None else own.index_select(3, index.to(own.device))
            received = self._reduced(own, undecided)
            # A pad has no attention of its own.
            received = received if self.inputs.new_tokens[row] else torch.zeros_like(received)
            rows.append(pad(received, (0, self._width - undecided)))
        return torch.cat(rows)

    def _reduced(self, attention_BSGn: Tensor, newest: int) -> Tensor:
        part = attention_BSGn[..., attention_BSGn.shape[3] - newest :]
        if self.runtime.composition.group == "max":
            return reduce_group(part, "max").sum(dim=1, keepdim=True)
        # Rows of one block are compared with one another: they rank alike by a mean over heads and by a sum.
        return part.sum(dim=(1, 2))[:, None]

    def _scores_after(self) -> Tensor:
        old, device = self.snapshot.scores_LBSWX, self.inputs.device
        received_LBSW = torch.stack([self._received[i].to(device) for i in range(self.runtime.geometry.num_layers)])
        scores = self._evidence.votes_of_token(received_LBSW, self._undecided, self._blocks.tokens)
        if old is not None:
            width = min(old.shape[3], self._width)
            scores[:, :, :, :width] += old[:, :, :, :width]
        return scores

    # -- select -------------------------------------------------------------------------------------------------------

    def _chosen(self, row: int, scores_LBSWX: Tensor) -> list[Tensor | None]:
        """Return for each layer which candidates of a batch row stay, ascending; None where all do."""
        undecided, block, layers = self._undecided[row], self._blocks.tokens, self.runtime.geometry.num_layers
        votes_L1W = self._evidence.block_votes(scores_LBSWX[:, row, :, :block], undecided - block)
        check_finite([torch.isfinite(votes_L1W).all()])
        first, device = self.snapshot.settled[row], votes_L1W.device
        pinned = [token in self.runtime.composition.pinned_tokens for token in range(first, first + block)]
        kept = [max(self._blocks.kept_rows(layer, layers), sum(pinned)) for layer in range(layers)]
        protected = torch.tensor(pinned, device=device).expand(layers, 1, -1)
        keep_L1W = keep_best(votes_L1W, torch.ones_like(protected), protected, kept)
        found: list[Tensor | None] = []
        for layer, keep in enumerate(keep_L1W[:, 0]):
            rows = self.base(layer).lengths[row * self.heads] + self.live_tail.count(row)
            stays = torch.ones(rows, dtype=torch.bool, device=device)
            stays[rows - undecided : rows - undecided + block] = keep
            found.append(stays.nonzero()[:, 0] if kept[layer] < block else None)
        return found

    def _without_due(self, scores_LBSWX: Tensor) -> Tensor:
        """Return the scores of what is still undecided."""
        left = [rows - self._blocks.tokens * due for rows, due in zip(self._undecided, self._due, strict=True)]
        parts = [
            pad(scores_LBSWX[:, row : row + 1, :, self._undecided[row] - rows : self._undecided[row]],
                (0, 0, 0, max(left) - rows))
            for row, rows in enumerate(left)
        ]  # fmt: skip
        return torch.cat(parts, dim=1)

    @property
    def _blocks(self) -> BlockDecay:
        blocks = self.runtime.composition.decode_blocks
        assert blocks is not None
        return blocks

    @property
    def _evidence(self) -> RecentAttention:
        evidence = self.runtime.composition.evidence
        assert isinstance(evidence, RecentAttention)
        return evidence
