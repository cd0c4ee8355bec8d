"""KL and top-1 agreement against hand-computed values, and against a run of the full cache."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_fakes import tiny_loaded

from hf_kvpolicy.eval.engine import EngineBuilder
from hf_kvpolicy.eval.metrics.agreement import agreement
from hf_kvpolicy.eval.run_directory import RunDirectory
from hf_kvpolicy.eval.runner import run_sweep
from hf_kvpolicy.eval.sweep import parse_sweep


def logs(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


def test_hand_computed_values() -> None:
    full, ours = logs([0.5, 0.5, 0.0], [0.25, 0.75, 0.0]), logs([0.25, 0.25, 0.5], [0.25, 0.75, 0.0])
    found = agreement(full, ours)
    # The first position: ln 2 for either token. The second: the same distribution. Means over two positions.
    assert found.kl_nats == pytest.approx(math.log(2) / 2)
    assert found.top1_ratio == 0.5


def test_equal_distributions_have_no_distance_and_a_ruled_out_token_an_infinite_one() -> None:
    full = torch.log_softmax(torch.randn(5, 11, generator=torch.Generator().manual_seed(0)), dim=-1)
    assert agreement(full, full) == agreement(full, full.clone())
    assert agreement(full, full).kl_nats == 0.0
    assert agreement(logs([0.5, 0.5]), logs([1.0, 0.0])).kl_nats == math.inf


def test_kl_agrees_with_torch() -> None:
    generator = torch.Generator().manual_seed(1)
    full, ours = (torch.log_softmax(torch.randn(7, 23, generator=generator), dim=-1) for _ in range(2))
    expected = torch.nn.functional.kl_div(ours, full, log_target=True, reduction="none").sum(-1).mean()
    assert agreement(full, ours).kl_nats == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("share", [True, False])
def test_a_run_compares_with_the_models_own_cache(tmp_path: Path, share: bool) -> None:
    pytest.importorskip("evaluate")
    document: dict[str, Any] = {
        "model": "tiny",
        "budgets": [48],
        "max_new_tokens": 4,
        "query_aware": [True, False],
        "share_prefill": share,
        "tasks": [{"name": "needle_single_noise", "lengths_tokens": [600], "depths": [0.5], "num_examples": 2}],
        "policies": ["snapkv"],
    }
    loaded = tiny_loaded()
    run_sweep(
        parse_sweep(document),
        loaded,
        RunDirectory(tmp_path),
        EngineBuilder(loaded.model, loaded.tokenizer),
        say=lambda line: None,
    )
    rows = RunDirectory(tmp_path).rows()
    assert len(rows) == 2 * 2 * 3
    for row in rows:
        assert row.quality is not None
        assert row.quality.kl_to_full_nats is not None
        if row.cell["policy"] == "full":
            assert row.quality.kl_to_full_nats == pytest.approx(0.0, abs=1e-6)
            assert row.quality.top1_agreement_ratio == 1.0
        else:
            assert row.quality.kl_to_full_nats > 1e-5
