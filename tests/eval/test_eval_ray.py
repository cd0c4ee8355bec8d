"""A sweep on a local Ray cluster of two workers: the same rows, a dead worker's examples, an interrupt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from eval_fakes import tiny_loaded

from hf_kvpolicy.errors import ConfigError
from hf_kvpolicy.eval import ray_engine
from hf_kvpolicy.eval.engine import EngineBuilder
from hf_kvpolicy.eval.execution import Execution
from hf_kvpolicy.eval.model_loading import load_model
from hf_kvpolicy.eval.run_directory import RunDirectory
from hf_kvpolicy.eval.runner import RunOutcome, run_sweep
from hf_kvpolicy.eval.sweep import SweepConfig, parse_sweep

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
pytest.importorskip("evaluate")

_VOLATILE = ("timing", "environment")
_EXAMPLES = 6


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, num_gpus=0, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> SweepConfig:
    folder, loaded = tmp_path_factory.mktemp("model"), tiny_loaded()
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    task = {"name": "needle_single_noise", "lengths_tokens": [600], "depths": [0.2, 0.8], "num_examples": _EXAMPLES}
    document = {"model": str(folder), "budgets": [48], "max_new_tokens": 3, "tasks": [task], "policies": ["snapkv"]}
    return parse_sweep(document)


def stable(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in asdict(row).items() if k not in _VOLATILE} for row in RunDirectory(folder).rows()]


def run(config: SweepConfig, out: Path, say: Callable[[str], None] = lambda line: None, **how: Any) -> RunOutcome:
    return ray_engine.run_on_ray(config, out, Execution(engine="ray", workers=2, **how), say=say)


@pytest.mark.usefixtures("cluster")
def test_two_workers_leave_the_records_of_one_process(config: SweepConfig, tmp_path: Path) -> None:
    loaded = load_model(config.model.name)
    run_sweep(
        config,
        loaded,
        RunDirectory(tmp_path / "one"),
        EngineBuilder(loaded.model, loaded.tokenizer),
        say=lambda line: None,
    )
    said: list[str] = []

    def interrupt(line: str) -> None:
        if not line.startswith("warning:"):
            said.append(line)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "two", interrupt)
    assert said[0].startswith(f"2 workers: example 1 of {_EXAMPLES}")
    found = len(stable(tmp_path / "two"))
    assert 0 < found < 3 * _EXAMPLES
    outcome = run(config, tmp_path / "two")
    assert (outcome.written + outcome.skipped, outcome.failed) == (3 * _EXAMPLES, 0)
    assert outcome.skipped >= found
    assert stable(tmp_path / "two") == stable(tmp_path / "one")
    samples = {path.name for path in (tmp_path / "two").glob("cells/*/samples.*")}
    assert samples == {"samples.0.jsonl", "samples.1.jsonl"}


@pytest.mark.usefixtures("cluster")
def test_examples_of_a_dead_worker_go_to_another(
    config: SweepConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crews: list[Any] = []
    begin = ray_engine._Crew._begin
    monkeypatch.setattr(ray_engine._Crew, "_begin", lambda crew: (crews.append(crew), begin(crew))[1])
    said: list[str] = []

    def kill_the_second(line: str) -> None:
        said.append(line)
        if sum(not line.startswith("warning:") for line in said) == 1:
            ray.kill(crews[0].workers[1])

    outcome = run(config, tmp_path, kill_the_second)
    assert sum("a worker died" in line for line in said) == 1
    assert outcome.failed == 0
    assert len(stable(tmp_path)) == 3 * _EXAMPLES
    lines = sum(path.read_text().count("\n") for path in tmp_path.glob("cells/*/samples.*.jsonl"))
    assert lines == 3 * _EXAMPLES, "what the dead worker wrote was not run again"


@pytest.mark.usefixtures("cluster")
def test_what_a_worker_refuses_is_refused_here(config: SweepConfig, tmp_path: Path) -> None:
    missing = parse_sweep({**config.document, "model": str(tmp_path / "absent")})
    with pytest.raises(ConfigError, match="cannot be loaded"):
        run(missing, tmp_path / "out")


def test_more_workers_than_there_is_room_for_are_refused() -> None:
    room = {"CPU": 5.0, "GPU": 1.0}
    assert ray_engine._worker_count(room, {"num_cpus": 2, "num_gpus": 0}, None) == 2
    assert ray_engine._worker_count(room, {"num_cpus": 2, "num_gpus": 1}, None) == 1
    with pytest.raises(ConfigError, match="3 workers of 2 CPU each are asked for; this Ray cluster has room for 2"):
        ray_engine._worker_count(room, {"num_cpus": 2, "num_gpus": 0}, 3)
