"""The canary: first, once a folder and environment; a wrong answer is told, a broken model or cache ends the run."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("evaluate")
pytest.importorskip("matplotlib")

from eval_fakes import FakeCache, fake_builder, tiny_loaded
from typer.testing import CliRunner

from hf_kvpolicy.errors import ConfigError, IntegrityError
from hf_kvpolicy.eval.canary import canary_note, canary_warning, run_canary
from hf_kvpolicy.eval.cells import Cell
from hf_kvpolicy.eval.cli import app
from hf_kvpolicy.eval.engine import EngineBuilder
from hf_kvpolicy.eval.model_loading import LoadedModel, load_model, smollm2_directory
from hf_kvpolicy.eval.packed import PackedRun, write_packed
from hf_kvpolicy.eval.prompting import PromptEncoder
from hf_kvpolicy.eval.report import write_report
from hf_kvpolicy.eval.run_directory import RunDirectory
from hf_kvpolicy.eval.runner import RunOutcome, run_sweep
from hf_kvpolicy.eval.sweep import parse_sweep

DOCUMENT: dict[str, Any] = {
    "model": "tiny",
    "budgets": [64],
    "max_new_tokens": 2,
    "tasks": [{"name": "needle_single_noise", "lengths_tokens": [600], "depths": [0.5], "num_examples": 1}],
    "policies": ["snapkv"],
}
RIGHT = {"prompt_tokens": 240, "expected": "1234567", "answered": True, "output_text": " 1234567."}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_loaded()


def run(loaded: LoadedModel, folder: Path, build: Any = fake_builder, **how: Any) -> tuple[RunOutcome, list[str]]:
    said: list[str] = []
    outcome = run_sweep(parse_sweep(DOCUMENT), loaded, RunDirectory(folder), build, say=said.append, **how)
    return outcome, said


def test_it_runs_before_every_cell_and_not_again(loaded: LoadedModel, tmp_path: Path) -> None:
    built: list[Cell] = []

    def build(cell: Cell) -> FakeCache:
        built.append(cell)
        return fake_builder(cell)

    run(loaded, tmp_path, build)
    first, *others = built
    assert (first.policy, first.budget, first.task) == ("full", None, "canary")
    assert "canary" not in {cell.task for cell in others}
    (kept,) = (tmp_path / "canaries").iterdir()
    assert kept.stem in RunDirectory(tmp_path).environments()
    before = kept.read_bytes()
    (snapkv,) = tmp_path.glob("cells/*snapkv*/samples.0.jsonl")
    snapkv.unlink()
    built.clear()
    assert run(loaded, tmp_path, build)[0].written == 1
    assert {cell.policy for cell in built} == {"snapkv"}
    assert kept.read_bytes() == before


def test_every_environment_of_a_folder_has_its_own(loaded: LoadedModel, tmp_path: Path) -> None:
    run(loaded, tmp_path)
    (place,) = (tmp_path / "environments").iterdir()
    elsewhere = {**json.loads(place.read_text()), "torch": "1.0"}
    place.rename(place.with_stem("elsewhere"))
    place.with_stem("elsewhere").write_text(json.dumps(elsewhere))
    (canary,) = (tmp_path / "canaries").iterdir()
    canary.rename(canary.with_stem("elsewhere"))
    run(loaded, tmp_path, allow_mixed=True)
    assert {path.stem for path in (tmp_path / "canaries").iterdir()} == {place.stem, "elsewhere"}
    assert set(RunDirectory(tmp_path).read_run()["canaries"]) == {place.stem, "elsewhere"}


def test_a_model_that_does_not_answer_is_told_of_and_runs(loaded: LoadedModel, tmp_path: Path) -> None:
    outcome, said = run(loaded, tmp_path)
    assert outcome == RunOutcome(written=3, skipped=0, failed=0)
    assert said[0].startswith("warning: Canary: asked for ")
    assert "low scores of questions then say nothing of a policy" in said[0]
    ((_, canary),) = RunDirectory(tmp_path).read_run()["canaries"].items()
    assert canary["answered"] is False
    assert canary["prompt_rows_mean"] == canary["prompt_tokens"]
    assert math.isfinite(canary["answer_nll"])
    assert run(loaded, tmp_path)[1] == said[:1], "also by a run that finds everything done"


def test_a_right_answer_warns_of_nothing() -> None:
    assert canary_warning(RIGHT) is None
    assert canary_note(RIGHT) == (
        "Canary: asked for 1234567, hidden in 240 tokens, the full cache answers '1234567.': right."
    )


@pytest.mark.skipif(not smollm2_directory().is_dir(), reason="scripts/fetch_model has not been run")
def test_smollm2_answers() -> None:
    smollm2 = load_model("smollm2-135m-instruct", dtype="float32")
    build = EngineBuilder(smollm2.model, smollm2.tokenizer)
    found = run_canary(smollm2, PromptEncoder(smollm2.tokenizer), build, share=True)
    assert found["answered"]
    assert 150 < found["prompt_tokens"] < 300
    assert found["kl_to_full_nats"] == pytest.approx(0.0, abs=1e-5)


def test_the_reports_show_it(loaded: LoadedModel, tmp_path: Path) -> None:
    run(loaded, tmp_path)
    directory = RunDirectory(tmp_path)
    note = canary_note(next(iter(directory.read_run()["canaries"].values())))
    write_packed(directory.read_run(), directory.rows(), tmp_path / "packed.json")
    for source, out in ((directory, tmp_path), (PackedRun(tmp_path / "packed.json"), tmp_path / "packed")):
        out.mkdir(exist_ok=True)
        write_report(source, out)
        assert note in (out / "report.md").read_text()
        page = (out / "report.html").read_text()
        assert '<p class="warning">Canary: asked for' in page
        assert "<h3>Canary: " in page
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert note in result.output


def broken(value: float) -> LoadedModel:
    """A model whose logits are no numbers."""
    found = tiny_loaded()
    with torch.no_grad():
        # Not its first numbers, of which the digest of the weights is made.
        found.model.lm_head.weight[10:].fill_(value)
    return found


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("engine", [True, False])
def test_logits_that_are_no_numbers_end_the_run(tmp_path: Path, value: float, engine: bool) -> None:
    found = broken(value)
    build = EngineBuilder(found.model, found.tokenizer) if engine else fake_builder
    for _ in range(2):  # nothing is kept that would let the second start pass
        with pytest.raises(IntegrityError, match="no finite numbers"):
            run(found, tmp_path, build)
    assert RunDirectory(tmp_path).rows() == []


@dataclass
class EmptyCache(FakeCache):
    """What a model leaves that does not write into the cache it is given."""

    def stored_rows(self, layer: int) -> torch.Tensor:
        return super().stored_rows(layer) * int(layer > 0)


def test_a_cache_with_an_empty_layer_ends_the_run(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="without rows"):
        run(loaded, tmp_path, lambda cell: EmptyCache())


def test_what_cannot_be_run_is_told_of_and_left_to_the_cells(loaded: LoadedModel, tmp_path: Path) -> None:
    outcome, said = run(tiny_loaded(max_position_embeddings=128), tmp_path / "short")
    assert said[0].startswith("warning: Canary: a prompt of ")
    assert "failed: ConfigError (The prompt and its answer take" in said[0]
    assert outcome.failed == 3

    def build(cell: Cell) -> FakeCache:
        raise ConfigError("No such model.")

    assert run(loaded, tmp_path / "refused", build)[0].failed == 3
