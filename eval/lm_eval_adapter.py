"""The model `kvpolicy` of lm-evaluation-harness: its Hugging Face model, with a fresh policy cache for every request.

Generation passes the cache to `generate`; a batch is padded on the left and each of its rows is compressed as if alone.
Log-likelihoods, which the harness takes from one forward without a cache, go through the cache as well: the context is
a prompt, and the continuation is decoded behind it token by token.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from ..cache import PolicyCache
from ..compat import cache_argument
from ..config import PolicySpec, load_policy, policy_options
from ..errors import ConfigError, did_you_mean
from . import generation
from .extras import require
from .generation import AnswerScore

__all__ = ["KVPolicyLM", "run_command"]

HFLM: Any = require("lm_eval.models.huggingface", "The model kvpolicy of lm_eval", extra="lm-eval").HFLM
_registry: Any = require("lm_eval.api.registry", "The model kvpolicy of lm_eval", extra="lm-eval")
tqdm: Any = require("tqdm", "The model kvpolicy of lm_eval", extra="lm-eval")
_log = logging.getLogger(__name__)

# The key under which a database of answers names the policy they came from. Keys of answers are digests.
_STAMP = "hf_kvpolicy manifest"


class KVPolicyLM(HFLM):  # type: ignore[misc]
    """`hf` with the arguments `policy=`, `budget=` and every other option of the policy by its name."""

    def __init__(self, pretrained: Any, *, policy: str, budget: Any = None, **arguments: Any) -> None:
        """Args: those of lm_eval's `hf` model, and the policy's.

        Raises:
            ConfigError: no such policy or option, one that is missing, or a batch size that is to be found.
            UnsupportedModelError: the library has no patch for the model.
        """
        _check_arguments(policy, arguments)
        options = {name: arguments.pop(name) for name in _own_options(policy) if name in arguments}
        if budget is not None:
            options["budget"] = budget
        self._spec: PolicySpec = load_policy({"policy": policy, **options})
        super().__init__(pretrained, **arguments)
        if "tokenizer" in policy_options(policy):
            self._spec = load_policy({"policy": policy, **options, "tokenizer": self.tokenizer})
        # Built now, so that what the policy refuses about the model is refused before any request.
        cache = self._new_cache()
        self._composition, self._manifest_sha256 = cache.composition, str(cache.manifest.sha256)
        self._requests = self._acted = 0

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Take the database of `--use_cache`; its keys are prompts alone, so it may hold one policy's answers only.

        Raises:
            ConfigError: it holds answers of another policy, other options or another model, or nobody knows whose.
        """
        if cache_hook.dbdict is not None:
            _claim(cache_hook.dbdict, self._manifest_sha256)
        super().set_cache_hook(cache_hook)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
        """Continue every context; says where the policy dropped nothing at all."""
        answers = super().generate_until(requests, disable_tqdm=disable_tqdm)
        self._warn_if_idle()
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
        """Likelihood of whole texts: one token is the prompt, and all that follows is decoded behind it.

        Raises:
            ConfigError: the policy acts as a prompt ends, and here there is none to speak of.
        """
        policy = self._composition
        if policy.schedule != "never" and (not policy.bounds_every_step or policy.families is not None):
            raise ConfigError(
                f"A rolling log-likelihood has no prompt, and {policy.policy!r} selects as a prompt ends: the result "
                "would be the full cache's. Use a policy that decides every step (streaming_llm, sliding_window, h2o), "
                "or a task with contexts."
            )
        return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)

    def get_model_info(self) -> dict[str, Any]:
        """What lm_eval writes into its results about the model, and which policy it ran with."""
        options = {name: value for name, value in self._spec.options.items() if name != "tokenizer"}
        own = {"policy": self._spec.name, "options": options, "manifest_sha256": self._manifest_sha256}
        return {**super().get_model_info(), "kvpolicy": own}

    def _new_cache(self) -> PolicyCache:
        return self._spec.build(self.model)

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **keywords: Any) -> Any:
        cache = self._new_cache()
        tokens = super()._model_generate(context, max_length, stop, **{cache_argument(): cache}, **keywords)
        self._count(cache)
        return tokens

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Sum of log-probabilities of each continuation, and whether it is the greedy one.

        Contexts run one by one, whatever the batch size; one that several requests share runs once.
        """
        together: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, (_, context, continuation) in enumerate(requests):
            together[self._fitting(context, continuation)].append(index)
        answers: dict[int, tuple[float, bool]] = {}
        silent = disable_tqdm or self.rank != 0
        for context, members in tqdm.tqdm(together.items(), disable=silent, desc="Contexts"):
            scores = self._scores(context, [requests[index][2] for index in members])
            for index, score in zip(members, scores, strict=True):
                answers[index] = (-score.nll_per_token * score.tokens, score.top1_rate == 1.0)
                key = requests[index][0]
                if key is not None:  # a window of a text, which is kept as a whole
                    self.cache_hook.add_partial("loglikelihood", key, answers[index])
        self._warn_if_idle()
        return [answers[index] for index in range(len(requests))]

    def _scores(self, context: Sequence[int], continuations: Sequence[Sequence[int]]) -> list[AnswerScore]:
        lower, device, scores = self.mixed_precision_dtype, self.device.type, []
        with torch.autocast(device_type=device, dtype=lower, enabled=lower is not None):
            prefilled = generation.prefill(self.model, [context], self._new_cache())
            for continuation in continuations:
                fork = generation.fork(prefilled)
                scores.append(generation.score_answer(self.model, fork, continuation))
                self._count(fork.cache)
        return scores

    def _fitting(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[int, ...]:
        """The last tokens of a context that fit before its continuation, as `hf` cuts them.

        Raises:
            ConfigError: not one does.
        """
        # The last token of a continuation is predicted and never fed.
        room = self.max_length + 1 - len(continuation)
        if room < 1 or not context or not continuation:
            raise ConfigError(
                f"A log-likelihood needs a context and a continuation; this request has {len(context)} and "
                f"{len(continuation)} tokens, and the model takes {self.max_length}. Raise max_length, or leave the "
                "task out."
            )
        if len(context) > room:
            _log.warning("A context of %d tokens is cut from the left to %d.", len(context), room)
        return tuple(context[-room:])

    def _count(self, cache: PolicyCache) -> None:
        self._requests += 1
        self._acted += cache.statistics.rows_dropped > 0

    def _warn_if_idle(self) -> None:
        """A full cache's results under a policy's name are the worst a harness can give."""
        if self._requests and not self._acted and self._composition.schedule != "never":
            _log.warning(
                "%s dropped no row in any of %d requests: these results are the full cache's. Give a smaller budget, "
                "or a task with longer contexts.",
                self._spec.name,
                self._requests,
            )


def run_command(arguments: Sequence[str]) -> None:
    """Run lm_eval's own command line; the model `kvpolicy` is known to it by the import of this module."""
    main: Any = require("lm_eval.__main__", "kvpolicy lm-eval", extra="lm-eval")
    before, sys.argv = sys.argv, ["lm-eval", *arguments]
    try:
        main.cli_evaluate()
    finally:
        sys.argv = before


