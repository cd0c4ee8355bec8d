"""A published snapshot as named tensors and plain JSON, and back.

Letters: B batch rows, S stored heads, C capacity in slots, D head dimension, F columns ever fed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..compat import mask_rule
from ..contract import Generations
from ..engine.queries import QueryWindow
from ..engine.snapshot import Frontier, OpenSegment, Snapshot
from ..errors import BackendAdmissionError, ConfigError, IntegrityError
from ..masks import MaskRecord
from ..storage import RaggedLayer, RaggedMap, RaggedRows, RowMap
from ..weighting import Weighting
from .foreign import decode_foreign, encode_foreign
from .rows import blocks_of_owners, decode_rows, encode_rows, joined_owners, split_owners

if TYPE_CHECKING:
    from ..storage.merged import MergedPair
    from ..storage.trailing import TrailingSegments

__all__ = ["Tensors", "decode", "encode"]

Tensors = dict[str, Tensor]
_MAP_PARTS = {"columns": torch.int32, "tokens": torch.int32, "live": torch.bool}


def encode(snapshot: Snapshot) -> tuple[dict[str, Any], Tensors]:
    """Return a snapshot's facts as plain JSON values and its tensors by name.

    Raises:
        ConfigError: an open segment is masked by a rule that cannot be named.
    """
    frontier, tensors = snapshot.frontier, Tensors()
    row_facts, row_tensors = encode_rows(snapshot)
    tensors |= row_tensors
    for layer, stored in enumerate(snapshot.ragged):
        tensors |= _ragged_tensors(f"layer.{layer}", stored, snapshot.tail_width)
    for index, part in enumerate(snapshot.maps):
        tensors |= _map_tensors(f"map.{index}", part)
    if snapshot.tail is not None:
        tensors |= _map_tensors("tail", snapshot.tail)
    if snapshot.scores_LBSWX is not None:
        tensors["scores"] = snapshot.scores_LBSWX
    for name, fed in (("frontier.seen", frontier.seen_BF), ("frontier.kinds", frontier.kinds_BF)):
        if fed is not None:
            tensors[name] = fed
    facts = {
        "generations": asdict(snapshot.generations),
        "frontier": {
            "columns": frontier.columns,
            "tokens": list(frontier.tokens),
            "position_offsets": list(frontier.position_offsets),
        },
        **row_facts,
        "ragged": [
            {"lengths": list(s.map.lengths), "capacities": list(s.rows.capacities), "heads": s.rows.heads}
            | blocks_of_owners(s.rows)
            for s in snapshot.ragged
        ],
        "pairs": _encode_pairs(snapshot, tensors),
        "producers": list(snapshot.producers),
        "maps_ordered": [part.ordered for part in snapshot.maps],
        "tail_ordered": None if snapshot.tail is None else snapshot.tail.ordered,
        "counts": list(snapshot.counts),
        "tail_counts": list(snapshot.tail_counts),
        "budget_rows": None if snapshot.budget_rows is None else list(snapshot.budget_rows),
        "families": [list(layer) for layer in snapshot.families_LO],
        "profile_tokens": list(snapshot.profile_tokens),
        "segment_tokens": list(snapshot.segment_tokens),
        "settled_tokens": list(snapshot.settled_tokens),
        "open_segment": None,
        "last_was_segment": snapshot.last_was_segment,
        "decision_epoch": snapshot.decision_epoch,
        "evicted_at_column": snapshot.evicted_at_column,
        "foreign": [encode_foreign(layer, f"foreign.{i}", tensors) for i, layer in enumerate(snapshot.foreign)],
    }
    if snapshot.open_segment is not None:
        facts["open_segment"] = _encode_segment(snapshot.open_segment, tensors)
    return facts, tensors


def decode(
    facts: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    device: torch.device,
    layer_devices: Sequence[torch.device],
    foreign: Sequence[tuple[Any, torch.device]] = (),
) -> Snapshot:
    """Rebuild a snapshot on the devices given; every tensor is copied.

    Args:
        foreign: empty cache layers of transformers for the layers no policy acts on, and where each belongs.

    Raises:
        IntegrityError: facts and tensors do not belong together.
    """
    frontier, pool = facts["frontier"], _Pool(tensors)
    maps = tuple(_map(pool, f"map.{i}", ordered, device) for i, ordered in enumerate(facts["maps_ordered"]))
    tail = None if facts["tail_ordered"] is None else _map(pool, "tail", facts["tail_ordered"], device)
    producers = tuple(facts.get("producers", ()))
    at = [layer_devices[layer] for layer in sorted(set(producers))] or layer_devices
    rows = decode_rows(pool.take, pool.take_if_any, facts, at)
    width = 0 if tail is None else tail.width
    ragged = tuple(_ragged(pool, i, fact, width, layer_devices[i], device) for i, fact in enumerate(facts["ragged"]))
    segment = facts["open_segment"]
    snapshot = Snapshot(
        generations=Generations(**facts["generations"]),
        frontier=Frontier(
            columns=frontier["columns"],
            tokens=tuple(frontier["tokens"]),
            position_offsets=tuple(frontier["position_offsets"]),
            seen_BF=pool.take_if_any("frontier.seen", device),
            kinds_BF=pool.take_if_any("frontier.kinds", device),
        ),
        rows=rows,
        maps=maps,
        ragged=ragged,
        pairs=_decode_pairs(facts.get("pairs", ()), pool, layer_devices),
        producers=producers,
        tail=tail,
        counts=tuple(facts["counts"]),
        tail_counts=tuple(facts["tail_counts"]),
        budget_rows=None if facts["budget_rows"] is None else tuple(facts["budget_rows"]),
        scores_LBSWX=pool.take_if_any("scores", device),
        families_LO=tuple(tuple(layer) for layer in facts["families"]),
        profile_tokens=tuple(facts["profile_tokens"]),
        segment_tokens=tuple(facts["segment_tokens"]),
        settled_tokens=tuple(facts["settled_tokens"]),
        open_segment=None if segment is None else _decode_segment(segment, pool, device, layer_devices),
        last_was_segment=facts["last_was_segment"],
        decision_epoch=facts["decision_epoch"],
        evicted_at_column=facts["evicted_at_column"],
        foreign=tuple(
            decode_foreign(fact, layer, f"foreign.{i}", pool.take_if_any, at)
            for i, (fact, (layer, at)) in enumerate(zip(facts["foreign"], foreign, strict=True))
        ),
    )
    pool.require_empty()
    _check_shapes(snapshot)
    return snapshot


def _encode_pairs(snapshot: Snapshot, tensors: Tensors) -> list[dict[str, Any]]:
    facts = []
    for pair in snapshot.pairs:
        from .pairs import encode_pair  # not imported where rows stay as they are

        own, parts = encode_pair(pair, snapshot.width)
        facts.append(own)
        tensors |= parts
    return facts


def _decode_pairs(
    facts: Sequence[Mapping[str, Any]], pool: _Pool, layer_devices: Sequence[torch.device]
) -> tuple[MergedPair, ...]:
    pairs = []
    for fact in facts:
        from .pairs import decode_pair

        pairs.append(decode_pair(pool.take, fact, layer_devices))
    return tuple(pairs)


class _Pool:
    """Named tensors, each taken once."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._left = dict(tensors)

    def take(self, name: str, device: torch.device) -> Tensor:
        """Return a copy: tensors of a file are windows on all of it."""
        if name not in self._left:
            raise IntegrityError(f"The saved cache lacks the tensor {name!r}, which its record names.")
        return self._left.pop(name).to(device, copy=True)

    def take_if_any(self, name: str, device: torch.device) -> Tensor | None:
        return self.take(name, device) if name in self._left else None

    def require_empty(self) -> None:
        if self._left:
            raise IntegrityError(f"The saved cache has tensors that its record does not explain: {sorted(self._left)}.")


