"""The comparison with kvpress, without kvpress: what finds and counts rows, and that both sides are asked alike."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("evaluate")

from helpers import tiny
from kvpress_lib.contenders import FULL, PYRAMID_BETA, PYRAMID_WINDOW, Press, contenders, contenders_at, pyramid_beta
from kvpress_lib.report import cell_of, options_table, report_lines, result_table
from kvpress_lib.rows import find_rows, mask_without, overlap, storage_bytes
from script_lib.needle_rows import kept_mask

import hf_kvpolicy as kv
from hf_kvpolicy.allocation import pyramid_targets
from hf_kvpolicy.compat import cache_argument

RECORD = Path(__file__).parents[2] / "benchmarks" / "smollm2-135m_cpu_2026-11-30_kvpress.json"


def seeded(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def test_rows_are_found_by_their_keys_in_any_order_and_through_rounding() -> None:
    dense_HND = seeded(2, 30, 8)
    rows_HK = torch.tensor([[4, 29, 0], [7, 8, 3]])
    kept_HKD = dense_HND.gather(1, rows_HK[..., None].expand(-1, -1, 8))
    noise = 1e-5 * seeded(*kept_HKD.shape)
    assert torch.equal(find_rows(kept_HKD + noise, dense_HND), rows_HK)


def test_a_key_that_is_none_of_the_prompts_is_no_row() -> None:
    dense_HND = seeded(2, 30, 8)
    kept_HKD = dense_HND[:, :3].clone()
    kept_HKD[1, 2] *= 1.1
    with pytest.raises(ValueError, match="1 of 6 kept keys are no keys of the prompt"):
        find_rows(kept_HKD, dense_HND)


def test_two_keys_of_one_row_are_refused() -> None:
    dense_HND = seeded(2, 30, 8)
    with pytest.raises(ValueError, match="same row"):
        find_rows(dense_HND[:, [3, 3, 4]], dense_HND)


@torch.no_grad()
def test_the_keys_of_our_own_cache_are_found_where_it_says_they_lie() -> None:
    model, ids = tiny("llama"), torch.randint(3, 60, (1, 90), generator=torch.Generator().manual_seed(3))
    full, cache = (kv.make_cache(name, model, budget=rows) for name, rows in (("full", None), ("snapkv", 48)))
    for each in (full, cache):
        model(ids, use_cache=True, **{cache_argument(): each})
    for layer in range(cache.num_layers):
        found_HK = find_rows(cache.layers[layer].keys[0], full.layers[layer].keys[0])
        mine = kept_mask([cache.positions(layer)], 90)
        assert torch.equal(kept_mask([list(found_HK)], 90), mine)


def test_a_storage_is_counted_once_and_whole() -> None:
    whole = torch.zeros(10, 4)
    assert storage_bytes([whole, whole[:2], torch.zeros(3)]) == 10 * 4 * 4 + 3 * 4


def test_overlap_counts_rows_as_sets_do() -> None:
    ours, theirs = (seeded(2, 3, 12).roll(shift, 2) > 0 for shift in (0, 1))
    theirs[1, 2] = ours[1, 2]
    found = overlap(ours, theirs)
    pairs = [
        (set(a.nonzero()[:, 0].tolist()), set(b.nonzero()[:, 0].tolist()))
        for a, b in zip(ours.flatten(0, 1), theirs.flatten(0, 1), strict=True)
    ]
    assert found.shared_rows == sum(len(a & b) for a, b in pairs)
    assert found.only_ours_rows == sum(len(a - b) for a, b in pairs)
    assert found.only_theirs_rows == sum(len(b - a) for a, b in pairs)
    assert found.heads_alike == sum(a == b for a, b in pairs) >= 1
    assert found.heads == 6


def test_masked_rows_are_those_that_are_not_held() -> None:
    mask_HN = mask_without(4, 2, torch.tensor([0, 1, 1]), torch.tensor([3, 0, 2]))
    assert mask_HN.tolist() == [[True, True, True, False], [False, True, False, True]]


@pytest.mark.parametrize("rows", [1, 100, 127, 128, 256, 499])
def test_a_ratio_leaves_exactly_the_rows_asked_for(rows: int) -> None:
    for tokens in range(500, 1100):
        # What the press does with its ratio.
        assert max(1, int(tokens * (1 - Press(name="").ratio(tokens, rows)))) == rows


@pytest.mark.parametrize("rows", [128, 256])
def test_both_pyramids_lie_on_one_line(rows: int) -> None:
    layers = 30
    beside = pyramid_targets((rows - PYRAMID_WINDOW) * layers, layers, pyramid_beta(rows))
    top = Fraction(rows, PYRAMID_BETA)
    bottom = 2 * rows - top
    line = [bottom - layer * (bottom - top) / (layers - 1) for layer in range(layers)]
    assert top >= PYRAMID_WINDOW, "else the press keeps the same rows in every layer"
    assert [float(share + PYRAMID_WINDOW) for share in beside] == pytest.approx([float(share) for share in line])


@pytest.mark.parametrize("pair", [FULL, *contenders_at(128)], ids=lambda pair: pair.key)
def test_every_policy_takes_its_options(pair: Any) -> None:
    kv.make_cache(pair.policy, tiny("llama"), budget=pair.rows, **pair.options)


def test_plain_h2o_stands_beside_no_press() -> None:
    for pair in contenders([64, 128]):
        assert pair.policy != "h2o" or pair.options == {"normalize": True, "recent_ratio": 0.0}


def trial(rows: list[int], *, score: float, nll: float, held: int) -> dict[str, Any]:
    return {
        "score": score,
        "answer_nll": nll,
        "output": str(score),
        "answer_ids": [int(score)],
        "held_bytes": held,
        "payload_bytes": held // 2,
        "kept_LHN": kept_mask([[torch.tensor(rows)]], 10),
    }


def test_a_line_says_what_both_sides_scored_kept_and_freed() -> None:
    mib = 2**20
    ours = {
        "a": trial([1, 2, 3], score=1.0, nll=0.5, held=2 * mib),
        "b": trial([4, 5, 6], score=0.0, nll=1.0, held=mib),
    }
    theirs = {"a": trial([1, 2, 3], score=1.0, nll=0.25, held=mib), "b": trial([4, 5, 7], score=1.0, nll=1.0, held=mib)}
    (pair, *_) = contenders_at(128)
    cell = cell_of(pair, ours, theirs, {"a": 4 * mib, "b": 4 * mib})
    (row,) = result_table([cell]).rows
    named = dict(zip(result_table([cell]).columns, row, strict=True))
    assert named["score: ours / theirs"] == "0.50 / 1.00"
    assert named["ours - theirs [95%]"].startswith("-0.50 [")
    assert named["answer NLL: ours / theirs"] == "0.75 / 0.62"
    assert named["equal answers"] == "1 of 2"
    assert named["rows in common"] == "0.8333"
    assert named["heads alike"] == "1 of 2"
    assert named["MiB freed: ours (K/V alone) / theirs"] == "2.50 (3.25) / 3.00"


def test_pairs_that_were_asked_alike_share_a_line() -> None:
    cells = [{**cell_of(p, {}, {}, {}), "pair": p.key} for p in contenders([256, 128])]
    names = [row[0] for row in options_table(cells).rows]
    assert "snapkv @ 256, snapkv @ 128" in names
    assert "pyramidkv @ 128" in names, "its beta depends on the budget"


def test_the_tables_of_the_page_are_those_of_the_record() -> None:
    page = (RECORD.parents[1] / "docs" / "results.md").read_text(encoding="utf-8")
    for table in "\n".join(report_lines(json.loads(RECORD.read_text())["cells"])).split("\n\n"):
        assert table in page, "paste the lines of this table into the page"
