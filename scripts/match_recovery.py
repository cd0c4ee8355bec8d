"""The recovery at which fastgen stores, in the mean over heads and prompts, as many rows as a budget would.

FastGen has no budget of its own, so comparing it at equal rows needs its threshold. What every family would keep and
recover of a prompt does not depend on the threshold: one prefill a prompt measures it, a bisection over thresholds
reads it, and the policy itself then runs at what was found. The prompts are the sweep's task with another seed, so that
a threshold is not fitted to the prompts it is judged on.
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from script_lib.loading import use_threads

from hf_kvpolicy.allocation import Candidate, FamilyRule, HeadMass, smallest_enough
from hf_kvpolicy.cache import PolicyCache
from hf_kvpolicy.errors import KVPolicyError
from hf_kvpolicy.eval.cells import Cell, task_points
from hf_kvpolicy.eval.engine import CacheUse, EngineBuilder, measure
from hf_kvpolicy.eval.generation import prefill
from hf_kvpolicy.eval.model_loading import LoadedModel, load_model
from hf_kvpolicy.eval.prompting import EncodedPrompt, PromptEncoder
from hf_kvpolicy.eval.sweep import SweepConfig, load_sweep
from hf_kvpolicy.eval.tasks.registry import make_task

# Thresholds are told apart to four digits.
STEPS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class NotingRule(FamilyRule):
    """Chooses as its parent does and notes what it chose from, an entry an owner and prompt."""

    noted: list[list[Candidate]] = field(default_factory=list)

    def choose(self, head: HeadMass, tokens: int, most_rows: int) -> int:
        self.noted.append(self.candidates(head, tokens))
        return FamilyRule.choose(self, head, tokens, most_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What was found for one target; rows and bytes are those of caches that ran at the recovery."""

    target_rows: float
    recovery: float
    rows: float
    measured_bytes: float
    payload_bytes: float


def rows_at(noted: Sequence[Sequence[Candidate]], recovery: float) -> float:
    """Mean rows of the smallest family that recovers enough; they never shrink as the threshold grows."""
    chosen = (smallest_enough(candidates, recovery) for candidates in noted)
    # The full cache recovers 1: some family is always enough.
    return fmean(best.rows for best in chosen if best is not None)


def matching_recovery(noted: Sequence[Sequence[Candidate]], target_rows: float) -> float:
    """The threshold, a multiple of 1 / STEPS below 1, whose mean rows come closest; the lower one of two."""
    above = bisect_left(range(STEPS), target_rows, key=lambda step: rows_at(noted, step / STEPS))
    near = [step / STEPS for step in (above - 1, above) if 0 <= step < STEPS]
    return min(near, key=lambda recovery: abs(rows_at(noted, recovery) - target_rows))


def prompts_of(config: SweepConfig, loaded: LoadedModel, seed: int, examples: int) -> list[EncodedPrompt]:
    """Prompts of the sweep's first task that the sweep itself does not have."""
    point = next(task_points(config))
    request = replace(point.request, seed=seed, num_examples=examples)
    encoder = PromptEncoder(loaded.tokenizer)
    task = make_task(point.task.name, point.task.params)
    return [encoder.encode(example) for example in task.examples(request, encoder)]


def cache_at(config: SweepConfig, loaded: LoadedModel, recovery: float) -> Any:
    """An empty cache as the evaluation builds it."""
    point = next(task_points(config))
    cell = Cell(
        task=point.task.name,
        length_tokens=point.request.length_tokens,
        policy="fastgen",
        budget=None,
        options={"recovery": recovery},
    )
    return EngineBuilder(loaded.model, loaded.tokenizer)(cell)


def noted_candidates(
    config: SweepConfig, loaded: LoadedModel, prompts: Iterable[EncodedPrompt]
) -> list[list[Candidate]]:
    """What every family would keep and recover, for each head of each prompt."""
    composition = cache_at(config, loaded, 1.0).composition
    ratios = {"heavy_ratio": composition.families.heavy_ratio, "local_ratio": composition.families.local_ratio}
    rule = NotingRule(recovery=1.0, **ratios)
    for prompt in prompts:
        prefill(loaded.model, prompt.segments, PolicyCache(loaded.model, replace(composition, families=rule)))
    return rule.noted


def used_at(
    config: SweepConfig, loaded: LoadedModel, prompts: Iterable[EncodedPrompt], recovery: float
) -> list[CacheUse]:
    """Rows and bytes after each prompt."""
    uses = []
    for prompt in prompts:
        cache = cache_at(config, loaded, recovery)
        prefill(loaded.model, prompt.segments, cache)
        uses.append(measure(cache))
    return uses


def matches(config: SweepConfig, loaded: LoadedModel, prompts: list[EncodedPrompt], rows: list[int]) -> list[Match]:
    noted = noted_candidates(config, loaded, prompts)
    found = []
    for target in rows:
        recovery = matching_recovery(noted, target)
        uses = used_at(config, loaded, prompts, recovery)
        found.append(
            Match(
                target_rows=target,
                recovery=recovery,
                rows=fmean(use.rows_mean for use in uses),
                measured_bytes=fmean(use.measured_bytes for use in uses),
                payload_bytes=fmean(use.payload_bytes for use in uses),
            )
        )
    return found


def table(found: Iterable[Match]) -> list[str]:
    """The matches in Markdown."""
    lines = ["| rows asked | recovery | rows a head | K/V MiB | MiB |", "|---|---|---|---|---|"]
    for match in found:
        payload, measured = (f"{size / 2**20:.2f}" for size in (match.payload_bytes, match.measured_bytes))
        lines.append(f"| {match.target_rows} | {match.recovery:.4f} | {match.rows:.1f} | {payload} | {measured} |")
    return lines


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/match_recovery", description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", default="needle_allocation", help="a sweep file or the name of a shipped one")
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 256, 512], help="mean rows a head to match")
    parser.add_argument("--examples", type=int, default=5, help="prompts, a multiple of the task's depths")
    parser.add_argument("--seed", type=int, default=1000, help="seed of the prompts; none of the sweep's")
    parser.add_argument("--threads", type=int, help="torch threads (default: one a core)")
    arguments = parser.parse_args()
    if min(arguments.rows) < 1:
        parser.error("--rows are whole numbers from 1.")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    use_threads(arguments.threads)
    try:
        config = load_sweep(Path(arguments.sweep))
        if arguments.seed in config.seeds:
            print(f"error: seed {arguments.seed} is one of the sweep's own; give another --seed.", file=sys.stderr)
            return 2
        loaded = load_model(config.model.name, config.model.dtype, config.model.device)
        prompts = prompts_of(config, loaded, arguments.seed, arguments.examples)
    except KVPolicyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(table(matches(config, loaded, prompts, arguments.rows))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
