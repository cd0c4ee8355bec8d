"""Sweep files: what they expand to and what they refuse."""

from __future__ import annotations

import copy
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from hf_kvpolicy.errors import BudgetError, ConfigError
from hf_kvpolicy.eval import fields
from hf_kvpolicy.eval.cells import cells_at, task_points
from hf_kvpolicy.eval.sweep import load_sweep, parse_sweep

SWEEPS = Path(__file__).parents[2] / "configs" / "sweeps"
BASE: dict[str, Any] = {
    "model": "some/model",
    "budgets": [64, 0.5, "1MiB"],
    "tasks": [{"name": "needle_single_noise", "lengths_tokens": [512, 256], "num_examples": 5}],
    "policies": [{"name": "snapkv", "grid": {"window": [8, 16]}, "options": {"kernel_size": 5}}],
}


TASK = {**BASE["tasks"][0], "lengths_tokens": [512]}


def changed(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(BASE), **changes}


def test_full_comes_first_and_random_runs_at_the_same_budgets() -> None:
    config = parse_sweep(BASE)
    assert [(p.name, p.budgets) for p in config.policies] == [
        ("full", (None,)),
        ("random", (64, 0.5, "1MiB")),
        ("snapkv", (64, 0.5, "1MiB")),
    ]
    assert [p.name for p in parse_sweep(changed(include_random=False)).policies] == ["full", "snapkv"]


def test_the_loss_that_is_none_is_part_of_the_sweep() -> None:
    assert parse_sweep(BASE).delta == 0.05
    assert parse_sweep(changed(delta=0.1)).delta == 0.1
    for delta in (-0.1, 1, "small", True):
        with pytest.raises(ConfigError, match="a number in"):
            parse_sweep(changed(delta=delta))


def test_cells_cross_options_budgets_lengths_and_seeds() -> None:
    config = parse_sweep(changed(seeds=[0, 1]))
    points = list(task_points(config))
    assert [(p.request.length_tokens, p.request.seed) for p in points] == [
        (256, 0),
        (256, 1),
        (512, 0),
        (512, 1),
    ]
    labels = [cell.label for cell in cells_at(config, points[0])]
    assert labels[0] == "full"
    assert len(labels) == 1 + 3 + 2 * 3
    assert "snapkv(kernel_size=5,window=8) @ 0.5" in labels


def test_a_text_that_is_only_read_has_no_floor() -> None:
    tasks = [*BASE["tasks"], {"name": "perplexity_pydoc", "lengths_tokens": [512], "num_examples": 2}]
    config = parse_sweep(changed(tasks=tasks, floor=True))
    floors = [[cell.policy for cell in cells_at(config, point)].count("no_context") for point in task_points(config)]
    assert floors == [1, 1, 0]