def _map_tensors(name: str, part: RowMap) -> Tensors:
    return {
        f"{name}.columns": part.columns_BMW,
        f"{name}.tokens": part.tokens_BMW,
        f"{name}.live": part.live_BMW,
    }


def _map(pool: _Pool, name: str, ordered: bool, device: torch.device) -> RowMap:
    parts = {part: pool.take(f"{name}.{part}", device) for part in _MAP_PARTS}
    if any(
        parts[part].dtype != dtype or parts[part].shape != parts["live"].shape for part, dtype in _MAP_PARTS.items()
    ):
        raise IntegrityError(f"The saved map {name!r} has parts of unequal shape or wrong type.")
    return RowMap(columns_BMW=parts["columns"], tokens_BMW=parts["tokens"], live_BMW=parts["live"], ordered=ordered)


def _ragged_used(lengths: Sequence[int], capacities: Sequence[int], tail_width: int, has_spare: bool) -> list[int]:
    """Return how many of each owner's first slots hold its rows: with a spare slot among them, one more."""
    return [min(rows + tail_width + has_spare, room) for rows, room in zip(lengths, capacities, strict=True)]


def _ragged_tensors(name: str, stored: RaggedLayer, tail_width: int) -> Tensors:
    table = stored.map
    used = _ragged_used(table.lengths, stored.rows.capacities, tail_width, table.is_open)
    rows, used, blocks = split_owners(name, stored.rows, used)
    parts = [rows.owner(owner, slots) for owner, slots in enumerate(used)]
    optional = {"states": table.states_PX, "spare": table.spare_O}
    if stored.trailing is not None:
        optional |= {"trailing_means": stored.trailing.means_BHX, "trailing_masses": stored.trailing.masses_BH}
    return {
        f"{name}.keys": torch.cat([keys for keys, _ in parts]),
        f"{name}.values": torch.cat([values for _, values in parts]),
        f"{name}.columns": table.columns_P,
        f"{name}.tokens": table.tokens_P,
        **{f"{name}.{part}": tensor for part, tensor in optional.items() if tensor is not None},
        **blocks,
    }


