"""What may contradict itself in a cache: maps, counts, slots, frontier, budget and protection."""

from __future__ import annotations

from .engine import Composition, Runtime, Snapshot
from .engine.foreign import foreign_faults
from .records import positions_of
from .storage import RaggedMap, RaggedRows

__all__ = ["integrity_faults"]


def integrity_faults(runtime: Runtime) -> list[str]:
    """Return every contradiction found between maps, counts, frontier, budget and protection."""
    snapshot, policy = runtime.snapshot, runtime.composition
    heads = policy.stored_heads(runtime.geometry)
    faults = _ragged_faults(snapshot, policy, heads) if snapshot.ragged else _dense_faults(snapshot)
    if policy.representation.replaces_rows and snapshot.buffers:
        from .replacements import faults_of_replaced

        faults += faults_of_replaced(runtime)
    if snapshot.holds_codes:
        from .engine.coded import coding_faults

        faults += coding_faults(snapshot, policy)
    for layer in snapshot.storing(runtime.geometry.num_layers) if snapshot.buffers else ():
        for batch, owner_rows in enumerate(snapshot.owner_rows(layer, heads)):
            for head, tokens in enumerate(positions_of(runtime, layer, batch)):
                where = f"layer {layer}, batch row {batch}, head {head}"
                if len(tokens) != owner_rows[head]:
                    faults.append(f"{where} holds {len(tokens)} rows, {owner_rows[head]} counted")
                faults += _owner_faults(where, tokens.tolist(), batch, snapshot, policy)
    geometry, columns = runtime.geometry, snapshot.frontier.columns
    faults += foreign_faults(snapshot.foreign, geometry.foreign_layers, geometry.state_layers, columns)
    return faults


def _dense_faults(snapshot: Snapshot) -> list[str]:
    faults = []
    if snapshot.scores_LBSWX is not None and snapshot.scores_LBSWX.shape[3] != snapshot.width:
        faults.append(f"states of {snapshot.scores_LBSWX.shape[3]} slots are carried for {snapshot.width} in use")
    for layers, rows in zip(snapshot.stores, snapshot.buffers, strict=True):
        if not isinstance(rows, RaggedRows) and rows.capacity < snapshot.width:
            faults.append(f"layer {layers[0]} has {rows.capacity} slots for {snapshot.width} in use")
    return faults


def _ragged_faults(snapshot: Snapshot, policy: Composition, heads: int) -> list[str]:
    faults = []
    for layer, stored in enumerate(snapshot.ragged):
        rows, table = stored.rows, stored.map
        for owner, (length, slots) in enumerate(zip(table.lengths, rows.capacities, strict=True)):
            if length + snapshot.tail_width > slots:
                faults.append(
                    f"layer {layer}, owner {owner} has {slots} slots for {length + snapshot.tail_width} in use"
                )
        faults += _slot_faults(layer, table)
        if table.lengths_O.tolist() != list(table.lengths) or rows.starts_O.tolist() != list(rows.starts):
            faults.append(f"layer {layer} has lengths or starts that differ between host and device")
    if snapshot.scores_LBSWX is not None and snapshot.scores_LBSWX.shape[3] < max(snapshot.undecided_tokens):
        faults.append(
            f"scores of {snapshot.scores_LBSWX.shape[3]} rows are held for {max(snapshot.undecided_tokens)} undecided"
        )
    # Answers that decode chose among lie among the selected rows, and prompts that are appended lie between them.
    is_mixed = policy.decode_blocks is not None and policy.on_append == "append"
    if snapshot.budget_rows is None or not policy.allocation.conserves or is_mixed:
        return faults
    for batch, budget in enumerate(snapshot.budget_rows):
        if policy.bounds_every_step:
            owners = [sum(layer.map.lengths[batch * heads : (batch + 1) * heads]) for layer in snapshot.ragged]
        else:
            # Rows of an answer lie among them where another batch row went on with a prompt.
            owners = [_prompt_rows(layer.map, batch, snapshot) for layer in snapshot.ragged]
        allowed = budget * heads * len(snapshot.ragged)
        if sum(owners) > allowed:
            faults.append(f"batch row {batch} holds {sum(owners)} selected rows over a total budget of {allowed}")
    return faults


def _prompt_rows(table: RaggedMap, batch: int, snapshot: Snapshot) -> int:
    """Return how many rows of the last prompt, and of what it competed with, the heads of a batch row hold."""
    owners = table.owners()[batch * table.heads : (batch + 1) * table.heads]
    return sum(int((owner.tokens_BMW < snapshot.segment_tokens[batch]).sum()) for owner in owners)


def _slot_faults(layer: int, table: RaggedMap) -> list[str]:
    """Check that the spare slot of every owner lies among its first n + 1 slots, whose others hold its rows."""
    spare = [] if table.spare_O is None else table.spare_O.tolist()
    return [
        f"layer {layer}, owner {owner} has {rows} rows and a spare slot {slot}"
        for owner, (slot, rows) in enumerate(zip(spare, table.lengths if spare else (), strict=True))
        if not 0 <= slot <= rows
    ]


def _owner_faults(where: str, tokens: list[int], batch: int, snapshot: Snapshot, policy: Composition) -> list[str]:
    frontier = snapshot.frontier.tokens[batch]
    # A prompt that is held, chunk by chunk, is not yet chosen from.
    is_bound = policy.bounds_every_step and snapshot.open_segment is None
    budget = snapshot.budget_rows[batch] if is_bound and snapshot.budget_rows is not None else None
    faults = []
    if len(set(tokens)) != len(tokens):
        faults.append(f"{where} holds a token twice")
    if any(not 0 <= token < frontier for token in tokens):
        faults.append(f"{where} holds a token outside 0..{frontier - 1}")
    missing = {token for token in policy.pinned_tokens if token < frontier} - set(tokens)
    if missing:
        faults.append(f"{where} lost the protected tokens {sorted(missing)}")
    if budget is not None and len(tokens) > budget:
        faults.append(f"{where} holds {len(tokens)} rows over a budget of {budget}")
    return faults
