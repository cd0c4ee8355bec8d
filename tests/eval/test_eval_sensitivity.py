"""One control at a time (0x10C, 0x10D): the specification's numbers, and what equal bytes do not say."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_kvpolicy.contract.costs import Ratio
from hf_kvpolicy.errors import ConfigError
from hf_kvpolicy.eval.cli import app
from hf_kvpolicy.eval.sensitivity import BASE, CONTROLS, ONE_CONTROL_CASES, Workload, derive, probe, selected_positions

BYTES = ("full_payload_bytes", "policy_payload_bytes")
ALL_SEE = Ratio(numerator=8, denominator=8)


def test_the_base_has_the_numbers_of_the_specification() -> None:
    found = derive(BASE)
    assert (found["owners"], found["row_bytes"]) == (8, 512)
    assert (found["full_payload_bytes"], found["policy_payload_bytes"]) == (163_840, 73_728)
    assert found["full_to_policy_ratio"] == pytest.approx(2.222222, abs=1e-6)
    assert found["selected_positions"] == [0, 1, 5, 9, 14, 20, 28, 29, 30, 31]
    assert found["score_slots"] == 4
    assert (found["reference_position"], found["owners_that_see_the_reference"]) == (14, ALL_SEE)
    assert BASE.rows_by_layer() == (20, 20, 20, 20)
    assert BASE.owner_rows() == [10] * 8


def test_there_are_eleven_cases_one_for_each_input_that_matters() -> None:
    assert len(ONE_CONTROL_CASES) == 11
    assert {*CONTROLS, "layers", "head_dim"} == {field.name for field in fields(Workload)}


@pytest.mark.parametrize("control", CONTROLS)
def test_a_case_changes_one_input_and_names_every_derived_value_once(control: str) -> None:
    found = probe(control, ONE_CONTROL_CASES[control])
    assert (found.before, found.after) == (getattr(BASE, control), ONE_CONTROL_CASES[control])
    assert {*found.changed, *found.unchanged} == set(derive(BASE))
    assert not {*found.changed} & {*found.unchanged}
    after = derive(replace(BASE, **{control: ONE_CONTROL_CASES[control]}))
    assert {name: after[name] for name in found.changed} == {name: new for name, (_, new) in found.changed.items()}
    assert found.changed


# By hand: owners x (prompt rows + 8 decode rows) x row bytes.
@pytest.mark.parametrize(
    ("control", "full", "kept", "ratio"),
    [
        ("prompt_rows", 8 * 72 * 512, 8 * 18 * 512, 4.0),
        ("decode_rows", 8 * 64 * 512, 8 * 42 * 512, 64 / 42),
        ("budget_rows", 8 * 40 * 512, 8 * 16 * 512, 2.5),
        ("scalar_bytes", 8 * 40 * 256, 8 * 18 * 256, 40 / 18),
        ("kv_heads", 16 * 40 * 512, 16 * 18 * 512, 40 / 18),
    ],
)
def test_bytes_follow_from_the_formula(control: str, full: int, kept: int, ratio: float) -> None:
    found = derive(replace(BASE, **{control: ONE_CONTROL_CASES[control]}))
    assert tuple(found[name] for name in BYTES) == (full, kept)
    assert found["full_to_policy_ratio"] == pytest.approx(ratio)


def test_a_longer_prompt_raises_the_ratio_and_a_longer_answer_lowers_it_towards_one() -> None:
    by_prompt = [derive(replace(BASE, prompt_rows=rows))["full_to_policy_ratio"] for rows in (32, 64, 128)]
    by_answer = [derive(replace(BASE, decode_rows=rows))["full_to_policy_ratio"] for rows in (8, 32, 10**6)]
    assert by_prompt == sorted(by_prompt)
    assert by_answer == sorted(by_answer, reverse=True)
    assert by_answer[-1] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    "control", ["recent_rows", "sink_rows", "observation_queries", "layer_rows", "head_rows", "delayed_distance"]
)
def test_equal_bytes_do_not_show_equal_history(control: str) -> None:
    found = probe(control, ONE_CONTROL_CASES[control])
    assert set(BYTES) <= set(found.unchanged)
    _, seen = found.changed["owners_that_see_the_reference"]
    assert seen.numerator < seen.denominator


def test_unequal_heads_keep_the_total_and_hide_the_reference_from_half_of_the_owners() -> None:
    found = probe("head_rows", ((14, 6),) * 4)
    assert found.changed["owners_that_see_the_reference"][1] == Ratio(numerator=4, denominator=8)


def test_the_widest_scores_of_the_window_are_kept() -> None:
    """Sums of the four last queries, in hundredths: 20 has 70, 9 has 50, 14 has 40, 5 has 35; 11, 17 and 23 have 5."""
    kept = [set(selected_positions(BASE, rows)) for rows in range(6, 15)]
    added = [sorted(larger - smaller) for smaller, larger in itertools.pairwise(kept)]
    assert added == [[20], [9], [14], [5], [23], [17], [11], [27]]


@pytest.mark.parametrize(
    ("control", "value", "match"),
    [
        ("prompt_row", 64, "Did you mean 'prompt_rows'"),
        ("prompt_rows", 32, "already"),
        ("budget_rows", 5, "it protects 6"),
        ("budget_rows", 33, "the prompt has 32"),
        ("prompt_rows", 0, "at least 1"),
        ("decode_rows", -1, "at least 0"),
        ("kv_heads", 2.5, "whole number"),
        ("layer_rows", [28, 22, 18], "each of 4 layers"),
        ("layer_rows", [21, 19, 20, 20], "do not go evenly"),
        ("layer_rows", 20, "for each layer"),
        ("head_rows", [[12, 6]] * 4, "do not add up"),
        ("head_rows", [[20]] * 4, "4 layers of 2 heads"),
        ("head_rows", [10, 10], "for each layer"),
        ("delayed_distance", 33, "before the first"),
    ],
)
def test_what_no_cache_could_hold_is_refused(control: str, value: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        probe(control, value)


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["sensitivity", *arguments])
    return result.exit_code, result.output


def test_the_command_prints_every_case_or_one() -> None:
    code, text = invoke()
    assert code == 0, text
    assert "full_to_policy_ratio: 2.2222x" in text
    assert [line.partition(":")[0] for line in text.splitlines() if " -> " in line and line[0] != " "] == list(CONTROLS)
    code, text = invoke("--control", "layer_rows", "--value", "[28, 22, 18, 12]")
    assert code == 0, text
    assert "owners_that_see_the_reference: 8 of 8 -> 6 of 8" in text
    assert "prompt_rows" not in text
    for wrong in (["--control", "prompt_rows"], ["--value", "3"], ["--control", "x", "--value", "3"]):
        code, text = invoke(*wrong)
        assert code == 2
        assert text.startswith("error: ")
