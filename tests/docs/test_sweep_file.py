"""The sweep file that docs/cli.md describes is one that is accepted, and no key is left out."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

pytest.importorskip("evaluate")

from hf_kvpolicy.errors import ConfigError
from hf_kvpolicy.eval.sweep import ModelSpec, PolicySpec, TaskSpec, parse_sweep

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## The sweep file\n")[2].partition("\n## ")[0]


def described(heading: str) -> set[str]:
    """The keys in the first column of the table with that heading."""
    table = SECTION.partition(f"| {heading} |")[2].partition("\n\n")[0]
    return {key for line in table.splitlines() for key in re.findall(r"`(\w+)`", line.split("|")[1])}


def test_the_example_is_a_sweep() -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
    config = parse_sweep(yaml.safe_load(block))
    assert [task.name for task in config.tasks] == ["needle_single_pydoc", "perplexity_pydoc"]
    assert [policy.name for policy in config.policies].count("random") == 1


def test_every_key_is_described() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_sweep({"modell": "tiny"})
    allowed = str(refused.value).partition("allowed are ")[2].partition(".")[0]
    assert set(allowed.split(", ")) == described("key")
    assert {field.name for field in fields(TaskSpec)} == described("key of a task")
    assert {field.name for field in fields(PolicySpec)} == described("key of a policy")
    assert all(f"`{field.name}`" in SECTION for field in fields(ModelSpec))
