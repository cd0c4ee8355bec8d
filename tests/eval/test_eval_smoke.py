"""The shipped sweep `smoke` on a tiny model: every policy acts, and every cell holds the rows that were asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("evaluate")

from eval_fakes import tiny_loaded
from typer.testing import CliRunner

from hf_kvpolicy import available_policies
from hf_kvpolicy.eval.cells import Cell
from hf_kvpolicy.eval.cli import app
from hf_kvpolicy.eval.records import Row
from hf_kvpolicy.eval.run_directory import RunDirectory
from hf_kvpolicy.eval.sweep import load_sweep
from hf_kvpolicy.registry import needs_training

# Heads and layers of these may hold different rows; their total is what was asked for.
DISTRIBUTES = ("pyramidkv", "zigzagkv", "adakv", "headkv", "pyramidinfer")
# A new token takes the place of an old one. All others keep the answer's rows on top of the prompt's.
REPLACES = ("sliding_window", "streaming_llm", "h2o", "keyformer")
DROP_RATIO = 0.5  # scissorhands' default: the share of a full budget that goes at once


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    folder, out = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("smoke")
    loaded = tiny_loaded()
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    result = CliRunner().invoke(app, ["run", "smoke", "--model", str(folder), "--out", str(out)])
    assert result.exit_code == 0, result.output
    return RunDirectory(out).rows()


def asked_rows(row: Row) -> int:
    """The budget in rows of one layer and head, read off by hand; of a matched cell as its record has it."""
    budget = row.cell["budget"]
    if "matched_to" in row.cell:
        assert row.cache is not None
        assert row.cache.budget_rows is not None
        return row.cache.budget_rows
    return budget if isinstance(budget, int) else int(budget * row.example["prompt_tokens"])


def test_it_has_every_policy_at_every_budget(rows: list[Row]) -> None:
    config = load_sweep(Path("smoke"))
    ordinary = {name for name in available_policies() if not needs_training(name)}
    assert {policy.name for policy in config.policies} == ordinary
    cells = {(row.cell["policy"], row.cell["budget"]) for row in rows if "matched_to" not in row.cell}
    unbounded = {"full", "fastgen", "minicache"}
    bounded = ordinary - unbounded
    assert cells == {(name, None) for name in unbounded} | {(name, budget) for name in bounded for budget in (64, 0.5)}
    matched = {Cell(**row.cell).label for row in rows if "matched_to" in row.cell}
    sources = ("scissorhands @ 64", "scissorhands @ 0.5", "fastgen(recovery=0.5)")
    assert matched == {f"{name} @ rows of {source}" for name in ("random", "sliding_window") for source in sources}
    assert len(rows) == 2 * len(cells) + 2 * len(matched)
    assert {row.status for row in rows} == {"ok"}


def test_every_cell_holds_what_was_asked_for_after_the_prompt(rows: list[Row]) -> None:
    for row in rows:
        cache, prompt = row.cache, row.example["prompt_tokens"]
        assert cache is not None
        span = (cache.prompt_rows_min, cache.prompt_rows_max)
        if row.cell["policy"] == "full":
            assert span == (prompt, prompt)
            continue
        if row.cell["policy"] == "minicache":
            assert span == (prompt, prompt)
            # Of two layers' K and V one stays, with its lengths; exceptions come on top.
            assert 0.5 < cache.payload_bytes / (prompt * 2 * 2 * (2 * 8 * 4)) < 0.95
            continue
        assert cache.selections >= 1
        if row.cell["policy"] == "fastgen":
            assert 0 < cache.prompt_rows_mean < prompt
            continue
        assert cache.prompt_rows_mean == asked_rows(row), row.cell
        if row.cell["policy"] not in DISTRIBUTES:
            assert span == (asked_rows(row), asked_rows(row)), row.cell
        # K and V of 8 numbers in float32, of 2 layers with 2 heads.
        assert cache.payload_bytes == asked_rows(row) * 2 * 2 * (2 * 8 * 4)


def test_every_cell_holds_what_it_should_after_the_answer(rows: list[Row]) -> None:
    for row in rows:
        policy, cache, quality = row.cell["policy"], row.cache, row.quality
        assert cache is not None
        assert quality is not None
        if policy in ("full", "fastgen", "minicache"):
            continue
        budget, steps = asked_rows(row), quality.output_tokens - 1
        assert steps == 7
        expected = budget if policy in REPLACES else budget + steps
        if policy == "scissorhands":
            # Full after the prompt: the first token of the answer makes room for more than itself.
            expected = budget - int(DROP_RATIO * budget) + steps
        assert cache.final_rows_mean == expected, row.cell
        # After the prompt, then after each of the answer's tokens but the last.
        held = [budget, *(expected - steps + step for step in range(1, steps + 1))]
        held = [budget] * (steps + 1) if policy in REPLACES else held
        assert cache.rows_over_time_mean == pytest.approx(sum(held) / len(held)), row.cell


def test_matched_cells_have_the_rows_their_sources_held(rows: list[Row]) -> None:
    found = {(Cell(**row.cell).label, row.example["id"]): row for row in rows}
    matched = [row for row in rows if "matched_to" in row.cell]
    assert len(matched) == 12
    for row in matched:
        source = found[Cell(**row.cell).source.label, row.example["id"]].cache
        assert source is not None
        assert source.rows_over_time_mean is not None
        assert abs(asked_rows(row) - source.rows_over_time_mean) <= 0.5
