"""Checks of a state against its manifest and source: every rejection of 0x01A except the view's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from ..errors import SelectionError, StaleGenerationError
from .generations import Generations
from .manifest import KVVisibilityPolicyManifest
from .position_sets import PositionSets
from .state import KVPolicyState

__all__ = ["validate_selection", "validate_state"]

Slice: TypeAlias = tuple[int, int, int, tuple[int, ...]]
"""One owner's set: (layer, batch row, head, ordered positions)."""


def validate_state(
    manifest: KVVisibilityPolicyManifest,
    state: KVPolicyState,
    *,
    frontier: int,
    generations: Generations,
    owner_budgets_rows: Sequence[Sequence[int]] | None = None,
    tail_rows: int = 0,
) -> None:
    """Raise unless `state` belongs to `manifest` and to the source as it is now, and is legal.

    `frontier` counts the committed positions of the source; `generations` are the numbers the source expects
    the state to carry. StaleGenerationError: another manifest, generation or frontier. SelectionError: see
    `validate_selection`, which gets the remaining arguments. Identity is checked first, so a stale state is
    never read.
    """
    if state.policy_manifest_sha256 != manifest.sha256:
        raise StaleGenerationError(
            f"The state was selected under manifest digest {state.policy_manifest_sha256[:12]}..., but the "
            f"manifest has {manifest.sha256[:12]}.... Select again under the current manifest."
        )
    if state.policy_generation != manifest.policy_generation:
        _refuse_stale("policy", state.policy_generation, manifest.policy_generation)
    for name in ("request", "cache", "policy", "state"):
        found, expected = getattr(state.generations, name), getattr(generations, name)
        if found != expected:
            _refuse_stale(name, found, expected)
    if state.source_committed_frontier != frontier:
        raise StaleGenerationError(
            f"The state was selected at frontier {state.source_committed_frontier}, but the source has "
            f"committed {frontier} positions. Select again at the current frontier."
        )
    validate_selection(manifest, state, owner_budgets_rows=owner_budgets_rows, tail_rows=tail_rows)


def _refuse_stale(name: str, found: int, expected: int) -> None:
    raise StaleGenerationError(
        f"The state carries {name} generation {found}, but the source expects {expected}. "
        "Discard it and select again; equal row counts do not make it current."
    )


def validate_selection(
    manifest: KVVisibilityPolicyManifest,
    state: KVPolicyState,
    *,
    owner_budgets_rows: Sequence[Sequence[int]] | None = None,
    tail_rows: int = 0,
) -> None:
    """Raise SelectionError unless the selected positions obey the manifest.

    Checked: layer and owner counts, range, duplicates, order (when the manifest orders by position),
    protected positions, budgets, sets shared where the unit says so, and completeness of an exact full cache.
    `owner_budgets_rows` [layer][owner] replaces the manifest's maximum; `tail_rows` are rows per owner
    appended since the last selection, which the budget does not bound.
    """
    layers = state.selected_original_positions
    if layers is None:
        raise SelectionError(
            "The state's rows are replacements, so it selects no original positions. Check what its receipt lists with "
            "check_replaced_rows."
        )
    _check_shape(manifest, state, layers)
    slices = list(_slices(manifest, layers))
    for layer, b, head, positions in slices:
        _check_set(manifest, state, f"layer {layer}, batch row {b}, head {head}", b, positions)
    _check_protected(manifest, state, slices)
    if owner_budgets_rows is None:
        _check_budget(manifest, slices, tail_rows)
    else:
        _check_owner_budgets(layers, owner_budgets_rows, tail_rows)
    _check_unit(manifest, slices)


def _slices(manifest: KVVisibilityPolicyManifest, layers: PositionSets) -> Iterator[Slice]:
    heads = manifest.owners_per_layer
    for layer, owners in enumerate(layers):
        for owner, positions in enumerate(owners):
            yield layer, owner // heads, owner % heads, positions


def _check_shape(manifest: KVVisibilityPolicyManifest, state: KVPolicyState, layers: PositionSets) -> None:
    owners = len(state.frontiers) * manifest.owners_per_layer
    found = [len(layer) for layer in layers]
    if found != [owners] * manifest.tensor_contract.num_layers:
        raise SelectionError(
            f"The selection has owners {found} per layer, but the manifest has "
            f"{manifest.tensor_contract.num_layers} layers of {owners} owners (batch rows x heads). Give "
            "one position set per layer and owner."
        )
    if len(state.protected_original_positions) != len(state.frontiers):
        raise SelectionError(
            f"Protected positions were given for {len(state.protected_original_positions)} batch rows, but "
            f"the state has {len(state.frontiers)}. Give one tuple per batch row."
        )


