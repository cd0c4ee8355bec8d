"""Transaction peak and bytes moved: publication, compaction, decode reads (0x02F-0x02I, 0x0EE, 0x0EH, 0x0EJ).

Logical bytes of a declared algorithm; what hardware really moves is measured elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError
from ._checks import check_int
from .costs import Ratio, RowCounts, visible_payload_bytes

__all__ = [
    "amplification",
    "bounded_decode_read_bytes",
    "compaction_bytes",
    "cumulative_decode_rows",
    "cumulative_full_read_bytes",
    "publish_traffic_bytes",
    "query_expanded_read_bytes",
    "transaction_peak_bytes",
    "unique_read_bytes",
]


def transaction_peak_bytes(
    *,
    old_live: int,
    new_unpublished: int,
    selector_workspace: int = 0,
    backend_workspace: int = 0,
    allocator_metadata: int = 0,
) -> int:
    """Bytes alive at once while the parent is still visible and the successor is built (0x02F, 0x0EH)."""
    terms = (old_live, new_unpublished, selector_workspace, backend_workspace, allocator_metadata)
    for term in terms:
        check_int("a term of the transaction peak", term)
    return sum(terms)


def publish_traffic_bytes(*, score_scan: int, selected_read: int, persistent_write: int) -> int:
    """Bytes of one publication: scores scanned, kept rows read, new persistent state written (0x02G)."""
    for term in (score_scan, selected_read, persistent_write):
        check_int("a term of the publication traffic", term)
    return score_scan + selected_read + persistent_write


def compaction_bytes(*, read: int, write: int) -> int:
    """Bytes of K/V payload read and written by a compaction (0x0EH)."""
    check_int("compaction read", read)
    check_int("compaction write", write)
    return read + write


def amplification(traffic_bytes: int, new_token_bytes: int) -> Ratio:
    """Traffic over the K/V bytes newly admitted: compaction or publication amplification (0x02G, 0x0EJ)."""
    check_int("traffic_bytes", traffic_bytes)
    check_int("new_token_bytes", new_token_bytes)
    return Ratio(numerator=traffic_bytes, denominator=new_token_bytes)


def unique_read_bytes(row_counts: RowCounts, *, bytes_per_row: int) -> int:
    """Kept payload that one query step reads when every stored row is read once (0x02H)."""
    return visible_payload_bytes(row_counts, bytes_per_row=bytes_per_row)


def query_expanded_read_bytes(
    row_counts: Sequence[Sequence[int]], *, q_to_kv_head_map: Sequence[int], bytes_per_row: int
) -> int:
    """Logical demand of all query heads; `row_counts` is [layer][KV head]. Never persistent storage (0x02H).

    Raises ConfigError when the map names a KV head that a layer does not have.
    """
    for layer in row_counts:
        if any(not 0 <= kv_head < len(layer) for kv_head in q_to_kv_head_map):
            raise ConfigError(
                f"q_to_kv_head_map {list(q_to_kv_head_map)} names a KV head outside 0 to {len(layer) - 1}. "
                "Give the map of this model."
            )
    expanded = [[layer[kv_head] for kv_head in q_to_kv_head_map] for layer in row_counts]
    return visible_payload_bytes(expanded, bytes_per_row=bytes_per_row)


def cumulative_decode_rows(*, start_rows: int, steps: int) -> int:
    """Row reads of `steps` decode steps from `start_rows`, growing by one: G*T0 + G(G-1)/2 (0x02I)."""
    check_int("start_rows", start_rows)
    check_int("steps", steps)
    return steps * start_rows + steps * (steps - 1) // 2


def cumulative_full_read_bytes(*, start_rows: int, steps: int, bytes_per_token: int, batch_rows: int = 1) -> int:
    """Bytes a full cache reads over a decode trajectory (0x02I)."""
    check_int("bytes_per_token", bytes_per_token)
    check_int("batch_rows", batch_rows)
    return batch_rows * bytes_per_token * cumulative_decode_rows(start_rows=start_rows, steps=steps)


def bounded_decode_read_bytes(*, rows: int, steps: int, bytes_per_token: int, batch_rows: int = 1) -> int:
    """Bytes a cache of constant `rows` per owner reads over a decode trajectory (0x02I)."""
    for name, value in (("rows", rows), ("steps", steps), ("bytes_per_token", bytes_per_token)):
        check_int(name, value)
    check_int("batch_rows", batch_rows)
    return batch_rows * bytes_per_token * rows * steps
