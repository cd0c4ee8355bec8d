"""Sharing a dense prefill changes no number of a run, and is one forward an example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from eval_fakes import tiny_loaded

from hf_kvpolicy.eval.engine import EngineBuilder
from hf_kvpolicy.eval.model_loading import LoadedModel
from hf_kvpolicy.eval.records import Row
from hf_kvpolicy.eval.run_directory import RunDirectory
from hf_kvpolicy.eval.runner import run_sweep
from hf_kvpolicy.eval.sweep import parse_sweep

pytest.importorskip("evaluate")

DOCUMENT: dict[str, Any] = {
    "model": "tiny",
    "budgets": [48, 96],
    "max_new_tokens": 4,
    "query_aware": [True, False],
    "tasks": [{"name": "needle_single_noise", "lengths_tokens": [600], "depths": [0.2, 0.8], "num_examples": 2}],
    "policies": [
        {"name": name, "options": {"on_append": "append"}} if name in ("snapkv", "adakv") else name
        for name in ("snapkv", "adakv", "h2o", "streaming_llm")
    ],
}


class Counted:
    """Token counts of the forwards a model runs."""

    def __init__(self, model: Any) -> None:
        self.lengths: list[int] = []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, args: Any, kwargs: Any) -> None:
        self.lengths.append(kwargs["input_ids"].shape[1])


def run(loaded: LoadedModel, folder: Path, **changes: Any) -> list[Row]:
    config, directory = parse_sweep({**DOCUMENT, **changes}), RunDirectory(folder)
    outcome = run_sweep(config, loaded, directory, EngineBuilder(loaded.model, loaded.tokenizer), say=lambda line: None)
    assert outcome.failed == 0
    return directory.rows()


def test_a_shared_prefill_gives_the_rows_of_own_ones(tmp_path: Path) -> None:
    shared_model, own_model = tiny_loaded(), tiny_loaded()
    shared_forwards, own_forwards = Counted(shared_model.model), Counted(own_model.model)
    shared = run(shared_model, tmp_path / "shared")
    own = run(own_model, tmp_path / "own", share_prefill=False)
    cells = 1 + 5 * 2  # full; random and four policies at two budgets
    assert len(shared) == len(own) == 2 * 2 * cells
    for one, other in zip(shared, own, strict=True):
        assert one.row_key == other.row_key
        assert one.quality is not None
        assert other.quality is not None
        assert one.quality.output_text == other.quality.output_text
        assert one.quality.score == other.quality.score
        assert one.quality.answer_nll == pytest.approx(other.quality.answer_nll, abs=1e-4)
        assert one.cache is not None
        assert other.cache is not None
        for name in ("prompt_rows_mean", "prompt_rows_max", "measured_bytes", "selections", "rows_dropped"):
            assert getattr(one.cache, name) == getattr(other.cache, name), name
        assert one.timing is not None
        assert one.timing.selection_s is not None
        assert other.timing is not None
        assert other.timing.selection_s is None
    # Contexts are long, questions short: an example has one dense run of the whole prompt and one of the context.
    # The canary, which comes first, has one as well.
    assert sum(length > 200 for length in shared_forwards.lengths) == 1 + 2 * 2
    # What every row is compared with is one more.
    assert sum(length > 200 for length in own_forwards.lengths) == 2 + 2 * 2 * (cells + 1)


def test_a_policy_that_takes_part_in_the_forward_runs_its_own(tmp_path: Path) -> None:
    loaded = tiny_loaded()
    forwards = Counted(loaded.model)
    rows = run(loaded, tmp_path, policies=["pyramidinfer"], budgets=[96], query_aware=True)
    assert sum(length > 200 for length in forwards.lengths) == 1 + 2 * (1 + 1)
    timings = {row.cell["policy"]: row.timing.selection_s for row in rows if row.timing is not None}
    assert timings["pyramidinfer"] is None
    assert timings["random"] is not None