def _ragged(
    pool: _Pool, layer: int, facts: Mapping[str, Any], tail_width: int, device: torch.device, map_device: torch.device
) -> RaggedLayer:
    """Rebuild a layer's flat slots: saved back to back, laid out with their slack again."""
    lengths, capacities, heads = facts["lengths"], facts["capacities"], facts["heads"]
    keys, values = pool.take(f"layer.{layer}.keys", device), pool.take(f"layer.{layer}.values", device)
    columns, tokens = (pool.take(f"layer.{layer}.{part}", map_device) for part in ("columns", "tokens"))
    states, spare = (pool.take_if_any(f"layer.{layer}.{part}", map_device) for part in ("states", "spare"))
    fits = len(lengths) == len(capacities) and all(
        n + tail_width <= room for n, room in zip(lengths, capacities, strict=True)
    )
    used = _ragged_used(lengths, capacities, tail_width, spare is not None) if fits else []
    coded = facts.get("coded", [0] * len(used))
    used, capacities = ([a - b for a, b in zip(part, coded, strict=False)] for part in (used, capacities))
    fits = fits and all(n >= 0 for n in used)
    sound = fits and sum(used) == keys.shape[0] == values.shape[0] and columns.dtype == tokens.dtype == torch.int32
    # An open map tells of the dead slot too, even where the buffers have no room for it yet.
    told = sum(lengths) + (0 if spare is None else len(lengths))
    if (
        not sound
        or columns.shape != (told,)
        or any(part.shape[0] != told for part in (tokens, states) if part is not None)
        or (spare is not None and spare.shape != (len(lengths),))
        or len(used) % heads
    ):
        raise IntegrityError(f"Layer {layer} was saved with rows, lengths and capacities that contradict one another.")
    rows = RaggedRows.allocate(keys, values, capacities, heads)
    for owner, (key, value) in enumerate(zip(torch.split(keys, used), torch.split(values, used), strict=True)):
        into_keys, into_values = rows.owner(owner, used[owner])
        into_keys.copy_(key)
        into_values.copy_(value)
    rows = joined_owners(pool.take, pool.take_if_any, f"layer.{layer}", facts, rows)
    table = RaggedMap(
        columns_P=columns,
        tokens_P=tokens,
        lengths_O=torch.tensor(lengths, dtype=torch.int32, device=map_device),
        lengths=tuple(lengths),
        heads=heads,
        states_PX=states,
        spare_O=spare,
    )
    return RaggedLayer(rows=rows, map=table, trailing=_trailing(pool, layer, rows, device))