def _check_set(
    manifest: KVVisibilityPolicyManifest, state: KVPolicyState, where: str, b: int, positions: tuple[int, ...]
) -> None:
    start = state.source_position_origin
    stop = start + state.frontiers[b]
    for position in positions:
        if not start <= position < stop:
            raise SelectionError(
                f"Position {position} of {where} is out of range: committed positions are {start} to "
                f"{stop - 1}. Select committed positions only."
            )
    if len(set(positions)) != len(positions):
        twice = sorted({p for p in positions if positions.count(p) > 1})
        raise SelectionError(f"The selection of {where} holds duplicate positions {twice}. Keep each row once.")
    if manifest.selection_contract.ordering == "position" and list(positions) != sorted(positions):
        raise SelectionError(
            f"The selection of {where} is unsorted, but the manifest orders by position. Sort it, or declare "
            "ordering='score' or 'unordered'."
        )
    exact = manifest.representation_contract.semantic_class == "full_cache_exact"
    if exact and len(positions) != stop - start:
        raise SelectionError(
            f"The selection of {where} omits {stop - start - len(positions)} of {stop - start} positions "
            "under full_cache_exact. Keep every row, or declare lossy_subset."
        )


def _check_protected(manifest: KVVisibilityPolicyManifest, state: KVPolicyState, slices: Sequence[Slice]) -> None:
    every_owner = manifest.selection_contract.protected.scope == "every_owner"
    start = state.source_position_origin
    for row, declared in enumerate(state.protected_original_positions):
        # Positions beyond the frontier are not committed yet, so nothing can hold them.
        required = {p for p in declared if start <= p < start + state.frontiers[row]}
        sets = [(f"layer {layer}, head {head}", set(ps)) for layer, b, head, ps in slices if b == row]
        if not every_owner:
            sets = [("all owners together", set().union(*(held for _, held in sets)))]
        for where, held in sets:
            missing = sorted(required - held)
            if missing:
                raise SelectionError(
                    f"Protected positions {missing} are missing from {where} of batch row {row}. "
                    "Apply the protection mask before selecting."
                )


def _check_budget(manifest: KVVisibilityPolicyManifest, slices: Sequence[Slice], tail_rows: int) -> None:
    budget = manifest.selection_contract.budget
    if budget.max_rows is None:
        return
    totals: dict[tuple[int, ...], list[int]] = {}
    for layer, b, head, positions in slices:
        key = {"owner": (b, layer, head), "layer": (b, layer), "cache": (b,)}[budget.scope]
        totals.setdefault(key, []).append(len(positions))
    for key, counts in totals.items():
        allowed = budget.max_rows + tail_rows * len(counts)
        if sum(counts) > allowed:
            raise SelectionError(
                f"A {budget.scope} (batch row, layer, head: {key}) holds {sum(counts)} rows, over budget: "
                f"allowed are {allowed}, {tail_rows} of them tail rows per owner. Select fewer rows."
            )


def _check_owner_budgets(layers: PositionSets, owner_budgets_rows: Sequence[Sequence[int]], tail_rows: int) -> None:
    if [len(row) for row in owner_budgets_rows] != [len(layer) for layer in layers]:
        raise SelectionError(
            f"Budgets were given for {[len(row) for row in owner_budgets_rows]} owners per layer, but the "
            f"selection has {[len(layer) for layer in layers]}. Give one budget per layer and owner."
        )
    for layer, (owners, budgets) in enumerate(zip(layers, owner_budgets_rows, strict=True)):
        for owner, (positions, budget) in enumerate(zip(owners, budgets, strict=True)):
            if len(positions) > budget + tail_rows:
                raise SelectionError(
                    f"Owner {owner} of layer {layer} holds {len(positions)} rows, over budget: allowed are "
                    f"{budget} and {tail_rows} tail rows. Select fewer rows."
                )


def _check_unit(manifest: KVVisibilityPolicyManifest, slices: Sequence[Slice]) -> None:
    unit = manifest.selection_contract.unit
    if unit not in ("layer", "token"):
        return
    shared: dict[tuple[int, ...], frozenset[int]] = {}
    for layer, b, head, positions in slices:
        held = shared.setdefault((b, layer) if unit == "layer" else (b,), frozenset(positions))
        if held != frozenset(positions):
            raise SelectionError(
                f"Head {head} of layer {layer}, batch row {b}, differs from the set it shares under unit "
                f"{unit!r}. Decide one set for the whole {'layer' if unit == 'layer' else 'cache'}."
            )
