"""The model `kvpolicy` of lm-evaluation-harness, on a tiny model and a made task."""

from __future__ import annotations

import importlib
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from eval_fakes import tiny_loaded
from typer.testing import CliRunner

import hf_kvpolicy as kv
from hf_kvpolicy.cli import app
from hf_kvpolicy.compat import cache_argument
from hf_kvpolicy.errors import ConfigError

_REASON = "lm_eval is not installed: pip install '.[lm-eval]'"
CachingLM = pytest.importorskip("lm_eval.api.model", reason=_REASON).CachingLM
HFLM = pytest.importorskip("lm_eval.models.huggingface", reason=_REASON).HFLM
KVPolicyLM = importlib.import_module("hf_kvpolicy.eval.lm_eval_adapter").KVPolicyLM

CONTEXTS = ("The first text is about a lighthouse that " * 2, "A shorter one about boats and ", "x")
BUDGET = 24


def asked(*arguments: Any) -> list[Any]:
    return [SimpleNamespace(args=each, task_name="made") for each in arguments]


PAIRS = asked(*((context, continuation) for context in CONTEXTS for continuation in ("stands.", "sinks in the sea")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, loaded = tmp_path_factory.mktemp("model"), tiny_loaded(chat=False)
    loaded.model.save_pretrained(path)
    loaded.tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def make(folder: Path) -> Callable[..., Any]:
    """A model under a policy; `hf` is lm_eval's own."""

    def build(policy: str, **arguments: Any) -> Any:
        common = {"device": "cpu", "max_length": 256, **arguments}
        return HFLM(str(folder), **common) if policy == "hf" else KVPolicyLM(str(folder), policy=policy, **common)

    return build


def generated(model: Any, contexts: tuple[str, ...] = CONTEXTS) -> list[str]:
    answers: list[str] = model.generate_until(asked(*((c, {"until": ["\n\n"], "max_gen_toks": 6}) for c in contexts)))
    return answers


def decoded_likelihood(model: Any, context: str, continuation: str, cache: Any) -> float:
    """One token a forward behind the context, with transformers' calls alone."""
    tokens = model.tok_encode(continuation)
    fed, total = torch.tensor([model.tok_encode(context)]), 0.0
    for token in tokens:
        with torch.no_grad():
            logits = model.model(fed, **{cache_argument(): cache}, use_cache=True).logits[0, -1]
        total += float(logits.log_softmax(-1)[token])
        fed = torch.tensor([[token]])
    return total


def test_the_full_cache_answers_as_hf_does(make: Callable[..., Any]) -> None:
    ours, theirs = make("full"), make("hf")
    for mine, plain in zip(ours.loglikelihood(PAIRS), theirs.loglikelihood(PAIRS), strict=True):
        assert mine[0] == pytest.approx(plain[0], abs=1e-3)
        assert mine[1] == plain[1]
    assert generated(ours) == generated(theirs)
    texts = asked(("A whole text, longer than what the model takes at once. " * 8,))
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), rel=1e-4)


def test_likelihoods_come_from_the_compressed_cache(make: Callable[..., Any]) -> None:
    model = make("snapkv", budget=BUDGET, window=8)
    found = model.loglikelihood(PAIRS)
    for request, (likelihood, _) in zip(PAIRS, found, strict=True):
        # A space at the end of a context belongs to the continuation.
        context, continuation = request.args[0].rstrip(), " " * request.args[0].endswith(" ") + request.args[1]
        cache = kv.SnapKVCache(model.model, budget=BUDGET, window=8)
        assert likelihood == pytest.approx(decoded_likelihood(model, context, continuation, cache), abs=1e-4)
    full = make("full").loglikelihood(PAIRS)
    assert abs(found[0][0] - full[0][0]) > 1e-3, "rows were dropped from the long context"
    assert found[5][0] == pytest.approx(full[5][0], abs=1e-4), "and none from the short one"
    assert model.loglikelihood(PAIRS[::-1]) == found[::-1], "no request sees another's cache"


@pytest.mark.parametrize(("policy", "options"), [("snapkv", {"window": 8}), ("streaming_llm", {"sinks": 2})])
def test_a_batch_answers_as_its_requests_alone(make: Callable[..., Any], policy: str, options: dict[str, int]) -> None:
    alone, batch = (make(policy, budget=BUDGET, batch_size=size, **options) for size in (1, 3))
    assert generated(alone) == generated(batch) == [generated(alone, (context,))[0] for context in CONTEXTS]