def _trailing(pool: _Pool, layer: int, rows: RaggedRows, device: torch.device) -> TrailingSegments | None:
    """Rebuild the segments that tokens still join, of a cache that merges tokens."""
    names = [f"layer.{layer}.trailing_{part}" for part in ("means", "masses")]
    means, masses = (pool.take_if_any(name, device) for name in names)
    if means is None or masses is None:
        return None
    from ..storage.trailing import TrailingSegments  # not imported where rows stay as they are

    owners = (len(rows.starts) // rows.heads, rows.heads)
    channels = rows.keys_ND.shape[1] + rows.values_ND.shape[1]
    if means.shape != (*owners, channels) or masses.shape != owners or {means.dtype, masses.dtype} != {torch.float32}:
        raise IntegrityError(f"Layer {layer} was saved with growing segments that do not fit its rows.")
    return TrailingSegments(means_BHX=means, masses_BH=masses)


def _check_shapes(snapshot: Snapshot) -> None:
    batch, width, columns = snapshot.batch_size, snapshot.width, snapshot.frontier.columns
    fed = [part for part in (snapshot.frontier.seen_BF, snapshot.frontier.kinds_BF) if part is not None]
    parts = [*snapshot.maps, *([] if snapshot.tail is None else [snapshot.tail])]
    heads, layers = 1, len(snapshot.rows) + 2 * len(snapshot.pairs)
    for shaped in (*(rows.keys_BSCD for rows in snapshot.rows), *(pair.keys.shared_BHCD for pair in snapshot.pairs)):
        heads = shaped.shape[1]
    per_row = [snapshot.frontier.position_offsets, snapshot.counts, snapshot.tail_counts, snapshot.budget_rows]
    per_row += [snapshot.profile_tokens, snapshot.settled_tokens]
    sound = (
        (not layers or len(snapshot.maps) in (1, layers))
        and all(pair.keys.shared_BHCD.shape[0] == batch and pair.capacity >= width for pair in snapshot.pairs)
        and all(part.live_BMW.shape[0] == batch and part.map_heads in (1, heads) for part in parts)
        and len({part.width for part in snapshot.maps}) <= 1
        and all(rows.keys_BSCD.shape[:2] == (batch, heads) and rows.capacity >= width for rows in snapshot.rows)
        and all(len(layer.map.lengths) == batch * layer.map.heads for layer in snapshot.ragged)
        and all(tuple(part.shape) == (batch, columns) for part in fed)
        and all(not values or len(values) == batch for values in per_row)
    )
    if not sound:
        raise IntegrityError("The saved maps, buffers and counts do not describe one and the same cache.")


def _encode_segment(segment: OpenSegment, tensors: Tensors) -> dict[str, Any]:
    for layer, queries in enumerate(segment.queries_BQWD):
        tensors[f"segment.queries.{layer}"] = queries
    for layer, weighting in enumerate(segment.weightings):
        if weighting.sinks_Q is not None:
            tensors[f"segment.sinks.{layer}"] = weighting.sinks_Q
    window = segment.window
    if window is not None:
        tensors["segment.columns"] = window.columns_BW
        for name, part in (("real", window.real_BW), ("index", window.index_BW)):
            if part is not None:
                tensors[f"segment.{name}"] = part
    return {
        "start_column": segment.start_column,
        "scalings": list(segment.scalings),
        "softcaps": [weighting.softcap for weighting in segment.weightings],
        "rule": _rule_facts(segment.rule),
        "held_layers": len(segment.queries_BQWD),
        "has_window": window is not None,
    }


def _decode_segment(
    facts: Mapping[str, Any], pool: _Pool, device: torch.device, layer_devices: Sequence[torch.device]
) -> OpenSegment:
    window = None
    if facts["has_window"]:
        columns = pool.take("segment.columns", device)
        parts = [pool.take_if_any(name, device) for name in ("segment.real", "segment.index")]
        window = QueryWindow(columns_BW=columns, real_BW=parts[0], index_BW=parts[1])
    return OpenSegment(
        start_column=facts["start_column"],
        scalings=tuple(facts["scalings"]),
        weightings=tuple(
            Weighting(softcap=softcap, sinks_Q=pool.take_if_any(f"segment.sinks.{i}", layer_devices[i]))
            for i, softcap in enumerate(facts["softcaps"])
        ),
        rule=_rule(facts["rule"]),
        window=window,
        queries_BQWD=tuple(pool.take(f"segment.queries.{i}", layer_devices[i]) for i in range(facts["held_layers"])),
    )


def _rule_facts(rule: MaskRecord) -> dict[str, Any]:
    """Name a masking rule; a function cannot be saved."""
    window = rule.window_tokens
    if window is None and rule.is_causal_for(sys.maxsize):
        return {"kind": "causal"}
    if window is not None and _is_sliding(rule, window):
        return {"kind": "sliding_window", "tokens": window}
    raise ConfigError(
        "A prompt of this cache still waits for its selection, and its mask is neither plain causal nor a sliding "
        "window, so it cannot be saved. Call cache.finish_prefill() first."
    )


def _rule(facts: Mapping[str, Any]) -> MaskRecord:
    if facts["kind"] not in ("causal", "sliding_window"):
        raise IntegrityError(f"The saved prompt segment has the masking rule {facts['kind']!r}, which does not exist.")
    window = None if facts["kind"] == "causal" else int(facts["tokens"])
    return MaskRecord("sdpa", {"mask_function": mask_rule(window), "local_size": window, "use_vmap": False}).rule_only()


def _is_sliding(rule: MaskRecord, window: int) -> bool:
    """Compare a rule with a sliding window by what it does, at and around every edge a window or a chunk can have."""
    last = 3 * window + 3
    edges = {edge + step for edge in (0, window, 2 * window, 3 * window) for step in (-1, 0, 1, 2)}
    queries = torch.tensor(sorted(q for q in edges if 0 <= q <= last)).view(1, 1, -1, 1)
    rows = torch.arange(last + 1).view(1, 1, 1, -1)
    try:
        allowed = rule.allows(queries, rows)
    except BackendAdmissionError:
        return False
    except (IndexError, RuntimeError):  # it reads a tensor of its own
        return False
    return torch.equal(allowed, (rows <= queries) & (rows > queries - window))
