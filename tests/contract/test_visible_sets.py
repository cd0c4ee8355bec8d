"""Static policies (0x03-0x05): sets, overlap, rollover, payload and reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_kvpolicy.contract import (
    full_visible,
    history_row_instances,
    omitted_from_source,
    removed_from_parent,
    ring_slot,
    sink_and_recent_count,
    sink_and_recent_visible,
    sink_recent_overlap,
    sliding_window_count,
    sliding_window_visible,
)
from hf_kvpolicy.errors import ConfigError

TOKEN_BYTES = 131072  # running shape, all layers (0x02B)


def test_full_set_follows_the_frontier() -> None:
    assert full_visible(0) == ()
    assert full_visible(4) == (0, 1, 2, 3)
    assert set(full_visible(8)) == set(full_visible(7)) | {7}
    assert len(full_visible(32)) * TOKEN_BYTES == 4194304


def test_window_trace() -> None:
    """W = 3, four prompt tokens, then accepted positions 4 to 7 (0x04)."""
    views = {f: sliding_window_visible(f, 3) for f in range(4, 9)}
    assert views == {4: (1, 2, 3), 5: (2, 3, 4), 6: (3, 4, 5), 7: (4, 5, 6), 8: (5, 6, 7)}
    assert omitted_from_source(4, views[4]) == (0,)
    assert removed_from_parent(views[4], views[5]) == (1,)
    assert 2 not in views[8]
    assert ring_slot(6, 3) == 0


def test_a_prompt_row_that_never_was_visible_is_omitted_but_not_removed() -> None:
    prompt = sliding_window_visible(4, 3)
    assert 0 in omitted_from_source(4, prompt)
    assert removed_from_parent((), prompt) == ()


def test_history_reads() -> None:
    frontiers = [4, 5, 6, 7]
    window = history_row_instances(frontiers, lambda f: sliding_window_visible(f, 3))
    full = history_row_instances(frontiers, full_visible)
    assert (window, full) == (12, 22)
    assert (window * TOKEN_BYTES, full * TOKEN_BYTES) == (1572864, 2883584)


def test_running_shape_payloads() -> None:
    assert sliding_window_count(2, 3) * TOKEN_BYTES == 262144
    assert sliding_window_count(8, 3) * TOKEN_BYTES == 393216
    assert sink_and_recent_count(8, 2, 3) * TOKEN_BYTES == 655360
    assert len(full_visible(8)) * TOKEN_BYTES == 1048576


def test_sink_and_recent_overlap_and_rollover() -> None:
    """K_s = 2, W = 3: five rows first at F = 5, the first middle omission at F = 6 (0x05)."""
    overlap = [sink_recent_overlap(f, 2, 3) for f in range(9)]
    counts = [sink_and_recent_count(f, 2, 3) for f in range(9)]
    assert overlap == [0, 1, 2, 2, 1, 0, 0, 0, 0]
    assert counts == [0, 1, 2, 3, 4, 5, 5, 5, 5]
    omitted = [omitted_from_source(f, sink_and_recent_visible(f, 2, 3)) for f in range(9)]
    assert omitted[:7] == [()] * 6 + [(2,)]
    assert sink_and_recent_visible(6, 2, 3) == (0, 1, 3, 4, 5)
    assert sink_and_recent_visible(7, 2, 3) == (0, 1, 4, 5, 6)
    final = sink_and_recent_visible(8, 2, 3)
    assert (0 in final, 2 in final, 7 in final) == (True, False, True)


@given(frontier=st.integers(0, 40), sinks=st.integers(0, 12), window=st.integers(1, 12))
def test_counts_equal_the_sets(frontier: int, sinks: int, window: int) -> None:
    visible = sink_and_recent_visible(frontier, sinks, window)
    assert list(visible) == sorted(set(visible))
    assert len(visible) == sink_and_recent_count(frontier, sinks, window)
    assert len(sliding_window_visible(frontier, window)) == sliding_window_count(frontier, window)
    recent = set(sliding_window_visible(frontier, window))
    assert sink_recent_overlap(frontier, sinks, window) == len(recent & set(range(min(sinks, frontier))))


@pytest.mark.parametrize("window", [0, -1])
def test_an_empty_window_is_refused(window: int) -> None:
    with pytest.raises(ConfigError, match="window_rows"):
        sliding_window_visible(4, window)
