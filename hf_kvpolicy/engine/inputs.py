"""Reading a forward call at the edge: everything refused is refused here, before any state moves.

Letters: B batch rows, T new columns, F columns fed before.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..errors import BackendAdmissionError, ConfigError
from ..frame import Reader
from ..geometry import text_config
from ..storage import RowMap
from .snapshot import Frontier, Snapshot
from .token_kinds import TokenKinds

__all__ = ["ForwardInputs", "new_rows_map", "read_inputs"]

# M-RoPE: positions of text, then of time, height and width.
_TEXT_AND_IMAGE_AXES = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardInputs:
    """One forward's new columns."""

    batch: int
    length: int
    device: torch.device
    # Which new columns are real tokens, bool [B, T]; None when all are.
    real_BT: Tensor | None
    # Real tokens among the new columns, per batch row.
    new_tokens: tuple[int, ...]
    # Current 2-D mask over all columns, only when it differs from what was fed before; hides stored rows.
    changed_mask_BF: Tensor | None
    # Whether masked columns, if any, all come first (then candidates need no sorting).
    left_padded: bool
    frontier_after: Frontier
    # What the caller reads beside the last position, in words; None for nothing.
    also_read: str | None = None

    @property
    def brought(self) -> tuple[bool, ...]:
        """Whether each batch row has a real token among the new columns."""
        return tuple(new > 0 for new in self.new_tokens)


def read_inputs(
    module: torch.nn.Module,
    arguments: Mapping[str, Any],
    snapshot: Snapshot,
    reader: Reader | None,
    kinds: TokenKinds | None = None,
    moves_keys: bool = False,
) -> ForwardInputs:
    """Validate a decoder call against what the cache holds.

    Args:
        kinds: which tokens the policy treats apart; None for policies that do not ask.
        moves_keys: whether the policy turns keys to other positions.

    Raises:
        ConfigError: the call cannot be right (see each message for the remedy).
        BackendAdmissionError: the call is being exported.
    """
    _refuse_modes(module, arguments, moves_keys)
    embedded = arguments.get("input_ids")
    embedded = arguments.get("inputs_embeds") if embedded is None else embedded
    if embedded is None:
        raise ConfigError("The model was called with a policy cache but without input_ids or inputs_embeds.")
    batch, length = int(embedded.shape[0]), int(embedded.shape[1])
    frontier = snapshot.frontier
    if length == 0:
        raise ConfigError(
            f"The forward brings no new token, but the cache already holds {frontier.columns} columns. If this is a "
            "new, shorter prompt, call cache.reset() first; if it continues, pass the whole conversation so far."
        )
    if frontier.columns and batch != snapshot.batch_size:
        raise ConfigError(
            f"The cache holds {snapshot.batch_size} batch rows, but this forward brings {batch}. Use "
            "cache.batch_select_indices or cache.batch_repeat_interleave to change the batch, or a new cache."
        )
    mask = _two_dimensional(arguments.get("attention_mask"), batch, frontier.columns + length, embedded.device)
    real, changed, left_padded = _new_columns(mask, frontier)
    new_tokens = (length,) * batch if real is None else tuple(int(n) for n in real.sum(-1).tolist())
    old_tokens = frontier.tokens or (0,) * batch
    after = Frontier(
        columns=frontier.columns + length,
        tokens=tuple(a + b for a, b in zip(old_tokens, new_tokens, strict=True)),
        position_offsets=_position_offsets(arguments.get("position_ids"), frontier, real, batch, length)
        if _takes_positions(type(module).forward)
        else (None,) * batch,
        seen_BF=_seen_after(mask, frontier, length),
        kinds_BF=None if kinds is None else _kinds_after(kinds.of(_ids(arguments, reader, (batch, length))), frontier),
    )
    return ForwardInputs(
        batch=batch,
        length=length,
        device=embedded.device,
        real_BT=real,
        new_tokens=new_tokens,
        changed_mask_BF=changed,
        left_padded=left_padded,
        frontier_after=after,
        also_read=_also_read(module, arguments, reader),
    )


@lru_cache(maxsize=32)
def _takes_positions(forward: Any) -> bool:
    """Whether a decoder is told positions; one that is not (ALiBi) reads them off the mask, pads and all."""
    parameters = inspect.signature(forward).parameters
    return "position_ids" in parameters or "input_ids" not in parameters


