"""Random lives of caches: append, crop, reorder, select, repeat, fork, branch, save and load, offload, record, fail.

After every operation the cache must agree with itself, with its byte ledger and with a plain model of its life:
lengths, row counts, budget, positions. The operations are those of tests/operations/, in longer lives. A life is known
by its seed: a failure prints it with the operations that led there, and `--seed` repeats it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "operations")]

from helpers import FAMILIES, case_id, policies  # noqa: E402
from life import CASES, OPERATIONS, Life  # noqa: E402

# A longer cache is emptied: the check reads every position, and the tiny models end at 512.
MAX_COLUMNS = 160
Operation = tuple[str, int, int]


def draw(generator: random.Random) -> Operation:
    """Return (operation, its number, which of the forks)."""
    name = generator.choices(list(OPERATIONS), [weight for weight, _, _ in OPERATIONS.values()])[0]
    _, low, high = OPERATIONS[name]
    return name, generator.randint(low, high), generator.randint(0, 5)


def live(case: tuple[str, dict[str, Any]], seed: int, operations: int, done: list[Operation]) -> None:
    """Lead one life; `done` holds what was done so far, the failing operation last."""
    generator = random.Random(seed)
    life = Life(case, generator.choice(FAMILIES))
    done.append(("feed", 7, 0))
    life.apply(*done[-1])
    while len(done) < operations:
        long = [lane for lane, (_, oracle) in enumerate(life.lanes) if oracle.fed > MAX_COLUMNS]
        done.append(("reset", 2, long[0]) if long else draw(generator))
        life.apply(*done[-1])


def soak(policy: str, operations: int, length: int, seed: int) -> int | None:
    """Lead lives of one policy, all its variants in turn; return the operations done, None after a failure."""
    cases = [case for case in CASES if case[0] == policy]
    total, number = 0, seed
    while total < operations:
        case, done = cases[number % len(cases)], list[Operation]()
        try:
            live(case, number, min(length, operations - total), done)
        except Exception:
            traceback.print_exc()
            print(
                f"FAILED {policy} {case_id(case)} {case[1]}, seed {number}, operation {len(done)}:\n{done}", flush=True
            )
            return None
        total, number = total + len(done), number + 1
    return total


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--policies", nargs="+", choices=policies(), default=policies())
    parser.add_argument("--operations", type=int, default=10_000, help="operations of each policy")
    parser.add_argument("--length", type=int, default=500, help="operations of one life")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first life; each life takes the next")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*two prompt segments follow.*")
    failed = []
    for policy in arguments.policies:
        begin = time.perf_counter()
        total = soak(policy, arguments.operations, arguments.length, arguments.seed)
        if total is None:
            failed.append(policy)
        else:
            seconds = time.perf_counter() - begin
            print(f"{policy}: {total} operations from seed {arguments.seed}, {seconds:.0f} s, sound", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
