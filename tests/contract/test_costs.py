"""Every worked byte of 0x02, 0x07J, 0x08F and 0x0E. Where a table is lost, its stated totals are used."""

from __future__ import annotations

import pytest

from hf_kvpolicy.contract import (
    PolicyBytes,
    Ratio,
    amplification,
    bounded_decode_read_bytes,
    compaction_bytes,
    cumulative_decode_rows,
    cumulative_full_read_bytes,
    flag_bytes,
    full_payload_bytes,
    layout_rows,
    offset_bytes,
    position_map_bytes,
    prompt_ledger,
    publish_traffic_bytes,
    query_expanded_read_bytes,
    row_bytes,
    score_state_bytes,
    token_bytes,
    transaction_peak_bytes,
    unique_read_bytes,
    visible_payload_bytes,
)
from hf_kvpolicy.errors import ConfigError

COUNTS = [[4, 2], [3, 1]]
TIB = 2**40
GIB = 2**30


def _row(dim: int, scalar: int = 2) -> int:
    return row_bytes(head_dim_k=dim, head_dim_v=dim, key_scalar_bytes=scalar, value_scalar_bytes=scalar)


def _toy_policy() -> PolicyBytes:
    # The table behind 545 is lost. 160, 40, 24, 128 and 192 are known; one byte remains unexplained. It is
    # charged as protection, since one bit for each of the eight committed positions would be one byte.
    return PolicyBytes(
        visible=visible_payload_bytes(COUNTS, bytes_per_row=_row(4)),
        position=position_map_bytes(10),
        offset=offset_bytes(layers=2, owners_per_layer=2),
        score=score_state_bytes([[8, 8], [8, 8]]),
        protected=flag_bytes(8),
        receipt=192,
    )


def test_running_shape() -> None:
    assert _row(128) == 512
    assert token_bytes(layers=32, kv_heads=8, bytes_per_row=512) == 131072
    assert full_payload_bytes(layers=32, kv_heads=8, tokens=32768, bytes_per_row=512) == 4 * GIB
    assert full_payload_bytes(batch_rows=3, layers=2, kv_heads=2, tokens=8, bytes_per_row=16) == 3 * 512


def test_key_and_value_widths_are_separate() -> None:
    assert row_bytes(head_dim_k=4, head_dim_v=2, key_scalar_bytes=2, value_scalar_bytes=4) == 16


def test_layouts_of_the_toy() -> None:
    layout = layout_rows(COUNTS, tokens=8)
    assert (layout.ragged, layout.padded, layout.tombstone) == (10, 16, 32)
    assert layout.padding_efficiency == Ratio(numerator=10, denominator=16)
    assert layout.padding_efficiency.value == 0.625
    assert layout.tombstone * _row(4) == full_payload_bytes(layers=2, kv_heads=2, tokens=8, bytes_per_row=16)
    assert layout_rows([], tokens=8).padding_efficiency.value is None


def test_persistent_policy_state_of_the_toy() -> None:
    policy = _toy_policy()
    terms = (policy.visible, policy.position, policy.offset, policy.score, policy.receipt, policy.protected)
    assert terms == (160, 40, 24, 128, 192, 1)
    assert policy.total == 545
    assert policy.total > 512


def test_transaction_peaks_of_the_toy() -> None:
    topk = 10 * 8  # one 64-bit index per selected row
    assert transaction_peak_bytes(old_live=512, new_unpublished=545, selector_workspace=topk) == 1137
    assert transaction_peak_bytes(old_live=545, new_unpublished=545, selector_workspace=topk) == 1170


def test_publication_traffic_and_amplification_of_the_toy() -> None:
    traffic = publish_traffic_bytes(score_scan=128, selected_read=160, persistent_write=_toy_policy().total)
    new_token = token_bytes(layers=2, kv_heads=2, bytes_per_row=16)
    assert traffic == 833
    assert new_token == 64
    assert amplification(compaction_bytes(read=160, write=160), new_token).value == 5.0
    assert amplification(traffic, new_token).value == 13.015625
    assert amplification(traffic, 0).value is None


def test_unique_and_query_expanded_reads_of_the_toy() -> None:
    assert unique_read_bytes(COUNTS, bytes_per_row=16) == 160
    assert query_expanded_read_bytes(COUNTS, q_to_kv_head_map=[0, 0, 1, 1], bytes_per_row=16) == 320
    with pytest.raises(ConfigError, match="KV head"):
        query_expanded_read_bytes(COUNTS, q_to_kv_head_map=[0, 2], bytes_per_row=16)


def test_cumulative_decode_reads() -> None:
    full = cumulative_full_read_bytes(start_rows=32768, steps=512, bytes_per_token=131072)
    bounded = bounded_decode_read_bytes(rows=4096, steps=512, bytes_per_token=131072)
    assert full / TIB == 2.015594482421875
    assert bounded == 256 * GIB
    assert Ratio(numerator=full, denominator=bounded).value == 8.0623779296875


@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_cumulative_rows_equal_the_written_out_sum(steps: int) -> None:
    assert cumulative_decode_rows(start_rows=5, steps=steps) == sum(5 + g for g in range(steps))


def test_prompt_ledger() -> None:
    unique = prompt_ledger(layers=2, owners_per_layer=2, prompt_tokens=6, kept_rows=4, bytes_per_row=_row(3))
    assert (unique.full, unique.compressed) == (288, 192)
    assert unique.reduction.value == 1.5
    assert (unique.position_map, unique.offsets, unique.append_per_token) == (64, 20, 48)
    expanded = prompt_ledger(layers=2, owners_per_layer=4, prompt_tokens=6, kept_rows=4, bytes_per_row=_row(3))
    assert (expanded.full, expanded.compressed) == (576, 384)


def test_ragged_allocation_ledger() -> None:
    lengths = [[4, 6], [5, 3], [3, 3]]
    assert visible_payload_bytes(lengths, bytes_per_row=_row(3)) == 288
    assert full_payload_bytes(layers=3, kv_heads=2, tokens=8, bytes_per_row=_row(3)) == 576
    assert position_map_bytes(24) == 96
    assert offset_bytes(layers=3, owners_per_layer=2, flat=True) == 28


def test_runtime_transaction() -> None:
    row = _row(64)
    parent, successor = 24 * row, visible_payload_bytes([[4, 4], [4, 4]], bytes_per_row=row)
    assert (row, parent, successor) == (256, 6144, 4096)
    peak = transaction_peak_bytes(
        old_live=parent,
        new_unpublished=successor,
        selector_workspace=1024,
        backend_workspace=2048,
        allocator_metadata=512,
    )
    assert peak == 13824
    assert compaction_bytes(read=successor, write=successor) == 8192


@pytest.mark.parametrize(("flags", "size"), [(0, 0), (1, 1), (8, 1), (9, 2)])
def test_flags_take_whole_bytes(flags: int, size: int) -> None:
    assert flag_bytes(flags) == size


def test_negative_or_fractional_counts_are_refused() -> None:
    with pytest.raises(ConfigError, match="row count"):
        visible_payload_bytes([[1, -1]], bytes_per_row=16)
    with pytest.raises(ConfigError, match="tokens"):
        full_payload_bytes(layers=1, kv_heads=1, tokens=1.5, bytes_per_row=16)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="score bytes"):
        PolicyBytes(visible=1, score=-1)
    with pytest.raises(ConfigError, match="peak"):
        transaction_peak_bytes(old_live=-1, new_unpublished=0)
