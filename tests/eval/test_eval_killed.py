"""A run that is killed at any moment and continued leaves the records of one that was not."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from eval_fakes import fake_builder, tiny_loaded

from hf_kvpolicy.eval.cli import app
from hf_kvpolicy.eval.run_directory import RunDirectory
from hf_kvpolicy.eval.runner import RunOutcome, run_sweep
from hf_kvpolicy.eval.sweep import parse_sweep

pytest.importorskip("evaluate")

SWEEP: dict[str, Any] = {
    "model": "tiny",
    "budgets": [48],
    "max_new_tokens": 3,
    "tasks": [{"name": "needle_single_noise", "lengths_tokens": [600], "depths": [0.2, 0.8], "num_examples": 20}],
    "policies": ["streaming_llm", "snapkv"],
}
_KILLS = 20
# What a run measures with a clock.
_VOLATILE = ("timing",)


def stable(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in asdict(row).items() if k not in _VOLATILE} for row in RunDirectory(folder).rows()]


def forked(work: Callable[[], int]) -> int:
    """Start a copy of this process; it loads nothing again."""
    torch.set_num_threads(1)
    child = os.fork()
    if child == 0:
        try:
            os._exit(work())
        finally:
            os._exit(99)
    return child


def test_killed_and_continued_equals_uninterrupted(tmp_path: Path) -> None:
    config, loaded = parse_sweep(SWEEP), tiny_loaded()
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def run(folder: Path) -> RunOutcome:
        return run_sweep(config, loaded, RunDirectory(folder), fake_builder, say=lambda line: None)

    def work() -> int:
        run(killed)
        return 0

    run(whole)
    rng, rows = random.Random(0), 0
    for _ in range(_KILLS):
        child = forked(work)
        # Killed once it has written something new, at a moment of its own.
        while (found := len(RunDirectory(killed).rows())) <= rows and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.002)
        time.sleep(rng.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert found > rows
        rows = len(RunDirectory(killed).rows())
    outcome = run(killed)
    assert stable(killed) == stable(whole)
    assert outcome.written + outcome.skipped == len(stable(whole))
    lines = sum(len(path.read_text().splitlines()) for path in killed.glob("cells/*/samples.*.jsonl"))
    assert lines == len(stable(whole)), "no example was run twice"


def test_an_interrupt_ends_with_status_130_and_a_run_that_continues(tmp_path: Path) -> None:
    loaded, out = tiny_loaded(), tmp_path / "out"
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    arguments = ["run", tmp_path / "sweep.yaml", "--model", tmp_path / "model", "--out", out]

    def work() -> int:
        return int(app([str(argument) for argument in arguments], standalone_mode=False) or 0)

    def work_slowly() -> int:
        # Only this copy of the process: a busy machine may look away for longer than the whole run takes.
        write = RunDirectory.append

        def append(self: RunDirectory, row: Any) -> None:
            write(self, row)
            time.sleep(0.1)

        RunDirectory.append = append  # type: ignore[method-assign]
        # A shell's background jobs, and all they start, ignore this signal.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return work()

    child = forked(work_slowly)
    while not any(path.stat().st_size for path in out.glob("cells/*/samples.*.jsonl")):
        time.sleep(0.005)
    os.kill(child, signal.SIGINT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    written = len(RunDirectory(out).rows())
    assert 0 < written < 80
    assert work() == 0
    assert len(RunDirectory(out).rows()) == 80
