"""The demo's picture keeps a lone row visible, and is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the demo's extra is not installed")
from script_lib.picture import MAX_BINS, KeptMap, _binned, save_picture


@pytest.mark.parametrize("positions", [1, 7, MAX_BINS, MAX_BINS + 1, 5 * MAX_BINS - 3])
def test_a_lone_row_survives_binning(positions: int) -> None:
    share = np.zeros((2, positions))
    share[1, positions // 2] = 1.0
    binned = _binned(share)
    assert binned.shape[1] <= MAX_BINS
    assert binned[0].max() == 0.0
    assert binned[1].max() == 1.0


@pytest.mark.parametrize("panels", [1, 4])
def test_picture_is_written(tmp_path: Path, panels: int) -> None:
    path = tmp_path / "new" / "kept.png"
    maps = [KeptMap(f"policy {i}", np.eye(6, 50)) for i in range(panels)]
    save_picture(path, maps, needle=(10, 14), heading="Rows kept")
    assert path.read_bytes().startswith(b"\x89PNG")
