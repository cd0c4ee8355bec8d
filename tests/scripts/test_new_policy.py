"""The scaffold writes a policy that runs, changes nothing when it refuses, and passes its own test."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import new_policy
import pytest

ROOT = Path(__file__).parents[2]
# Folders of the repository that are installed as parts of the package.
MAPPED = ("model_patches", "configs", "eval")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the scaffold reads and changes."""
    skip = shutil.ignore_patterns("__pycache__")
    for folder in ("hf_kvpolicy", "configs", "docs", "tests/arch", "tests/reference"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=skip)
    return tmp_path


def contents(tree: Path) -> dict[str, bytes]:
    return {str(path.relative_to(tree)): path.read_bytes() for path in sorted(tree.rglob("*")) if path.is_file()}


def run(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONSAFEPATH", None)
    environment.pop("KVPOLICY_TEST_INSTALLED", None)
    return subprocess.run([sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True)


def test_scaffolded_policy_passes_its_own_test_and_the_rules_for_policies(tree: Path) -> None:
    assert new_policy.main(["every_other", "--root", str(tree)]) == 0
    # As installed: the mapped folders lie inside the package.
    for folder in MAPPED:
        shutil.copytree(ROOT / folder, tree / "hf_kvpolicy" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("conftest.py", "helpers.py", "proofs.py"):
        shutil.copy(ROOT / "tests" / file, tree / "tests")
    shutil.copytree(
        ROOT / "tests/persistence", tree / "tests/persistence", ignore=shutil.ignore_patterns("__pycache__")
    )
    paths = [
        "tests/policies/test_every_other.py",
        "tests/arch/test_policies.py",
        "tests/persistence/test_round_trip.py",
    ]
    finished = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "every_other", *paths)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    passed = re.search(r"(\d+) passed", finished.stdout)
    assert passed is not None, finished.stdout
    assert int(passed[1]) > 30, "its own twelve, the rules, and saves of every unit"


def test_scaffold_is_listed_everywhere(tree: Path) -> None:
    before = contents(tree)
    assert new_policy.main(["every_other", "--root", str(tree)]) == 0
    after = contents(tree)
    changed = {path for path in after if after[path] != before.get(path)}
    targets = {target.format(name="every_other") for target in new_policy.TARGETS.values()}
    assert changed == targets | set(new_policy.LISTINGS) | {"docs/policies.md"}
    for listing in new_policy.LISTINGS:
        text = after[listing].decode()
        assert text.count("EveryOtherCache") == 2, f"{listing}: one import and one entry of __all__"
        compile(text, listing, "exec")
    assert "| `every_other` | `EveryOtherCache` |" in after["docs/policies.md"].decode()
    assert b"policy: every_other" in after["configs/policies/every_other.yaml"]


def test_scaffold_is_formatted(tree: Path) -> None:
    pytest.importorskip("ruff", reason="ruff is not installed")
    new_policy.main(["every_other", "--root", str(tree)])
    shutil.copy(ROOT / "pyproject.toml", tree)
    paths = [target.format(name="every_other") for target in new_policy.TARGETS.values() if target.endswith(".py")]
    for command in (["check"], ["format", "--check"]):
        finished = run(tree, "-m", "ruff", *command, *paths, *new_policy.LISTINGS)
        assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize(
    "name", ["Every", "every-other", "9lives", "_x", "x_", "a__b", "class", "", "every other", "é"]
)
def test_bad_names_are_refused(tree: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(tree)
    assert new_policy.main([name, "--root", str(tree)]) == 1
    assert "for example every_other" in capsys.readouterr().err
    assert contents(tree) == before


@pytest.mark.parametrize("name", ["snapkv", "full", "streaming_llm"])
def test_existing_policies_are_refused(tree: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(tree)
    assert new_policy.main([name, "--root", str(tree)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert contents(tree) == before


def test_a_file_in_the_way_is_not_overwritten(tree: Path) -> None:
    assert new_policy.main(["every_other", "--root", str(tree)]) == 0
    before = contents(tree)
    assert new_policy.main(["every_other", "--root", str(tree)]) == 1
    assert contents(tree) == before


def test_a_listing_of_another_shape_is_refused_before_anything_is_written(tree: Path) -> None:
    listing = tree / "hf_kvpolicy/policies/__init__.py"
    listing.write_text('"""No list here."""\n\nfrom .retention import SnapKVCache\n', encoding="utf-8")
    before = contents(tree)
    assert new_policy.main(["every_other", "--root", str(tree)]) == 1
    assert contents(tree) == before
