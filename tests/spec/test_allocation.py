"""The worked numbers of 0x08: pyramid, ZigZagKV, Ada-KV, HeadKV, FastGen, and what their rows weigh."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from hf_kvpolicy.allocation import (
    apportion,
    apportion_reference,
    choose_policy,
    global_top_counts,
    global_top_counts_reference,
    head_targets,
    pyramid_targets,
    safeguarded_targets,
    zigzag_targets,
)
from hf_kvpolicy.contract import (
    full_payload_bytes,
    offset_bytes,
    position_map_bytes,
    row_bytes,
    row_offsets,
    visible_payload_bytes,
)

PREFIX_ROWS, WINDOW_ROWS = 6, 2
LAYER_ROWS = [6, 4, 2]
RAW = [[2, 4], [3, 1], [2, 0]]
PUBLISHED = [[2, 4], [3, 1], [1, 1]]
# Per layer and KV head, over the six prefix rows. The example's scores are not printed; these rank to its counts.
SCORES = [
    [[0.9, 0.8, 0.1, 0.1, 0.0, 0.0], [0.7, 0.6, 0.5, 0.4, 0.1, 0.0]],
    [[0.2, 0.9, 0.7, 0.1, 0.6, 0.0], [0.1, 0.3, 0.2, 0.5, 0.0, 0.2]],
    [[0.5, 0.1, 0.4, 0.2, 0.0, 0.1], [0.3, 0.2, 0.1, 0.0, 0.3, 0.2]],
]


def decimals(*texts: str) -> list[Fraction]:
    return [Fraction(text) for text in texts]


def published() -> list[list[int]]:
    """The whole composition: layers by pyramid, heads by Ada-KV with alpha 0.75 and one row at least."""
    layers = apportion(pyramid_targets(12, 3, 2), 12, [1] * 3, [2 * PREFIX_ROWS] * 3)
    return [
        apportion(
            safeguarded_targets(global_top_counts([torch.tensor(own) for own in scores], rows), rows, 0.75),
            rows,
            [1] * 2,
            [PREFIX_ROWS] * 2,
        )
        for scores, rows in zip(SCORES, layers, strict=True)
    ]


def test_the_pyramid() -> None:
    assert pyramid_targets(12, 3, 2) == LAYER_ROWS


@pytest.mark.parametrize("apportioned", [apportion, apportion_reference])
def test_zigzag(apportioned: object) -> None:
    targets = zigzag_targets([6, 4, 2], 4, 1)
    assert targets == decimals("5.5", "4", "2.5")
    # Both halves have a remainder of one half; the only row left goes to the first.
    assert apportioned(targets, 12, [1] * 3, [12] * 3) == LAYER_ROWS  # type: ignore[operator]


@pytest.mark.parametrize("layer", range(3))
def test_raw_head_counts(layer: int) -> None:
    tensors = [torch.tensor(own) for own in SCORES[layer]]
    assert global_top_counts(tensors, LAYER_ROWS[layer]) == RAW[layer]
    assert global_top_counts_reference(SCORES[layer], LAYER_ROWS[layer]) == RAW[layer]


def test_safeguarded_targets() -> None:
    targets = [safeguarded_targets(raw, rows, 0.75) for raw, rows in zip(RAW, LAYER_ROWS, strict=True)]
    assert targets == [decimals("2.25", "3.75"), decimals("2.75", "1.25"), decimals("1.75", "0.25")]


def test_the_composition_publishes_whole_rows() -> None:
    assert published() == PUBLISHED


def test_headkv() -> None:
    targets = head_targets([0.05, 0.35, 0.25, 0.10, 0.20, 0.05], 2, 2)
    assert targets == decimals("1.3", "3.1", "2.5", "1.6", "2.2", "1.3")
    rows = apportion(targets, 12, [0] * 6, [PREFIX_ROWS] * 6)
    assert rows == [1, 3, 3, 2, 2, 1]
    assert [sum(rows[i : i + 2]) for i in (0, 2, 4)] == [4, 5, 3]


@pytest.mark.parametrize(
    ("mass", "name"),
    [
        ([0.60, 0.35, 0.01, 0.01, 0.01, 0.02], "special"),
        ([0.40, 0.05, 0.50, 0.03, 0.01, 0.01], "punctuation"),
        ([0.05, 0.05, 0.05, 0.05, 0.40, 0.40], "locality"),
        ([0.17, 0.17, 0.17, 0.17, 0.16, 0.16], "full"),
    ],
)
def test_fastgen_profiles_of_each_kind(mass: list[float], name: str) -> None:
    kept = {"special": [0, 1], "punctuation": [0, 1, 2], "locality": [2, 3, 4, 5], "full": [0, 1, 2, 3, 4, 5]}
    masks = [(policy, torch.tensor([row in rows for row in range(6)])) for policy, rows in kept.items()]
    choice = choose_policy(torch.tensor(mass, dtype=torch.float64), masks, 0.9)
    assert (choice.name, choice.rows) == (name, len(kept[name]))
    assert choice.recovery == pytest.approx(sum(mass[row] for row in kept[name]))
    assert choice.keep_N.nonzero().flatten().tolist() == kept[name]


def test_packed_lengths_offsets_and_bytes() -> None:
    lengths = [[rows + WINDOW_ROWS for rows in layer] for layer in published()]
    assert lengths == [[4, 6], [5, 3], [3, 3]]
    assert row_offsets(lengths, convention="flat").tolist() == [0, 4, 10, 15, 18, 21, 24]
    row = row_bytes(head_dim_k=3, head_dim_v=3, key_scalar_bytes=2, value_scalar_bytes=2)
    assert row == 12
    assert full_payload_bytes(layers=3, kv_heads=2, tokens=PREFIX_ROWS + WINDOW_ROWS, bytes_per_row=row) == 576
    assert visible_payload_bytes(lengths, bytes_per_row=row) == 288
    assert position_map_bytes(sum(map(sum, lengths))) == 96
    assert offset_bytes(layers=3, owners_per_layer=2, flat=True) == 28
