"""The packed view: the printed trace of 0x01A, offsets in all conventions, and drift."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_kvpolicy.contract import (
    PackedKVView,
    full_payload_bytes,
    materialize_subset_view,
    offset_bytes,
    position_map_bytes,
    row_offsets,
    validate_gather_identity,
    visible_payload_bytes,
)
from hf_kvpolicy.errors import CapacityError, ConfigError, IntegrityError, ManifestError, SelectionError

from ._fixtures import GENERATIONS, manifest, replaced, state, symbolic_source, tensor_contract, with_positions

# bfloat16 cannot carry 1030..1033 exactly: symbolic values need float32, the byte ledger two-byte scalars.
FLOAT32 = tensor_contract(key_dtype="float32", value_dtype="float32")


def _view() -> tuple[PackedKVView, torch.Tensor, torch.Tensor]:
    m = manifest(tensor_contract=FLOAT32)
    keys, values = symbolic_source()
    return materialize_subset_view(m, state(m), keys, values, generations=GENERATIONS), keys, values


def test_the_printed_trace() -> None:
    view, _, _ = _view()
    assert view.original_position_map.tolist() == [0, 2, 5, 7, 0, 1, 6, 7, 0, 3, 4, 7, 0, 2, 6, 7]
    assert view.row_offsets.tolist() == [[0, 4, 8], [8, 12, 16]]
    keys, values, positions = view.owner(1, 0)
    assert keys[1].tolist() == [1030, 1031, 1032, 1033]
    assert values[1].tolist() == [6030, 6031, 6032, 6033]
    assert positions[1] == 3


def test_the_printed_bytes() -> None:
    view, _, _ = _view()
    rows = view.original_position_map.numel()
    payload = visible_payload_bytes([rows], bytes_per_row=tensor_contract().row_bytes)
    metadata = position_map_bytes(rows), offset_bytes(layers=2, owners_per_layer=2)
    assert rows == 16
    assert full_payload_bytes(layers=2, kv_heads=2, tokens=8, bytes_per_row=16) == 512
    assert payload == 256
    assert metadata == (64, 24)
    assert payload + sum(metadata) == 344
    assert view.row_offsets.numel() * view.row_offsets.element_size() == 24


def test_offsets_in_every_convention() -> None:
    counts = [[4, 6], [5, 3], [3, 3]]
    assert row_offsets(counts, convention="flat").tolist() == [0, 4, 10, 15, 18, 21, 24]
    assert row_offsets(counts).tolist() == [[0, 4, 10], [10, 15, 18], [18, 21, 24]]
    per_layer = row_offsets(counts, convention="per_layer")
    assert per_layer.tolist() == [[0, 4, 10], [0, 5, 8], [0, 3, 6]]
    assert per_layer.dtype == torch.int32
    assert row_offsets([[0, 0]]).tolist() == [[0, 0, 0]]


def test_offsets_refuse_what_they_cannot_carry() -> None:
    with pytest.raises(IntegrityError, match="same number"):
        row_offsets([[1, 2], [3]])
    with pytest.raises(CapacityError, match="int32"):
        row_offsets([[2**30], [2**30]])
    assert row_offsets([[2**30], [2**30]], convention="per_layer").shape == (2, 2)
    with pytest.raises(ConfigError, match="per_layer"):
        row_offsets([[1]], convention="per_layr")


def test_drift_of_a_view_is_detected() -> None:
    view, keys, values = _view()
    m = manifest(tensor_contract=FLOAT32)
    offsets = view.row_offsets.clone()
    offsets[0, 1] += 1
    packed = view.original_position_map.clone()
    packed[1] = 1
    shifted = view.packed_values_ND.roll(1, 0)
    for changes, word in (
        ({"row_offsets": offsets}, "row offsets"),
        ({"original_position_map": packed}, "position map"),
        ({"packed_values_ND": shifted}, "values"),
        ({"packed_keys_ND": view.packed_keys_ND + 1}, "keys"),
    ):
        with pytest.raises(IntegrityError, match=word):
            validate_gather_identity(replace(view, **changes), state(m), keys, values)


def test_rows_are_compared_bit_for_bit() -> None:
    m = manifest(tensor_contract=FLOAT32)
    keys, values = symbolic_source()
    keys[0, 0, 2, 0] = float("nan")
    view = materialize_subset_view(m, state(m), keys, values, generations=GENERATIONS)
    assert view.packed_keys_ND[1].isnan().any()


def test_an_invalid_state_yields_no_view() -> None:
    m = manifest(tensor_contract=FLOAT32)
    bad = with_positions([[[0, 2, 7], [0, 7]], [[0, 7], [7, 0]]])(state(m))
    with pytest.raises(SelectionError, match="unsorted"):
        materialize_subset_view(m, bad, *symbolic_source(), generations=GENERATIONS)


def test_a_source_that_contradicts_the_contract_is_refused() -> None:
    m = manifest(tensor_contract=FLOAT32)
    keys, values = symbolic_source()
    with pytest.raises(ManifestError, match="dtype"):
        materialize_subset_view(m, state(m), keys.double(), values, generations=GENERATIONS)
    with pytest.raises(ManifestError, match="axes"):
        materialize_subset_view(m, state(m), keys.transpose(1, 2), values, generations=GENERATIONS)
    with pytest.raises(ManifestError, match="values have shape"):
        materialize_subset_view(m, state(m), keys, values[..., :7, :], generations=GENERATIONS)
    m = manifest(tensor_contract=FLOAT32, representation_contract=replaced())
    with pytest.raises(ManifestError, match="replacement_rows"):
        materialize_subset_view(m, state(m), keys, values, generations=GENERATIONS)


def test_an_owner_without_rows_is_an_empty_slice() -> None:
    m = manifest(tensor_contract=FLOAT32)
    s = state(m, protected_original_positions=[[]], positions_source=lambda: [[[], [1]], [[2], []]])
    view = materialize_subset_view(m, s, *symbolic_source(), generations=GENERATIONS)
    assert view.row_offsets.tolist() == [[0, 0, 1], [1, 2, 2]]
    assert view.owner(0, 0)[0].shape == (0, 4)


def test_score_ordered_prompt_rows_keep_their_source() -> None:
    """The packed prompt of 0x07G: positions [1, 2, 4, 5] of layer 0, head 0."""
    m = manifest(
        tensor_contract=tensor_contract(key_dtype="float32", value_dtype="float32", head_dim_k=3, head_dim_v=3)
    )
    s = state(
        m,
        source_committed_frontier=6,
        protected_original_positions=[[4, 5]],
        positions_source=lambda: [[[1, 2, 4, 5]] * 2] * 2,
    )
    keys, values = symbolic_source(tokens=6, dim=3)
    view = materialize_subset_view(m, s, keys, values, generations=GENERATIONS)
    k, v, _ = view.owner(0, 0)
    assert k.tolist() == [[10, 11, 12], [20, 21, 22], [40, 41, 42], [50, 51, 52]]
    assert v.tolist() == [[5010, 5011, 5012], [5020, 5021, 5022], [5040, 5041, 5042], [5050, 5051, 5052]]
