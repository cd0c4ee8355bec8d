"""One example under one planned cell: what is run, and the row that tells of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..cache import PolicyCache
from ..contract.canonical import sha256_of
from ..errors import IntegrityError, KVPolicyError
from . import acting, matching, outcomes
from .cells import Cell
from .dense_prompts import DensePrompts
from .policy_coordinates import policy_coordinates
from .prompting import EncodedPrompt
from .records import Row
from .sweep import NO_CONTEXT
from .tasks.base import Example, Task, without_context
from .trial import Trial, run_trial

if TYPE_CHECKING:
    from .runner import SweepWorker

__all__ = ["PlannedCell", "equals_full", "row_key_of", "run_example"]

_TAKES_NOTHING = "the budget takes nothing from any prompt"


@dataclasses.dataclass(slots=True, kw_only=True)
class PlannedCell:
    """One cell and how it goes. What the library refuses it refuses for every example of the cell."""

    cell: Cell
    key: str
    # Of the cell whose rows it gets; its own where it gets none.
    source_key: str
    # Of all examples of the task point, its own seed's first, so that all parts of a run agree, and all seeds.
    prompt_tokens: Callable[[], Iterator[int]]
    refused: bool = False
    # Unknown until a cache is built for it.
    equals_full: bool | None = None


def run_example(
    worker: SweepWorker,
    entry: PlannedCell,
    task: Task,
    number: int,
    example: Example,
    row_key: str,
    dense: DensePrompts,
    encode: Callable[[bool], EncodedPrompt],
) -> Row:
    """Run an example under a cell, unless there is nothing to run; what the library refuses is a row with a reason."""
    cell, source = entry.cell, worker.done.get(row_key_of(entry.source_key, example))
    with_context = encode(cell.query_aware)
    asked = without_context(example) if cell.policy == NO_CONTEXT else example
    encoded = with_context if asked is example else worker.encoded(asked, query_aware=cell.query_aware)
    blank = Row(
        row_key=row_key,
        cell_key=entry.key,
        cell=cell.coordinates(),
        example={**_example_record(example, encoded), "index": number, "metric": task.metric},
        status=outcomes.OK,
        environment=worker.environment,
    )
    if entry.equals_full is None:
        entry.equals_full = matching.source_equals_full(source) if cell.matched_to else equals_full(worker, entry)
    if entry.equals_full:
        # Neither a result of the policy nor a failure of it.
        equal = str(outcomes.Outcome.EQUALS_FULL)
        return dataclasses.replace(blank, status=outcomes.EQUALS_FULL, outcome=equal, reason=_TAKES_NOTHING)
    try:
        budgeted = matching.with_budget(cell, source)
        cache = worker.build(budgeted)
        declared = matching.declared_of(cell, policy_coordinates(cache)) if isinstance(cache, PolicyCache) else {}
        trial = run_trial(
            worker.loaded, budgeted, asked, encoded, cache, metric=task.metric, dense=dense, beside=with_context
        )
        _check_numbers(trial)
    except Exception as error:  # a failing cell is a result, and the sweep goes on
        return dataclasses.replace(
            blank,
            status=outcomes.status_of_error(error),
            outcome=str(outcomes.outcome_of_error(error)),
            # The status names the error already.
            reason=str(error)[:500] or type(error).__name__,
        )
    if trial.did_not_act is not None:
        return dataclasses.replace(
            blank,
            status=outcomes.DID_NOT_ACT,
            outcome=str(outcomes.Outcome.UNMEASURED),
            reason=trial.did_not_act,
            cache=trial.cache,
            policy=declared,
        )
    return dataclasses.replace(blank, quality=trial.quality, cache=trial.cache, timing=trial.timing, policy=declared)


def _check_numbers(trial: Trial) -> None:
    """Refuse a result that no mean could hold; the canary has shown that the full cache gives numbers."""
    if not math.isfinite(trial.quality.answer_nll):
        raise IntegrityError(
            f"The logits under this cache are no finite numbers: the answer's NLL is {trial.quality.answer_nll}."
        )


def row_key_of(cell_key: str, example: Example) -> str:
    return sha256_of([cell_key, example.example_id])[:16]


def equals_full(worker: SweepWorker, entry: PlannedCell) -> bool:
    """Whether the cell's budget takes nothing from any prompt; a cell that is refused is left to fail by itself."""
    if entry.cell.budget is None:
        return False
    try:
        cache = worker.build(entry.cell)
    except Exception:  # the cell's first example fails in the same way, and says so
        return False
    try:
        return acting.equals_full(entry.cell, cache, worker.loaded.model, entry.prompt_tokens())
    except KVPolicyError:
        return False


def _example_record(example: Example, encoded: EncodedPrompt) -> dict[str, Any]:
    return {
        **example.coordinates,
        "id": example.example_id,
        "answers": list(example.answers),
        "prompt_tokens": len(encoded.token_ids),
        "prompt_sha256": encoded.sha256,
        "template_preamble": encoded.template_preamble,
        "added_bos_tokens": encoded.added_bos_tokens,
        "segments": len(encoded.segment_ends),
        "truncated": example.dropped_tokens > 0,
        "dropped_tokens": example.dropped_tokens,
    }
