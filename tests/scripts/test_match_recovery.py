"""Matching a recovery to rows: the bisection against every threshold, and the policy against what was promised."""

from __future__ import annotations

import pytest

pytest.importorskip("evaluate")

from eval_fakes import tiny_loaded
from match_recovery import STEPS, matches, matching_recovery, noted_candidates, prompts_of, rows_at, table

from hf_kvpolicy.allocation import Candidate
from hf_kvpolicy.eval.sweep import parse_sweep

SWEEP = parse_sweep(
    {
        "model": "tiny",
        "tasks": [{"name": "needle_single_noise", "lengths_tokens": [600], "depths": [0.5], "num_examples": 2}],
        "policies": ["fastgen"],
        "max_new_tokens": 4,
    }
)


def candidates(*measured: tuple[int, float]) -> list[Candidate]:
    named = [Candidate(name=f"part{i}", rows=rows, recovery=share) for i, (rows, share) in enumerate(measured)]
    return [*named, Candidate(name="full", rows=100, recovery=1.0)]


NOTED = [candidates((5, 0.2), (30, 0.81), (60, 0.9)), candidates((5, 0.65), (40, 0.7), (61, 0.95))]


def test_mean_rows_follow_the_smallest_family_that_is_enough() -> None:
    assert rows_at(NOTED, 0.1) == 5
    assert rows_at(NOTED, 0.5) == (30 + 5) / 2
    assert rows_at(NOTED, 0.85) == (60 + 61) / 2
    assert rows_at(NOTED, 0.99) == 100


@pytest.mark.parametrize("target", [1, 5, 11, 12, 20, 40, 60, 75, 90, 100, 500])
def test_the_bisection_finds_what_a_look_at_every_threshold_finds(target: int) -> None:
    distances = [abs(rows_at(NOTED, step / STEPS) - target) for step in range(STEPS)]
    found = matching_recovery(NOTED, target)
    assert abs(rows_at(NOTED, found) - target) == min(distances)


def test_a_cache_that_runs_at_the_recovery_stores_the_rows_that_were_read_off() -> None:
    loaded = tiny_loaded()
    prompts = prompts_of(SWEEP, loaded, 1000, 2)
    noted = noted_candidates(SWEEP, loaded, prompts)
    assert len(noted) == 2 * loaded.model.config.num_hidden_layers * loaded.model.config.num_key_value_heads
    (match,) = matches(SWEEP, loaded, prompts, [150])
    assert match.rows == pytest.approx(rows_at(noted, match.recovery))
    assert match.rows < len(prompts[0].token_ids)
    rows_bytes = match.payload_bytes / match.rows / len(noted) * 2
    assert rows_bytes == pytest.approx(2 * 8 * 4), "K and V of 8 numbers in float32"
    assert table([match])[-1].startswith(f"| 150 | {match.recovery:.4f} | {match.rows:.1f} |")


def test_prompts_of_another_seed_are_other_prompts() -> None:
    loaded = tiny_loaded()
    mine, sweeps = (prompts_of(SWEEP, loaded, seed, 2) for seed in (1000, SWEEP.seeds[0]))
    assert {p.sha256 for p in mine}.isdisjoint(p.sha256 for p in sweeps)