def test_cell_keys_differ_by_every_coordinate() -> None:
    config = parse_sweep(changed(seeds=[0, 1]))
    keys = [cell.key("id") for point in task_points(config) for cell in cells_at(config, point)]
    assert len(keys) == len(set(keys)) == 40
    first = next(cells_at(config, next(task_points(config))))
    assert first.key("another model") != first.key("id")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (changed(polices=[]), "unknown key 'polices'.*Did you mean 'policies'"),
        (changed(tasks=[{"name": "needle_single_noise", "lengths": [5]}]), "Did you mean 'lengths_tokens'"),
        (
            changed(tasks=[{"name": "needle_single_noiz", "lengths_tokens": [5]}]),
            "Did you mean 'needle_single_noise'",
        ),
        (changed(tasks=[]), "tasks must be a list with at least one"),
        (changed(policies=[{"name": "snapkv", "option": {}}]), "Did you mean 'options'"),
        (changed(policies=[{"grid": {}}]), "lacks the key 'name'"),
        (changed(model={"name": "m", "dtyp": "float32"}), "Did you mean 'dtype'"),
        (changed(max_new_tokens=0), "at least 1; got 0"),
        (changed(seeds=[True]), "whole number"),
        (changed(threads="two"), "whole number"),
        (changed(tasks=[{**BASE["tasks"][0], "depths": [0.5, 1.5]}]), r"ratios in \[0, 1\]"),
        *(
            (changed(tasks=[{**TASK, "depths": depths}]), r"ratios in \[0, 1\]")
            for depths in (0.5, ["a"], [True], None)
        ),
        (changed(tasks=[{**TASK, "depths": [0.5, 0.5]}]), "names 0.5 twice"),
        (changed(tasks=[{**TASK, "name": ["x"]}]), r"tasks\[0\].name must be a name"),
        (changed(tasks=[{**TASK, "name": 5}]), r"tasks\[0\].name must be a name"),
        (changed(tasks=[{**TASK, "params": ["x"]}]), "must be a mapping"),
        (changed(tasks=[{**TASK, "params": {1: 2}}]), "must be a mapping from names"),
        (changed(tasks=[{**TASK, "lengths_tokens": [512, 512]}]), "names 512 twice"),
        (changed(tasks=[TASK, {**TASK, "num_examples": 10}]), "names .*'needle_single_noise', 512, .* twice"),
        (changed(seeds=[1, 1]), "seeds names 1 twice"),
        (changed(budgets=[64, 64]), "budgets names 64 twice"),
        (changed(policies=[{"name": "snapkv", "grid": ["window"]}]), "must be a mapping from names"),
        (changed(policies=[{"name": "snapkv", "grid": {"window": 16}}]), "must be a list of the values"),
        (changed(policies=[{"name": "snapkv", "grid": {"pooling": "max"}}]), "must be a list of the values"),
        (changed(policies=[{"name": "snapkv", "grid": {"window": []}}]), "must be a list of the values"),
        (changed(policies=[{"name": "snapkv", "options": ["window"]}]), "must be a mapping from names"),
        (changed(policies=[{"name": "snapkv", "options": None}]), "must be a mapping from names"),
        (changed(policies=[{"name": "snapkv", "options": {"window": date(2020, 1, 1)}}]), "which no record can hold"),
        (changed(policies=[{"name": 5}]), r"policies\[0\].name must be a name"),
        (changed(policies=["no_context"]), "Write `floor: true`"),
        (changed(model={"name": "m", "dtype": "float33"}), "Did you mean 'float32'"),
        (changed(model={"name": None}), "model.name must be a name"),
    ],
)
def test_refusals_name_the_key_and_the_remedy(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_sweep(document)


def test_two_entries_of_one_task_differ_in_length_or_answers_and_share_their_params() -> None:
    """A cell names neither a task's parameters nor its depths."""
    turns = {"name": "delayed_reference_turns_pydoc", "lengths_tokens": [900], "num_examples": 2}
    entries = [{**turns, "params": {"distances": [1, 2]}}, {**turns, "lengths_tokens": [950]}]
    with pytest.raises(ConfigError, match="with other params than an entry before it"):
        parse_sweep(changed(tasks=entries))
    assert len(parse_sweep(changed(tasks=[TASK, {**TASK, "max_new_tokens": 3}])).tasks) == 2


def test_a_full_cache_with_options_is_no_baseline() -> None:
    """Rows in few bits are measured by the full cache, as all others are."""
    few_bits = {"name": "full", "options": {"quantize": "int8"}}
    config = parse_sweep(changed(policies=[few_bits], budgets=[]))
    assert [(policy.name, dict(policy.options)) for policy in config.policies] == [
        ("full", {}),
        ("full", few_bits["options"]),
    ]
    cells = list(cells_at(config, next(task_points(config))))
    assert [cell.is_full for cell in cells] == [True, False]


@pytest.mark.parametrize("content", [b"\xff\xfe", b"model: [", b"- a", b"model: \x00"])
def test_a_file_that_is_no_sweep_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "sweep.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"sweep\.yaml"):
        load_sweep(tmp_path / "sweep.yaml")


@pytest.mark.parametrize("budget", [0, 1.5, "64 parsecs", True])
def test_a_bad_budget_is_refused_before_anything_runs(budget: Any) -> None:
    with pytest.raises(BudgetError):
        parse_sweep(changed(budgets=[budget]))


def test_overrides_reach_nested_values() -> None:
    document = copy.deepcopy(BASE)
    for text in ("tasks.0.num_examples=10", "budgets=[32]", "policies.0.options.pooling=avg"):
        fields.set_dotted(document, *fields.parse_override(text))
    config = parse_sweep(document)
    assert config.tasks[0].num_examples == 10
    assert config.policies[-1].budgets == (32,)
    assert config.policies[-1].options == {"kernel_size": 5, "pooling": "avg"}


def test_an_override_that_is_no_yaml_is_refused() -> None:
    with pytest.raises(ConfigError, match="--set 'budgets=\\[64' is not valid YAML"):
        fields.parse_override("budgets=[64")


@pytest.mark.parametrize("text", ["tasks.0", "=3"])
def test_a_malformed_override_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"a\.b=value"):
        fields.parse_override(text)


def test_an_override_past_the_end_of_a_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="no element of a list of 1"):
        fields.set_dotted(copy.deepcopy(BASE), "tasks.3.name", "x")


def test_a_model_name_is_looked_up_among_the_shipped_configs() -> None:
    config = parse_sweep(changed(model="smollm2-135m-instruct"))
    assert (config.model.name, config.model.dtype) == ("smollm2-135m-instruct", "float32")
    assert parse_sweep(BASE).model.name == "some/model"


@pytest.mark.parametrize("path", sorted(SWEEPS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_sweeps_are_valid(path: Path) -> None:
    config = load_sweep(path)
    assert config.policies[0].name == "full"
    for task in config.tasks:
        assert not task.depths or task.num_examples % len(task.depths) == 0


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match="no sweep file"):
        load_sweep(Path("absent.yaml"))