def test_a_rolling_likelihood_is_decoded_or_refused(make: Callable[..., Any]) -> None:
    text = "A text of some length, all of which is scored by what the window still holds."
    model = make("sliding_window", budget=BUDGET)
    (found,) = model.loglikelihood_rolling(asked((text,)))
    cache = kv.SlidingWindowCache(model.model, budget=BUDGET)
    assert found == pytest.approx(decoded_likelihood(model, "<s>", text, cache), abs=1e-3)
    assert abs(found - make("full").loglikelihood_rolling(asked((text,)))[0]) > 1e-3
    with pytest.raises(ConfigError, match="'snapkv' selects as a prompt ends"):
        make("snapkv", budget=BUDGET, window=8).loglikelihood_rolling(asked((text,)))


def test_long_contexts_are_cut_as_hf_cuts_them(make: Callable[..., Any]) -> None:
    requests = asked((CONTEXTS[0], " and so on"))
    ours, theirs = make("full", max_length=40), make("hf", max_length=40)
    assert ours.loglikelihood(requests)[0][0] == pytest.approx(theirs.loglikelihood(requests)[0][0], abs=1e-3)
    with pytest.raises(ConfigError, match="the model takes 40"):
        ours.loglikelihood(asked(("x", CONTEXTS[0])))


def test_a_policy_that_drops_nothing_is_warned_about(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    make("snapkv", budget=200).loglikelihood(PAIRS)
    assert "dropped no row in any of 6 requests" in caplog.text
    caplog.clear()
    make("snapkv", budget=BUDGET, window=8).loglikelihood(PAIRS)
    make("full").loglikelihood(PAIRS)
    assert "dropped no row" not in caplog.text


def test_a_database_holds_the_answers_of_one_policy(make: Callable[..., Any], tmp_path: Path) -> None:
    path = str(tmp_path / "answers.db")
    first = CachingLM(make("snapkv", budget=BUDGET, window=8), path).loglikelihood(PAIRS)
    same = make("snapkv", budget=BUDGET, window=8)
    same._loglikelihood_tokens = lambda *a, **k: pytest.fail("it was answered before")
    assert CachingLM(same, path).loglikelihood(PAIRS) == first
    for other in (make("snapkv", budget=BUDGET, window=4), make("full")):
        with pytest.raises(ConfigError, match="answers of another policy or model"):
            CachingLM(other, path)
    CachingLM(make("hf"), str(tmp_path / "plain.db")).loglikelihood(PAIRS)
    with pytest.raises(ConfigError, match="answers of an unknown policy"):
        CachingLM(make("full"), str(tmp_path / "plain.db"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "snapk"}, "Did you mean 'snapkv'"),
        ({"policy": "snapkv"}, "needs budget"),
        ({"policy": "snapkv", "budget": 8, "windw": 4}, "Did you mean 'window'"),
        ({"policy": "snapkv", "budget": 8, "batch_size": "auto:4"}, "Give a number"),
        ({"policy": "full", "budget": 8}, "has no option 'budget'"),
    ],
)
def test_mistakes_are_refused_before_a_model_is_loaded(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVPolicyLM("no-such-folder", **arguments)


def test_the_name_is_known_with_and_without_entry_points() -> None:
    registry = importlib.import_module("lm_eval.api.registry")
    assert registry.get_model("kvpolicy") is KVPolicyLM
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["entry-points"]["lm_eval.models"]["kvpolicy"].partition(":")
    assert getattr(importlib.import_module(module), name) is KVPolicyLM


def test_the_command_runs_a_task_of_files(folder: Path, tmp_path: Path) -> None:
    docs = [{"text": CONTEXTS[0], "choices": [" stands.", " sinks."], "label": i % 2} for i in range(2)]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    task = {
        "task": "made_choice",
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(tmp_path / "docs.jsonl")},
            "cache_dir": str(tmp_path / "datasets"),
        },
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "made_choice.yaml").write_text(yaml.safe_dump(task))
    arguments = [
        *("--model", "kvpolicy", "--model_args", f"pretrained={folder},policy=snapkv,budget={BUDGET},window=8"),
        *("--tasks", "made_choice", "--include_path", str(tmp_path / "tasks"), "--device", "cpu"),
        *("--output_path", str(tmp_path / "results.json"), "--use_cache", str(tmp_path / "answers")),
    ]
    result = CliRunner().invoke(app, ["lm-eval", *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    (written,) = tmp_path.glob("**/results*.json")
    found = json.loads(written.read_text())
    assert found["results"]["made_choice"]["acc,none"] == 0.5
    assert found["config"]["kvpolicy"]["options"] == {"budget": BUDGET, "window": 8}
    assert len(found["config"]["kvpolicy"]["manifest_sha256"]) == 64
