"""docs/capabilities.md is what its record gives, and the record is of the tests that there are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from proofs import MODELS, PROPERTY, CapabilityRecorder, Proof, read_record, write_record

import hf_kvpolicy as kv

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from script_lib.capability_page import UNPROVEN, families, page  # noqa: E402

RECORD, PAGE = ROOT / "docs" / "capabilities.json", ROOT / "docs" / "capabilities.md"
BEAMS = Proof("tests/a.py::test_beams", "beams", "proved", "llama", "snapkv")
REFUSED = Proof("tests/a.py::test_refused", "beams", "refused", "llama", "h2o")


@pytest.fixture
def published(pytestconfig: pytest.Config) -> None:
    """What is published is about to be replaced where the run itself records."""
    if pytestconfig.option.capabilities:
        pytest.skip("this run writes the record anew")


@pytest.mark.usefixtures("published")
def test_the_page_is_what_the_record_gives() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(read_record(RECORD)), "run scripts/capabilities --page"


@pytest.mark.usefixtures("published")
def test_every_recorded_test_exists_and_every_marked_one_is_recorded(tmp_path: Path) -> None:
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.proves(" in path.read_text("utf-8")]
    marked.remove(Path(__file__))
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--assert=plain"]
    command += [word for plugin in ("xdist", "cacheprovider", "hypothesispytest") for word in ("-p", f"no:{plugin}")]
    environment = os.environ | {"KVPOLICY_TEST_FULL": "1", "KVPOLICY_TEST_BRIEF": "0"}
    ran = subprocess.run(
        [*command, "--capabilities", str(tmp_path / "collected.json"), *map(str, marked)],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    recorded, collected = (read_record(file)["proofs"] for file in (RECORD, tmp_path / "collected.json"))
    gone = {proof: count for proof, count in recorded.items() if collected[proof] < count}
    assert not gone, "these cells lost tests: run scripts/capabilities"
    fresh = {proof[:3] for proof in collected} - {proof[:3] for proof in recorded}
    assert not fresh, "these tests have no entry in the record: run scripts/capabilities"


@pytest.mark.usefixtures("published")
def test_every_policy_and_every_supported_family_has_a_row() -> None:
    rows = {line.split("|")[1].strip() for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"}
    assert {f"`{policy}`" for policy in kv.available_policies()} <= rows
    assert set(families()) <= rows
    assert {family.partition(" ")[0] for family in families()} == set(kv.supported_model_types())


def test_models_of_the_families_tests_have_their_row() -> None:
    from families._alibi_models import MODELS as own_attention
    from families._table import FAMILIES
    from families._wrappers import WRAPPERS
    from helpers import FAMILIES as plain

    assert {*own_attention, *FAMILIES, *WRAPPERS, *plain} == set(MODELS)


def test_what_is_not_proved_is_not_counted() -> None:
    record = {"date": "today", "run": "scripts/test --full", "tests": 2000, "torch": "2", "transformers": "5"}
    lines = page({**record, "proofs": Counter({BEAMS: 3, REFUSED: 1})}).splitlines()
    cells = {cell for line in lines if line.startswith(("| `snapkv` |", "| `h2o` |")) for cell in line.split(" | ")[1:]}
    assert {cell.strip(" |") for cell in cells} == {
        "1",
        "1 refused",
        UNPROVEN,
        "llama",
        "beams",
        "[a: `test_refused`](../tests/a.py)",
    }
    assert not any(line.startswith("| `adakv`") and any(c.isdigit() for c in line) for line in lines)


def ended(recorder: CapabilityRecorder, exitstatus: int, **report: Any) -> None:
    properties = [(PROPERTY, list(BEAMS))]
    recorder.pytest_runtest_logreport(SimpleNamespace(user_properties=properties, **report))  # type: ignore[arg-type]
    recorder.pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace()), exitstatus)  # type: ignore[arg-type]


def test_only_what_passed_in_a_run_that_passed_is_recorded(tmp_path: Path) -> None:
    for number, (exitstatus, when, passed) in enumerate([(1, "call", True), (0, "setup", True), (0, "call", False)]):
        file = tmp_path / f"{number}.json"
        ended(CapabilityRecorder(file), exitstatus, when=when, passed=passed)
        assert not file.exists() or not read_record(file)["proofs"]
    ended(CapabilityRecorder(tmp_path / "record.json"), 0, when="call", passed=True)
    assert read_record(tmp_path / "record.json")["proofs"] == Counter({BEAMS: 1})


def test_a_part_is_renewed_and_a_whole_run_replaces(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    write_record(file, Counter({BEAMS: 3, REFUSED: 1}), run="scripts/test --full", passed_tests=2000)
    assert "(2,000 tests)" in page(read_record(file))
    assert "again on" not in page(read_record(file))
    write_record(file, Counter({BEAMS: 2}), passed_tests=1)
    assert read_record(file)["proofs"] == Counter({BEAMS: 2, REFUSED: 1})
    assert re.search(r"`scripts/test --full` on .* \(2,000 tests\).* again on 20\d\d-", page(read_record(file)))
    write_record(file, Counter({BEAMS: 2}), run="scripts/capabilities", passed_tests=1)
    assert read_record(file)["proofs"] == Counter({BEAMS: 2})


@pytest.mark.parametrize("mark", ["", '"no mode"', '"beams"', '"beams", policy="snapkv"', '"beams", family="llama"'])
def test_a_marker_that_names_no_cell_is_refused(mark: str) -> None:
    from proofs import proofs_of

    marker = eval(f"pytest.mark.proves({mark})").mark
    item: Any = SimpleNamespace(nodeid="tests/a.py::test_beams", iter_markers=lambda _: [marker])
    with pytest.raises(pytest.UsageError, match=r"needs modes of tests/proofs\.py, a policy and a family"):
        proofs_of(item)