def _also_read(module: torch.nn.Module, arguments: Mapping[str, Any], reader: Reader | None) -> str | None:
    config: Any = module.config
    wants_states = arguments.get("output_hidden_states")
    if config.output_hidden_states if wants_states is None else wants_states:
        return "the hidden states of every layer (output_hidden_states=True)"
    if reader is None or reader.logits_to_keep is None:
        return "the decoder's output at every position"
    if reader.has_labels:
        return "a loss over every position (labels)"
    keep = reader.logits_to_keep
    if isinstance(keep, int) and keep == 1:
        return None
    return "the logits of every position" if isinstance(keep, int) and keep == 0 else "more logits than the last"


def _refuse_modes(module: torch.nn.Module, arguments: Mapping[str, Any], moves_keys: bool) -> None:
    config: Any = module.config
    if moves_keys and getattr(arguments.get("position_ids"), "ndim", 2) == 3:
        raise ConfigError(
            "positions='cache_local' moves rotated keys, but positions of this forward have several axes (M-RoPE), and "
            "a shift along one sequence is none along them. Use positions='original'."
        )
    if torch.compiler.is_compiling():
        raise BackendAdmissionError(
            "A model cannot be exported with a policy cache, which chooses rows by numbers on the host. Export it with "
            "transformers' own cache; torch.compile without fullgraph=True does run policy caches."
        )
    use_cache = arguments.get("use_cache")
    if (text_config(config).use_cache if use_cache is None else use_cache) is False:
        raise ConfigError(
            "The model runs with use_cache=False although a policy cache was given: transformers would feed the whole "
            "sequence again at every step. Pass use_cache=True, or set model.generation_config.use_cache = True."
        )
    wants_weights = arguments.get("output_attentions")
    if config.output_attentions if wants_weights is None else wants_weights:
        raise ConfigError(
            "output_attentions=True asks for full attention matrices, which a compressed cache does not have. "
            "Run without it; use an uncompressed cache to inspect attention."
        )
    if module.training and any(getattr(part, "gradient_checkpointing", False) for part in module.modules()):
        raise ConfigError(
            "Gradient checkpointing in training mode drops the cache silently. Call model.eval(), or "
            "model.gradient_checkpointing_disable(), before using a policy cache."
        )


def _two_dimensional(mask: Any, batch: int, columns: int, device: torch.device) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ConfigError(
            f"The attention mask must be 2-D (batch, columns) so that it can follow the rows the cache keeps; got "
            f"{shape}. Prepared 4-D masks are tied to an uncompressed cache."
        )
    if tuple(mask.shape) != (batch, columns):
        raise ConfigError(
            f"The attention mask has shape {tuple(mask.shape)}, but the cache has been fed so many columns that it "
            f"must be ({batch}, {columns}): every column ever fed (padding included), then the new ones. Feed no token "
            "again; for a new prompt call cache.reset() or make a new cache."
        )
    return mask.to(device=device, dtype=torch.bool)


def _new_columns(mask: Tensor | None, frontier: Frontier) -> tuple[Tensor | None, Tensor | None, bool]:
    """Return (real new columns or None, changed mask or None, whether pads come first)."""
    if mask is None or bool(mask.all()):
        return None, None, True
    past = mask[:, : frontier.columns]
    seen = frontier.seen_BF
    unchanged = bool(past.all()) if seen is None else torch.equal(past, seen.to(past.device))
    real = mask[:, frontier.columns :]
    if bool(real.all()):
        return None, None if unchanged else mask, True
    left_padded = bool((real[:, 1:] >= real[:, :-1]).all())
    return real, None if unchanged else mask, left_padded


def _seen_after(mask: Tensor | None, frontier: Frontier, length: int) -> Tensor | None:
    if mask is None:
        if frontier.seen_BF is None:
            return None
        ones = torch.ones((frontier.seen_BF.shape[0], length), dtype=torch.bool, device=frontier.seen_BF.device)
        return torch.cat([frontier.seen_BF, ones], dim=1)
    if frontier.seen_BF is None:
        return None if bool(mask.all()) else mask.clone()
    # What was a pad when it was fed stays one: it was never stored, whatever a later mask says.
    return torch.cat([frontier.seen_BF.to(mask.device), mask[:, frontier.columns :]], dim=1)


