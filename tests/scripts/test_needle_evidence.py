"""The evidence script on a tiny model: its plain rules keep what the policies keep, and its shares are shares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("evaluate")

from helpers import tiny
from needle_evidence import CONTENDERS, Case, _asked, _held, summary_lines
from script_lib.eager import attention_of_layers, layer_scores
from script_lib.needle_rows import Needle, agreement, budget_parts, find_needle, kept_mask, needle_rows, percentile

import hf_kvpolicy as kv
from hf_kvpolicy.compat import cache_argument

ROOT = Path(__file__).parents[2]
TOKENS, BUDGET = 90, 48


@pytest.fixture(scope="module")
def case() -> Case:
    ids = torch.randint(3, 60, (1, TOKENS), generator=torch.Generator().manual_seed(3))
    model, scores = tiny("llama", "eager"), []
    heads = model.config.num_key_value_heads

    def receive(layer: int, attention_QTN: torch.Tensor) -> None:
        scores.append(layer_scores(attention_QTN, layer, heads))

    with torch.no_grad(), attention_of_layers(model, receive):
        model(ids, use_cache=False)
    needle = Needle(sentence=(30, 40), value=(34, 38))
    example: object = None
    return Case(example, tuple(ids[0].tolist()), (), needle, scores, torch.ones(len(scores), heads, TOKENS))


@pytest.mark.parametrize("label", CONTENDERS)
def test_the_plain_rule_keeps_what_the_policy_keeps(case: Case, label: str) -> None:
    model = tiny("llama")
    policy, options = CONTENDERS[label]
    cache = kv.make_cache(policy, model, budget=BUDGET, **options)
    with torch.no_grad():
        model(torch.tensor([case.prompt_ids]), use_cache=True, **{cache_argument(): cache})
    shared, worst = agreement(_held(cache, TOKENS), _asked(case, label, BUDGET))
    # A tiny random model's scores lie close together: one row of a head may change places with the next one.
    assert shared > 0.99
    assert worst >= (BUDGET - 1) / BUDGET


def test_sums_and_means_of_the_same_attention_rank_differently(case: Case) -> None:
    by_sum, by_mean = (_asked(case, label, BUDGET).float() for label in ("h2o", "h2o by mean"))
    places = torch.arange(TOKENS).float()
    assert (by_sum * places).sum() < (by_mean * places).sum(), "sums favour old rows"


def test_the_newest_rows_are_the_last(case: Case) -> None:
    assert _asked(case, "sliding_window", BUDGET)[..., -BUDGET:].all()


def test_shares_of_the_needle_and_of_the_budget() -> None:
    rows = [[torch.tensor([0, 1, 2, 3]), torch.tensor([2, 3, 4, 12])]]
    mask = kept_mask(rows, 10)
    assert mask.sum().item() == 7, "position 12 is not in the prompt"
    attention = torch.zeros(1, 2, 10)
    attention[0, 0, 3], attention[0, 1, 4] = 3.0, 1.0
    found = needle_rows(mask, Needle(sentence=(1, 5), value=(3, 5)), attention)
    assert found["sentence_rows"] == pytest.approx(6 / 8)
    assert found["value_rows"] == pytest.approx(3 / 4)
    assert found["heads_with_whole_value"] == 0.5
    assert found["value_attention"] == 1.0, "head 0 pays nothing to the row it lacks"
    assert found["value_rows_by_layer"] == [pytest.approx(3 / 4)]
    assert budget_parts(mask) == pytest.approx([1 / 7, 1 / 7, 2 / 7, 2 / 7, 1 / 7, 0, 0, 0, 0, 0])


def test_a_percentile_counts_the_rows_below() -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    assert percentile(scores, Needle(sentence=(0, 4), value=(2, 4))) == pytest.approx((2 + 3) / 8)


def test_the_needle_is_found_in_tokens() -> None:
    class Letters:
        def __call__(self, text: str, **_: object) -> dict[str, list[tuple[int, int]]]:
            return {"offset_mapping": [(i, i + 1) for i in range(len(text))]}

    text = "Before it. The code is 42. After 42."
    needle = find_needle(Letters(), text, "42")
    assert text[slice(*needle.sentence)] == "The code is 42."
    assert text[slice(*needle.value)] == "42"


def test_tables_show_means_and_leave_out_what_was_not_measured() -> None:
    cell = {"policy": "random", "budget": 8, "value_rows_by_layer": [0.0] * 6, "budget_by_tenth": [0.1] * 10}
    records = [{"cells": [{**cell, "value_rows": x}], "value_percentile": {"sum": 0.25}} for x in (0.0, 1.0)]
    lines = summary_lines(records)
    assert "| random @ 8 |  |  |  | 0.500 |  |  |  |" in lines
    assert "| policy | layers 0-4 | layers 5-5 |" in lines
    assert "| sum | 0.25 |" in lines


def test_the_tables_of_the_page_are_those_of_the_records() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    records = json.loads((ROOT / "benchmarks" / "smollm2-135m_cpu_2026-11-30_needle_evidence.json").read_text())
    measured = [cell for record in records["examples"] for cell in record["cells"] if "agreement" in cell]
    assert all(cell["agreement_worst_head"] >= 1 - 1.01 / cell["budget"] for cell in measured), "one row in a head"
    for table in "\n".join(summary_lines(records["examples"])).split("\n\n"):
        assert table in page, "paste the lines of this table into the page"
