"""Several processes of one launch fill one folder as one process does."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from eval_fakes import fake_builder, tiny_loaded
from typer.testing import CliRunner

from hf_kvpolicy.errors import ConfigError
from hf_kvpolicy.eval.cli import app
from hf_kvpolicy.eval.processes import Processes, launched
from hf_kvpolicy.eval.run_directory import RunDirectory
from hf_kvpolicy.eval.runner import RunOutcome, run_sweep
from hf_kvpolicy.eval.sweep import parse_sweep

pytest.importorskip("evaluate")

SWEEP: dict[str, Any] = {
    "model": "given on the command line",
    "budgets": [48],
    "max_new_tokens": 3,
    "tasks": [{"name": "needle_single_noise", "lengths_tokens": [600], "depths": [0.2, 0.8], "num_examples": 4}],
    "policies": ["snapkv"],
}
# What a run measures with a clock, and where it ran: a process that shares its machine says so.
_VOLATILE = ("timing", "environment")


def stable(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in asdict(row).items() if k not in _VOLATILE} for row in RunDirectory(folder).rows()]


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_two_processes_of_accelerate_leave_the_records_of_one(tmp_path: Path) -> None:
    loaded, model, sweep = tiny_loaded(), tmp_path / "model", tmp_path / "sweep.yaml"
    loaded.model.save_pretrained(model)
    loaded.tokenizer.save_pretrained(model)
    sweep.write_text(yaml.safe_dump(SWEEP))
    run = ["eval", "run", str(sweep), "--model", str(model), "--out"]
    # Without a GPU this option starts two processes all the same; --cpu starts several only through MPI.
    launch = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
        *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
        *("-m", "hf_kvpolicy", *run, str(tmp_path / "two")),
    ]
    done = subprocess.run(
        launch, capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    for rank in (1, 2):
        assert f"process {rank} of 2: 6 rows written, 0 done before, 0 failed" in done.stdout
    assert done.stdout.count("example 1 of 2") == 1, "only the leading process prints how far it is"

    result = CliRunner().invoke(app, [*run[1:], str(tmp_path / "one")])
    assert result.exit_code == 0, result.output
    assert stable(tmp_path / "two") == stable(tmp_path / "one")
    samples = {path.name for path in (tmp_path / "two").glob("cells/*/samples.*")}
    assert samples == {"samples.0.jsonl", "samples.1.jsonl"}
    result = CliRunner().invoke(app, [*run[1:], str(tmp_path / "two")])
    assert "0 rows written, 12 done before" in result.output, "another number of processes continues"


def test_a_process_that_follows_writes_its_samples_alone(tmp_path: Path) -> None:
    config, loaded = parse_sweep(SWEEP), tiny_loaded()

    def run(rank: int) -> RunOutcome:
        directory = RunDirectory(tmp_path, rank=rank, follows=rank > 0)
        return run_sweep(config, loaded, directory, fake_builder, part=(rank + 1, 2), say=lambda line: None)

    with pytest.raises(ConfigError, match="All workers must see one shared folder"):
        run(1)
    run(0)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert run(1) == RunOutcome(written=6, skipped=0, failed=0)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path: content for path, content in after.items() if path in before} == before
    assert {path.name for path in set(after) - set(before)} == {"samples.1.jsonl"}


def test_without_a_launcher_there_is_one_process() -> None:
    with launched() as processes:
        assert processes == Processes(rank=0, size=1)
        processes.wait()
        assert (processes.leads, processes.total(3), processes.leaders("out")) == (True, 3, "out")
        assert processes.device("cuda") == "cuda"


def test_each_process_of_a_machine_takes_a_card_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ranks = [Processes(rank=rank, size=4, local_rank=rank % 2, local_size=2) for rank in range(4)]
    assert [process.device("cuda") for process in ranks] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert {process.device("cpu") for process in ranks} == {"cpu"}
    assert [process.leads for process in ranks] == [True, False, False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "rey"], "Did you mean 'ray'"),
        (["--workers", "2"], "Add --engine ray"),
        (["--engine", "ray", "--part", "1/2"], "Ray splits the examples by itself"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, options: list[str], message: str) -> None:
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    result = CliRunner().invoke(app, ["run", str(tmp_path / "sweep.yaml"), *options])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