def _ids(arguments: Mapping[str, Any], reader: Reader | None, shape: tuple[int, int]) -> Tensor | None:
    """Return the ids of the new tokens, from the decoder's call or from that of the model around it."""
    ids: Tensor | None = arguments.get("input_ids")
    if ids is None and reader is not None and reader.input_ids is not None:
        ids = reader.input_ids if tuple(reader.input_ids.shape) == shape else None
    return ids


def _kinds_after(new_BT: Tensor, frontier: Frontier) -> Tensor:
    old = frontier.kinds_BF
    return new_BT.clone() if old is None else torch.cat([old.to(new_BT.device), new_BT], dim=1)


def _position_offsets(
    position_ids: Any, frontier: Frontier, real: Tensor | None, batch: int, length: int
) -> tuple[int | None, ...]:
    """Check that each row's first new token takes the row's next position; return position minus token index."""
    if position_ids is None:
        # The model then numbers by column.
        device = None if real is None else real.device
        position_ids = torch.arange(frontier.columns, frontier.columns + length, device=device)[None]
    if position_ids.ndim == 3:
        # Several axes: with one more than images have, the first is that of the text; else none counts tokens.
        if position_ids.shape[0] != _TEXT_AND_IMAGE_AXES:
            return frontier.position_offsets or (None,) * batch
        position_ids = position_ids[0]
    if position_ids.ndim != 2 or position_ids.shape[1] != length:
        raise ConfigError(
            f"position_ids must have one position per new token, (batch, {length}); got {tuple(position_ids.shape)}."
        )
    starts, has_real = _starts(position_ids, real, batch)
    known = frontier.position_offsets or (None,) * batch
    tokens = frontier.tokens or (0,) * batch
    offsets: list[int | None] = []
    for row in range(batch):
        offset = starts[row] - tokens[row]
        if not has_real[row]:
            offsets.append(known[row])
            continue
        if known[row] is not None and offset != known[row]:
            raise ConfigError(
                f"Batch row {row} continues at position {starts[row]}, but its next position is "
                f"{tokens[row] + (known[row] or 0)}: tokens would be fed again or skipped. Continue with only the new "
                "tokens; for a new prompt call cache.reset() or make a new cache. Pad prompts of unequal length on the "
                'left: tokenizer.padding_side = "left".'
            )
        offsets.append(offset)
    return tuple(offsets)


def _starts(position_ids: Tensor, real: Tensor | None, batch: int) -> tuple[list[int], list[bool]]:
    """Return the position of each row's first real token, and whether it has one."""
    if real is None:
        starts = [int(p) for p in position_ids[:, 0].tolist()]
        return (starts * batch if len(starts) == 1 else starts), [True] * batch
    positions = position_ids.expand(batch, -1)
    first = real.int().argmax(-1, keepdim=True).to(positions.device)
    return [int(p) for p in positions.gather(1, first)[:, 0].tolist()], [bool(x) for x in real.any(-1).tolist()]


def new_rows_map(inputs: ForwardInputs, snapshot: Snapshot) -> RowMap:
    """Return the map of a forward's own columns, one map head; pads are dead from the start."""
    batch, length, device = inputs.batch, inputs.length, inputs.device
    first = snapshot.frontier.columns
    old = snapshot.frontier.tokens or (0,) * batch
    start = torch.tensor(old, dtype=torch.int32, device=device).view(-1, 1, 1)
    columns = (
        torch.arange(first, first + length, dtype=torch.int32, device=device).repeat(batch, 1, 1).view(batch, 1, -1)
    )
    if inputs.real_BT is None and length == 1:
        live = torch.ones((batch, 1, 1), dtype=torch.bool, device=device)
        tokens = start
    elif inputs.real_BT is None:
        live = torch.ones((batch, 1, length), dtype=torch.bool, device=device)
        tokens = start + torch.arange(length, dtype=torch.int32, device=device)
    else:
        live = inputs.real_BT[:, None, :].clone()
        tokens = start + live.cumsum(-1, dtype=torch.int32) - 1
    return RowMap(columns_BMW=columns, tokens_BMW=tokens, live_BMW=live, ordered=True)
