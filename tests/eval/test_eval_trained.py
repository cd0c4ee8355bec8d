"""Checkpoints that were trained for a policy: they have no full cache, and that is said instead of measured."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("evaluate")
pytest.importorskip("matplotlib")

from eval_fakes import tiny_loaded, tiny_tokenizer
from helpers import declared
from transformers import LlamaForCausalLM

from hf_kvpolicy.eval.engine import EngineBuilder
from hf_kvpolicy.eval.model_loading import LoadedModel
from hf_kvpolicy.eval.outcomes import Outcome
from hf_kvpolicy.eval.report import write_report
from hf_kvpolicy.eval.run_directory import RunDirectory
from hf_kvpolicy.eval.runner import run_sweep
from hf_kvpolicy.eval.summary import summarise
from hf_kvpolicy.eval.sweep import parse_sweep


def checkpoint(policy: str) -> LoadedModel:
    if policy == "dmc":
        folder = str(files("hf_kvpolicy.configs") / "models" / "dmc-toy")
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return LoadedModel(name="toy", source="toy", model=model, tokenizer=tiny_tokenizer(chat=False))
    loaded = tiny_loaded(chat=False)
    declared(loaded.model, policy)
    return loaded


def sweep(policy: str, **changes: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "tasks": [{"name": "perplexity_pydoc", "lengths_tokens": [400], "num_examples": 1}],
        "policies": [policy],
        **changes,
    }


@pytest.mark.parametrize("policy", ["dmc", "layer_condensed"])
def test_the_checkpoints_own_policy_is_asked_and_measured(policy: str, tmp_path: Path) -> None:
    loaded, said = checkpoint(policy), []
    assert loaded.trained_policy == policy
    document = sweep(policy)
    document["tasks"][0]["params"] = {"continuation_tokens": 24}
    directory = RunDirectory(tmp_path)
    build = EngineBuilder(loaded.model, loaded.tokenizer)
    outcome = run_sweep(parse_sweep(document), loaded, directory, build, say=said.append)
    assert outcome.failed == 0, "the full cache was put there by the harness"
    (canary,) = directory.read_run()["canaries"].values()
    assert canary["policy"] == policy
    assert canary["answered"] is False
    assert f"{policy}, which the checkpoint was trained for, answers" in said[0]
    assert f"warning: This checkpoint was trained for '{policy}'" in said[1]
    full, own = summarise(directory.rows())
    assert full.outcome is Outcome.CHECKPOINT_INCOMPATIBLE
    assert own.measured is not None
    assert own.measured.kl_to_full_nats is None, "an ordinary cache reads these rows wrongly: no distance to it is one"
    assert own.measured.top1_agreement_ratio is None
    assert own.outcome is Outcome.UNMEASURED
    assert own.reason == "there is no full cache to compare with: the checkpoint was trained for other rows"
    write_report(directory, tmp_path)
    assert "400 tokens (not interpretable: the checkpoint takes no full cache)" in (tmp_path / "report.md").read_text()


def test_another_policy_asked_for_by_the_sweep_is_a_failure(tmp_path: Path) -> None:
    loaded = checkpoint("dmc")
    document = sweep("streaming_llm", budgets=[64], include_random=False)
    document["tasks"][0]["params"] = {"continuation_tokens": 24}
    outcome = run_sweep(
        parse_sweep(document),
        loaded,
        RunDirectory(tmp_path),
        EngineBuilder(loaded.model, loaded.tokenizer),
        say=lambda line: None,
    )
    assert outcome.failed == 1
    assert {summary.outcome for summary in summarise(RunDirectory(tmp_path).rows())} == {
        Outcome.CHECKPOINT_INCOMPATIBLE
    }


def test_an_ordinary_checkpoint_was_trained_for_none() -> None:
    assert tiny_loaded().trained_policy is None