def _own_options(policy: str) -> list[str]:
    """Options of the policy that do not mean something else to `hf` (`tokenizer`)."""
    return [name for name in policy_options(policy) if name not in inspect.signature(HFLM.__init__).parameters]


def _check_arguments(policy: str, arguments: dict[str, Any]) -> None:
    """Refuse what `hf` would hand on to the model's constructor although it was meant for the policy."""
    own, theirs = _own_options(policy), inspect.signature(HFLM.__init__).parameters
    for name in arguments:
        hint = did_you_mean(name, own) if name not in own and name not in theirs else ""
        if hint:
            raise ConfigError(f"Neither the policy {policy!r} nor lm_eval's hf model has an option {name!r}.{hint}")
    if str(arguments.get("batch_size", 1)).startswith("auto"):
        raise ConfigError(
            "batch_size='auto' is found with forwards without a cache, which says nothing about a policy's. Give a "
            "number; it counts for generation only."
        )


def _claim(database: Any, manifest_sha256: str) -> None:
    """Write whose answers a new database holds, or check it."""
    found = database.get(_STAMP)
    if found is None and not len(database):
        database[_STAMP] = manifest_sha256
        database.commit()
    elif found != manifest_sha256:
        whose = "of an unknown policy" if found is None else f"of another policy or model (manifest {found[:12]})"
        raise ConfigError(
            f"The database {database.filename} holds answers {whose}; they would be taken for those of manifest "
            f"{manifest_sha256[:12]}. Give another file with --use_cache."
        )


# A release of lm_eval that reads entry points knows the name already.
if "kvpolicy" not in _registry.MODEL_REGISTRY:
    _registry.register_model("kvpolicy")(KVPolicyLM)
