"""docs/capabilities.md from the record of what tests proved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath
from typing import Any

from proofs import ANY, MODELS, MODES, Mode, Proof, family_name

import hf_kvpolicy as kv

UNPROVEN = "-"
INTRO = """# What is proved

<!-- Written by scripts/test --full or scripts/capabilities; do not edit. -->

Every number on this page counts what tests with `@pytest.mark.proves` have shown on tiny models with random weights.
They passed in `{run}` on {date} ({tests:,} tests), with torch {torch} and transformers {transformers}{renewed}.
{unproven} means that no such test says anything: the combination may well work, but nothing here vouches for it, or the
mode has no meaning for the policy, as `full` evicts nothing. The tests of a cell are named [below](#tests).

What is refused, and by which test, is listed [at the end](#refused). Kinds of models that no policy serves
(encoder-decoder, MLA, layers that share keys and values, ...) have no rows: tests/families/test_refusals.py and
tests/refusals/test_wrong_models.py show that they are refused. `scripts/test --full` renews this page.
"""


def page(record: dict[str, Any]) -> str:
    """Return the page; every registered policy and every supported model type has its row."""
    proofs = list(record["proofs"])
    facts = {name: value for name, value in record.items() if name not in ("proofs", "renewed")}
    renewed = f"; some of them again on {record['renewed']}, after a change" if "renewed" in record else ""
    parts = [INTRO.format(unproven=f"`{UNPROVEN}`", renewed=renewed, **facts)]
    parts += _by_policy(proofs) + _by_family(proofs) + _pairs(proofs) + _tests(proofs) + _refused(proofs)
    return "\n".join(parts)


def families() -> list[str]:
    """Return the rows of families: those of the tests' models, and supported model types that no test has."""
    tested = {model_type for model_type, _ in MODELS.values()}
    return sorted({family_name(model) for model in MODELS} | set(kv.supported_model_types()) - tested)


def _groups() -> dict[str, dict[str, Mode]]:
    found: dict[str, dict[str, Mode]] = defaultdict(dict)
    for name, mode in MODES.items():
        found[mode.group][name] = mode
    return found


def _count(proofs: Iterable[Proof], what: Callable[[Proof], str]) -> str:
    """Return how many are proved, and how many are refused and not proved otherwise."""
    proofs = list(proofs)
    proved = {what(proof) for proof in proofs if proof.verdict == "proved"}
    refused = {what(proof) for proof in proofs if proof.verdict == "refused"} - proved
    words = [str(len(proved))] if proved else []
    return ", ".join([*words, *([f"{len(refused)} refused"] if refused else [])]) or UNPROVEN


def _table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def _by_policy(proofs: list[Proof]) -> list[str]:
    parts = ["## Policies by mode", "", f"In how many of the {len(families())} families below.", ""]
    for group, modes in _groups().items():
        rows = [
            [
                f"`{policy}`",
                *(_count((p for p in proofs if (p.policy, p.mode) == (policy, mode)), _family) for mode in modes),
            ]
            for policy in kv.available_policies()
        ]
        parts += [f"### {group}", "", *_table(["policy", *(mode.head for mode in modes.values())], rows)]
    return parts


def _by_family(proofs: list[Proof]) -> list[str]:
    parts = ["## Families by mode", "", f"For how many of the {len(kv.available_policies())} policies.", ""]
    for group, modes in _groups().items():
        rows = [
            [family, *(_count((p for p in proofs if (p.family, p.mode) == (family, mode)), _policy) for mode in modes)]
            for family in families()
        ]
        parts += [f"### {group}, by family", "", *_table(["family", *(mode.head for mode in modes.values())], rows)]
    return parts


def _pairs(proofs: list[Proof]) -> list[str]:
    of_pair: dict[tuple[str, str], list[Proof]] = defaultdict(list)
    for proof in proofs:
        of_pair[proof.family, proof.policy].append(proof)

    def cell(family: str, policy: str) -> str:
        found = of_pair[family, policy]
        return "refused" if any(proof.mode == ANY for proof in found) else _count(found, _mode)

    policies = kv.available_policies()
    rows = [[family, *(cell(family, policy) for policy in policies)] for family in families()]
    head = ["family", *(f"`{policy}`" for policy in policies)]
    return ["## Families by policy", "", f"In how many of the {len(MODES)} modes.", "", *_table(head, rows)]


def _tests(proofs: list[Proof]) -> list[str]:
    intro = (
        "A cell's tests are the rows of its mode that name its policy and its family. `pytest FILE -k TEST` runs them."
    )
    parts = ["## Tests", "", intro, ""]
    for name, mode in MODES.items():
        parts += [f"### {mode.group}: {mode.head}", "", f"{mode.says[0].upper()}{mode.says[1:]}.", ""]
        rows = []
        shown = [proof for proof in proofs if proof.mode == name and proof.verdict == "proved"]
        for test in sorted({proof.test for proof in shown}):
            of_family: dict[str, set[str]] = defaultdict(set)
            for proof in shown:
                if proof.test == test:
                    of_family[proof.family].add(proof.policy)
            # Families for which a test proves the same policies share a line.
            together: dict[frozenset[str], list[str]] = defaultdict(list)
            for family in sorted(of_family):
                together[frozenset(of_family[family])].append(family)
            rows += [[_link(test), ", ".join(names), _policies(which)] for which, names in together.items()]
        parts += _table(["test", "families", "policies"], rows)
    return parts


def _refused(proofs: list[Proof]) -> list[str]:
    rows = sorted(
        [f"`{p.policy}`", p.family, "every mode" if p.mode == ANY else MODES[p.mode].head, _link(p.test)]
        for p in proofs
        if p.verdict == "refused"
    )
    return ["## Refused", "", *_table(["policy", "family", "mode", "test"], rows)]


def _link(test: str) -> str:
    file, _, name = test.partition("::")
    return f"[{PurePosixPath(file).stem}: `{name}`](../{file})"


def _policies(which: frozenset[str]) -> str:
    every = kv.available_policies()
    missing = [policy for policy in every if policy not in which]
    if len(missing) > len(every) // 3:
        return ", ".join(f"`{policy}`" for policy in every if policy in which)
    return "every policy" + (f" but {', '.join(f'`{policy}`' for policy in missing)}" if missing else "")


def _family(proof: Proof) -> str:
    return proof.family


def _policy(proof: Proof) -> str:
    return proof.policy


def _mode(proof: Proof) -> str:
    return proof.mode
