"""Which results may be compared, by which metric, and what is said of those that may not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("evaluate")
pytest.importorskip("scipy")

from eval_fakes import made_row, tiny_loaded
from test_eval_report import RUN
from typer.testing import CliRunner

from hf_kvpolicy.config import make_cache
from hf_kvpolicy.errors import ConfigError, NotComparableError
from hf_kvpolicy.eval.cli import app
from hf_kvpolicy.eval.comparison import METRICS, compare, rank
from hf_kvpolicy.eval.comparison_table import comparisons, pairs_to_compare
from hf_kvpolicy.eval.coordinates import ACHIEVED, KEYS, POLICY, coordinates_of, is_unrecorded
from hf_kvpolicy.eval.explanation import explain
from hf_kvpolicy.eval.packed import write_packed
from hf_kvpolicy.eval.policy_coordinates import policy_coordinates
from hf_kvpolicy.eval.records import Row
from hf_kvpolicy.eval.results import Result, open_run, results_of
from hf_kvpolicy.eval.retention import normalised_retention, retention_curve

PLACE = {
    **RUN["environments"]["place"],
    "hardware": "a CPU",
    "backend": "sdpa",
    "batch_size": 1,
    "jobs": 1,
}
# A run that records everything which today's records may lack.
RECORDED: dict[str, Any] = {
    **RUN,
    "identity": {**RUN["identity"], "weights_sha256": "1", "config_sha256": "2", "tokenizer_sha256": "3"},
    "positional_contract": "rope 10000",
    "metric": "needle_match",
    "decode_mode": "greedy",
    "nll_mode": "one token a forward",
    "environments": {"place": PLACE},
    "parallelism": "none",
    "sweep_sha256": "4",
}


def rows_of(policy: str, budget: int | None, right: int = 20, count: int = 20, **cell: Any) -> list[Row]:
    """Rows of which the first `right` are right."""
    rows = [
        made_row(
            policy,
            i,
            budget=budget,
            output="7" if i < right else "no",
            example={
                **{"id": f"example-{i}", "prompt_tokens": 500, "prompt_sha256": f"p{i}", "truncated": False},
                **{"template_preamble": "", "added_bos_tokens": 0},
            },
        )
        for i in range(count)
    ]
    return [replace(row, cell={**row.cell, **cell}) for row in rows]


def coordinates(rows: list[Row], **run: Any) -> Any:
    return coordinates_of(rows, {**RECORDED, **run})


def written(path: Path, rows: list[Row], **run: Any) -> list[Result]:
    write_packed({**RECORDED, **run}, rows, path)
    return results_of(open_run(path))


def test_every_coordinate_has_a_value_and_what_is_not_recorded_says_so() -> None:
    found = coordinates(rows_of("snapkv", 64))
    assert set(found) == set(KEYS)
    missing = {key for key in KEYS if is_unrecorded(found[key])}
    # What the cache declares is in no record yet, and these examples have no distance; everything else is here.
    assert missing <= {*POLICY, "distance_tokens"}
    assert not missing & {"policy", "options", "budget", "budget_unit", "budget_denominator", "manifest_sha256"}
    assert (found["resident_bytes"], found["payload_bytes"], found["side_bytes"]) == (64 * 1024, 64000, 64 * 24)
    assert is_unrecorded(coordinates_of(rows_of("snapkv", 64), RUN)["backend"])


def test_slack_is_no_part_of_the_bytes_that_are_compared() -> None:
    rows = rows_of("snapkv", 64)
    slack = [replace(row, cache=replace(row.cache, measured_bytes=10**6, slack_bytes=10**6 - 65536)) for row in rows]
    assert coordinates(slack)["resident_bytes"] == coordinates(rows)["resident_bytes"] == 65536


@pytest.mark.parametrize("key", sorted({key for metric in METRICS.values() for key in metric.requires}))
def test_one_coordinate_that_differs_forbids_every_metric_that_requires_it(key: str) -> None:
    ours = dict(coordinates(rows_of("snapkv", 64)))
    theirs = {**ours, "policy": "h2o", key: "something else"}
    for name, metric in METRICS.items():
        found = compare(ours, theirs, name)
        assert found.relation == ("not comparable" if key in metric.requires else "comparable")
        assert [item.key for item in found.differing] == ([key] if key in metric.requires else [])


def test_what_is_compared_is_required_of_no_metric() -> None:
    assert not {key for metric in METRICS.values() for key in metric.requires} & {*POLICY, *ACHIEVED}


def test_quality_does_not_ask_for_the_hardware_and_time_does() -> None:
    elsewhere = {"place": {**PLACE, "hardware": "another", "threads": 8}}
    ours, theirs = coordinates(rows_of("snapkv", 64)), coordinates(rows_of("h2o", 64), environments=elsewhere)
    assert compare(ours, theirs, "score").relation == "comparable"
    assert [item.key for item in compare(ours, theirs, "decode").differing] == ["hardware", "threads"]


@pytest.mark.parametrize(("rows", "relation"), [(100, "comparable"), (102, "comparable"), (103, "not comparable")])
def test_bytes_may_differ_by_two_percent(rows: int, relation: str) -> None:
    ours, theirs = coordinates(rows_of("snapkv", 100)), coordinates(rows_of("h2o", rows))
    assert compare(ours, theirs, "score").relation == relation
    assert compare(theirs, ours, "nll").relation == relation
    assert compare(ours, theirs, "bytes").relation == "comparable"


def test_the_full_cache_is_a_reference_at_other_bytes_but_not_on_other_prompts() -> None:
    ours = coordinates(rows_of("snapkv", 64))
    assert compare(ours, coordinates(rows_of("full", None)), "score").relation == "reference"
    elsewhere = coordinates(rows_of("full", None, query_aware=False))
    assert [item.key for item in compare(ours, elsewhere, "score").differing] == ["query_aware"]


def test_what_two_runs_do_not_record_is_not_equal() -> None:
    """Within one run nothing that it does not record of itself can differ; between two runs nobody knows."""
    within = [coordinates_of(rows_of(policy, 64), RUN) for policy in ("snapkv", "h2o")]
    assert compare(*within, "score").relation == "comparable"
    other = coordinates_of(rows_of("h2o", 64), {**RUN, "started_utc": "later"})
    assert "backend: not recorded" in str(compare(within[0], other, "score"))


def test_an_unknown_metric_is_refused() -> None:
    ours = coordinates(rows_of("snapkv", 64))
    with pytest.raises(ConfigError, match="Did you mean 'score'"):
        compare(ours, ours, "scores")


def test_lineage_is_not_comparability(tmp_path: Path) -> None:
    ours = coordinates(rows_of("snapkv", 64))
    theirs = coordinates(rows_of("snapkv", 64, length_tokens=1024))
    found = explain(ours, theirs)
    assert {"weights_sha256", "manifest_sha256"} <= set(found.lineage)
    assert [item.key for item in found.differing] == ["length_tokens"]
    assert {item.relation for item in found.by_metric} == {"not comparable"}
    assert "  score: not comparable (length_tokens)" in found.lines()
    assert "shared (lineage, which makes nothing comparable)" in found.lines()[0]


def test_a_ranking_needs_every_pair_to_be_comparable(tmp_path: Path) -> None:
    rows = [*rows_of("snapkv", 64, 12), *rows_of("h2o", 64, 15), *rows_of("random", 64, 3), *rows_of("h2o", 128)]
    snapkv, h2o, random, larger = written(tmp_path / "run.json", rows)
    assert rank([snapkv, h2o, random], "score") == [h2o, snapkv, random]
    assert rank([random, snapkv, h2o], "nll") == [h2o, snapkv, random]
    with pytest.raises(NotComparableError, match=r"h2o @ 64 and h2o @ 128 cannot be ranked .* resident_bytes"):
        rank([h2o, larger], "score")


def test_neither_the_full_cache_nor_a_failed_cell_is_ranked(tmp_path: Path) -> None:
    failed = made_row("random", 0, budget=64, status="failed: x", reason="why", quality=None)
    full, snapkv, random = written(tmp_path / "run.json", [*rows_of("full", None), *rows_of("snapkv", 64), failed])
    with pytest.raises(NotComparableError, match="one is the full cache"):
        rank([full, snapkv], "score")
    with pytest.raises(NotComparableError, match="has no result"):
        rank([snapkv, random], "score")


def test_pairs_are_with_baselines_of_the_same_budget(tmp_path: Path) -> None:
    rows = [
        *rows_of("full", None),
        *(row for budget in (64, 128) for policy in ("random", "snapkv") for row in rows_of(policy, budget, 10)),
    ]
    results = written(tmp_path / "run.json", rows)
    found = [(ours.label, theirs.label) for ours, theirs in pairs_to_compare(results)]
    assert found == [
        ("random @ 64", "full"),
        ("snapkv @ 64", "full"),
        ("snapkv @ 64", "random @ 64"),
        ("random @ 128", "full"),
        ("snapkv @ 128", "full"),
        ("snapkv @ 128", "random @ 128"),
    ]
    assert len(pairs_to_compare(results, every=True)) == 10


def test_cells_of_one_name_are_compared_between_runs(tmp_path: Path) -> None:
    first = written(tmp_path / "a.json", rows_of("snapkv", 64, 20))
    second = written(tmp_path / "b.json", rows_of("snapkv", 64, 8))
    (item,) = comparisons(pairs_to_compare([*first, *second]), "score")
    assert (item.ours.source, item.theirs.source) == (second[0].source, first[0].source)
    assert item.difference is not None
    assert item.difference.mean == pytest.approx(-0.6)


def over_time(rows: list[Row], mean: float) -> list[Row]:
    """The same rows, with another mean over the forwards."""
    return [replace(row, cache=replace(row.cache, rows_over_time_mean=mean)) for row in rows]


def test_a_cell_and_what_is_matched_to_it_are_compared_by_rows_held_over_time() -> None:
    source = coordinates(over_time(rows_of("scissorhands", 64), 50.0))
    asked = {"policy": "scissorhands", "options": {}, "budget": 64}
    matched = [replace(row, cell={**row.cell, "budget": None, "matched_to": asked}) for row in rows_of("random", 50)]
    near, far = (coordinates(over_time(matched, mean)) for mean in (50.9, 51.1))
    for name, metric in METRICS.items():
        assert compare(near, source, name).relation == "comparable", "64 rows and 50 after the prompt"
        assert [item.key for item in compare(source, far, name).differing] == ["rows_over_time"] * (
            metric.requires_equal_bytes
        )
    other = coordinates(over_time(rows_of("scissorhands", 65), 50.0))
    assert [item.key for item in compare(near, other, "score").differing] == ["resident_bytes"], "another cell's rows"
    older = coordinates([replace(row, cache=replace(row.cache, rows_over_time_mean=None)) for row in matched])
    assert str(compare(older, source, "score").differing[0]) == "rows_over_time: not recorded"


def test_p_values_are_adjusted_for_all_comparable_pairs(tmp_path: Path) -> None:
    rows = [*rows_of("full", None), *rows_of("random", 64, 0), *rows_of("snapkv", 64, 14), *rows_of("h2o", 72, 5)]
    results = written(tmp_path / "run.json", rows)
    found = {
        (item.ours.label, item.theirs.label): item
        for item in comparisons(pairs_to_compare(results, every=True), "score")
    }
    random, snapkv = found["snapkv @ 64", "random @ 64"], found["snapkv @ 64", "full"]
    # 14 pairs differ, all one way; 6 do.
    assert (random.p, snapkv.p) == pytest.approx((2 / 2**14, 2 / 2**6))
    # Four pairs are comparable: random and the rest with full, snapkv with random. snapkv - full comes last.
    assert (random.adjusted_p, snapkv.adjusted_p) == pytest.approx((2 * 2 / 2**14, 2 / 2**6))
    refused = found["h2o @ 72", "snapkv @ 64"]
    assert (refused.difference, refused.adjusted_p) == (None, None)
    assert "resident_bytes: 73,728 / 65,536" in refused.verdict


@pytest.mark.parametrize("policy", ["full", "snapkv", "streaming_llm", "h2o", "zigzagkv"])
def test_what_a_cache_declares_is_read_from_its_manifest(policy: str) -> None:
    model = tiny_loaded().model
    found = policy_coordinates(make_cache(policy, model, None if policy == "full" else 64))
    assert set(found) == set(POLICY) - {"options", "matched_to"}
    expected = {
        "full": ("none", "static", "kv_head", "full_cache_exact", "none"),
        "snapkv": ("prefill", "end_of_prefill", "kv_head", "lossy_subset", "rows"),
        "streaming_llm": ("both", "every_step", "kv_head", "lossy_subset", "rows"),
        "h2o": ("both", "every_step", "kv_head", "lossy_subset", "rows"),
        "zigzagkv": ("prefill", "end_of_prefill", "kv_head", "lossy_subset", "rows"),
    }[policy]
    assert tuple(found[key] for key in ("phase", "cadence", "owner", "semantic_class", "budget_unit")) == expected


def test_a_profile_gives_the_calibration_digest() -> None:
    model = tiny_loaded().model
    tables = [[[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.0, 5.0]]]
    digests = [
        policy_coordinates(make_cache("headkv", model, 64, profile=table))["calibration_sha256"] for table in tables
    ]
    assert len({*digests, None}) == 3


def test_retention_lies_between_no_context_and_the_full_cache() -> None:
    assert normalised_retention(0.6, full=0.9, floor=0.1) == pytest.approx(0.625)
    assert retention_curve({256: 0.9, 64: 0.1}, full=0.9, floor=0.1) == {64: 0.0, 256: 1.0}
    assert normalised_retention(0.7, full=0.7, floor=0.5) == pytest.approx(1.0)
    with pytest.raises(NotComparableError, match="too little to draw retention in"):
        retention_curve({64: 0.5}, full=0.55, floor=0.39)


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.fixture
def run(tmp_path: Path) -> Path:
    failed = made_row("keyformer", 0, budget=64, status="failed: x", reason="why", quality=None)
    rows = [*rows_of("full", None), *rows_of("random", 64, 0), *rows_of("snapkv", 64, 14), *rows_of("h2o", 72, 5)]
    written(tmp_path / "run.json", [*rows, failed])
    return tmp_path / "run.json"


def test_the_table_names_differences_refusals_and_failures(run: Path) -> None:
    code, text = invoke("compare", run, "--every-pair")
    assert code == 0, text
    assert "needle_single_noise, 512 tokens" in text
    assert "higher (+0.70 [+0.43, +0.85], n = 20)  (smoke)" in text
    assert "(reference, smoke)" in text
    assert "h2o @ 72 - random @ 64: resident_bytes: 73,728 / 65,536" in text
    assert "keyformer @ 64: failed: x (why)" in text
    code, text = invoke("compare", run, "--metric", "time")
    assert code == 0, text
    assert "prefill (s)" in text
    assert "decode (ms/token)" in text


def test_cells_are_chosen_by_label_and_ranked(run: Path) -> None:
    code, text = invoke("compare", run, "--rank", "--cell", "random @ 64", "--cell", "snapkv @ 64")
    assert code == 0, text
    assert text.splitlines()[1:] == ["1. snapkv @ 64: 0.700, n = 20", "2. random @ 64: 0.000, n = 20"]
    code, text = invoke("compare", run, "--rank", "--cell", "random @ 64", "--cell", "h2o @ 72")
    assert code == 2
    assert "cannot be ranked by score" in text
    assert invoke("compare", run, "--cell", "x")[0] == 2
    assert invoke("compare", run, "--metric", "speed")[0] == 2


def test_two_results_are_explained(run: Path) -> None:
    code, text = invoke("explain", f"{run}:snapkv @ 64", "h2o @ 72")
    assert code == 0, text
    assert "  policy: snapkv / h2o" in text
    assert "  score: not comparable (resident_bytes)" in text
    assert "  bytes: comparable" in text
    code, text = invoke("explain", "snapkv @ 64", "h2o @ 72")
    assert code == 2
    assert "names no folder or file" in text
    refused = " ".join(invoke("explain", f"{run}:nothing", "h2o @ 72")[1].split())
    assert "'nothing' names no cell. Labels are full, random @ 64, snapkv @ 64, h2o @ 72, keyformer @ 64." in refused
    misspelt = " ".join(invoke("compare", run, "--cell", "snapkv(window=16) @ 64")[1].split())
    assert misspelt.endswith("Did you mean 'snapkv @ 64'?")
    assert "There is no folder" in invoke("explain", "absent:nothing", "h2o @ 72")[1]
