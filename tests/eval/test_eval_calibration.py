"""Calibration: what heads earn against plain loops, where needles lie, and whole runs on a tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_fakes import tiny_loaded, tiny_tokenizer
from torch import Tensor
from typer.testing import CliRunner

import hf_kvpolicy as kv
from hf_kvpolicy.allocation import minimum_rows_for_mass
from hf_kvpolicy.cli import app
from hf_kvpolicy.compat import cache_argument
from hf_kvpolicy.eval.calibration import Plan, calibrate_headkv, calibrate_zigzagkv, headkv
from hf_kvpolicy.eval.calibration.attention import Reader
from hf_kvpolicy.eval.calibration.probes import needle_positions, reasoning_scores, retrieval_scores
from hf_kvpolicy.eval.model_loading import LoadedModel
from hf_kvpolicy.eval.prompting import PromptEncoder
from hf_kvpolicy.eval.tasks.base import ExampleRequest
from hf_kvpolicy.eval.tasks.haystack import load_haystack, noise
from hf_kvpolicy.eval.tasks.needle import NeedleTask

# A byte a token: a question and four needles alone are 600.
PLAN = Plan(lengths=(700,), examples=2, depths=(0.2, 0.8), distractors=1, max_new_tokens=3)
ATTENTION = torch.tensor([[[0.1, 0.5, 0.2, 0.1, 0.1]], [[0.05, 0.3, 0.05, 0.4, 0.2]]])  # two layers, one head


def plain_retrieval(attention_N: Sequence[float], needle: Sequence[int], ids: Sequence[int], generated: int) -> float:
    top = max(range(len(attention_N)), key=lambda i: attention_N[i])
    return 1 / len(needle) if top in needle and ids[top] == generated else 0.0


def plain_reasoning(attention_N: Sequence[float], needle: Sequence[int]) -> float:
    ranked = sorted(range(len(attention_N)), key=lambda i: -attention_N[i])[: len(needle)]
    return sum(attention_N[i] for i in ranked if i in needle) / len(needle)


def test_a_copied_token_earns_one_over_the_needles_length() -> None:
    ids = [7, 8, 9, 8, 7]
    assert retrieval_scores(ATTENTION, [1, 2], ids, 8).tolist() == [[0.5], [0.0]]
    assert retrieval_scores(ATTENTION, [1, 2, 3, 4], ids, 8).tolist() == [[0.25], [0.25]]
    assert retrieval_scores(ATTENTION, [1, 2], ids, 9).tolist() == [[0.0], [0.0]]


def test_attention_inside_the_needle_earns_itself() -> None:
    # Of the two most attended tokens of each layer, {1, 2} and {3, 1}, those inside the needle count.
    assert reasoning_scores(ATTENTION, [1, 2])[:, 0].tolist() == pytest.approx([0.35, 0.15])
    assert reasoning_scores(ATTENTION, [0, 4])[:, 0].tolist() == [0.0, 0.0]


def test_scores_equal_plain_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    for length, needle in ((9, [2, 3, 4]), (30, list(range(11, 24))), (5, [0, 1, 2, 3, 4])):
        attention = torch.rand((3, 4, length), generator=generator).softmax(-1)
        ids = torch.randint(0, 3, (length,), generator=generator).tolist()
        for generated in range(3):
            found = retrieval_scores(attention, needle, ids, generated)
            expected = [
                [plain_retrieval(head, needle, ids, generated) for head in layer] for layer in attention.tolist()
            ]
            assert found.tolist() == expected
        found = reasoning_scores(attention, needle)
        expected = [[plain_reasoning(head, needle) for head in layer] for layer in attention.double().tolist()]
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("chat", [True, False])
def test_needle_positions_are_the_needles_tokens(chat: bool) -> None:
    tokenizer = tiny_tokenizer(chat=chat)
    encoder = PromptEncoder(tokenizer)
    request = ExampleRequest(length_tokens=900, depths=(0.0, 0.5, 1.0), num_examples=3, max_new_tokens=4, seed=1)
    for example in NeedleTask(name="needle", haystack=noise(), num_distractors=2).examples(request, encoder):
        prompt = encoder.encode(example)
        found = needle_positions(encoder, example, prompt)
        assert found == list(range(found[0], found[-1] + 1))
        text = tokenizer.decode([prompt.token_ids[i] for i in found])
        assert text == f"{example.answer_prefix} {example.answers[0]}."


def test_a_tokenizer_without_spans_is_refused() -> None:
    class Slow:
        chat_template, bos_token_id, is_fast = None, None, False

    with pytest.raises(kv.ConfigError, match="fast tokenizer"):
        PromptEncoder(Slow()).character_spans("a")


@pytest.mark.parametrize("attached", [False, True])
def test_the_attention_read_is_the_models_own(attached: bool) -> None:
    """One forward over everything with eager attention, and the reader's steps, give the same probabilities."""
    model = tiny_loaded().model
    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        whole = model(torch.tensor([ids]), output_attentions=True, use_cache=False)
    model.set_attn_implementation("sdpa")
    if attached:
        kv.attach(model)
    before = model.config._attn_implementation
    reader = Reader(model, ids[:30])
    parts = [reader.feed(ids[30:31]), reader.feed(ids[31:32]), reader.feed(ids[32:])]
    for (logits, attention), begin, end in zip(parts, (30, 31, 32), (31, 32, 40), strict=True):
        expected = torch.stack([layer[0] for layer in whole.attentions])[:, :, begin:end, :end]
        torch.testing.assert_close(attention, expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(logits, whole.logits[0, end - 1], atol=1e-5, rtol=1e-4)
    assert model.config._attn_implementation == before


def _plain_run(loaded: LoadedModel, probe: str) -> list[list[float]]:
    """Mean over the plan's tests of what every head earns, from full eager forwards and plain loops."""
    model, encoder = loaded.model, PromptEncoder(loaded.tokenizer)
    model.set_attn_implementation("eager")
    request = ExampleRequest(length_tokens=700, depths=PLAN.depths, num_examples=2, max_new_tokens=3, seed=0)
    total = torch.zeros(2, 4, dtype=torch.float64)
    for example in NeedleTask(name="calibration", haystack=noise(), num_distractors=1).examples(request, encoder):
        prompt = encoder.encode(example)
        ids, needle = list(prompt.token_ids), needle_positions(encoder, example, prompt)
        for _ in range(3):
            with torch.no_grad():
                out = model(torch.tensor([ids]), output_attentions=True, use_cache=False)
            generated = int(out.logits[0, -1].argmax())
            if generated == loaded.tokenizer.eos_token_id:
                break
            for layer in range(2):
                for head in range(4):
                    row = out.attentions[layer][0, head, -1].tolist()
                    earned = plain_retrieval(row, needle, ids, generated)
                    total[layer, head] += earned if probe == "retrieval" else plain_reasoning(row, needle)
            ids.append(generated)
    model.set_attn_implementation("sdpa")
    return (total / 2).tolist()


@pytest.mark.parametrize("probe", ["reasoning", "retrieval"])
def test_a_whole_run_equals_plain_loops(probe: str) -> None:
    loaded = tiny_loaded()
    plan = Plan(**{**_values(PLAN), "probe": probe})
    profile = calibrate_headkv(loaded, noise(), plan, is_right=lambda answer, example: True)
    expected = torch.tensor(_plain_run(loaded, probe))
    torch.testing.assert_close(torch.tensor(profile.query_heads_LQ), expected, atol=1e-6, rtol=1e-4)
    assert probe == "retrieval" or bool((expected > 0).any())
    assert profile.measurement["tests"] == profile.measurement["tests_answered_right"] == 2
    assert profile.measurement["lengths"] == [700]
    assert profile.data["haystack"] == "noise"


def _values(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in plan.__slots__}


def test_only_tests_answered_right_count() -> None:
    loaded, seen = tiny_loaded(), []
    both = [calibrate_headkv(loaded, noise(), PLAN, is_right=lambda answer, example: True)]

    def first_only(answer: str, example: Any) -> bool:
        seen.append(answer)
        return len(seen) == 1

    first = calibrate_headkv(loaded, noise(), PLAN, is_right=first_only)
    assert first.measurement["tests_answered_right"] == 1
    assert first.query_heads_LQ != both[0].query_heads_LQ


def test_a_model_that_finds_nothing_has_no_profile() -> None:
    said: list[str] = []
    with pytest.raises(kv.ConfigError, match="None of 2 tests was answered right"):
        calibrate_headkv(tiny_loaded(), noise(), PLAN, say=said.append)
    assert len(said) == 2
    assert all("wrong" in line for line in said)


def test_layers_are_measured_as_zigzagkv_measures_them() -> None:
    """The mean over prompts of what the policy's own allocation is handed on each of them."""
    loaded, given = tiny_loaded(), []
    profile = calibrate_zigzagkv(loaded, noise(), PLAN, window=8)
    encoder = PromptEncoder(loaded.tokenizer)
    request = ExampleRequest(length_tokens=700, depths=PLAN.depths, num_examples=2, max_new_tokens=3, seed=0)
    for example in NeedleTask(name="calibration", haystack=noise(), num_distractors=1).examples(request, encoder):
        cache = kv.ZigZagKVCache(loaded.model, budget=40, window=8)
        given.append(_sensitivities(cache, loaded.model, encoder.encode(example).token_ids))
    assert profile.kind == "zigzagkv"
    assert profile.layers_L == pytest.approx(torch.tensor(given).mean(0).tolist(), rel=1e-5)


def _sensitivities(cache: Any, model: Any, token_ids: Sequence[int]) -> list[float]:
    seen: list[float] = []
    allocation = cache.composition.allocation
    plain = type(allocation).sensitivity

    def spy(self: Any, attention_QN: Tensor) -> float:
        seen.append(float(minimum_rows_for_mass(attention_QN, 0.9).double().mean()))
        return plain(self, attention_QN)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(type(allocation), "sensitivity", spy)
        model(torch.tensor([list(token_ids)]), **{cache_argument(): cache})
    return seen


def test_a_profile_of_a_run_serves_its_model_and_no_other(tmp_path: Path) -> None:
    from hf_kvpolicy.profiles import save_profile

    loaded = tiny_loaded()
    profile = calibrate_headkv(loaded, noise(), PLAN, is_right=lambda answer, example: True)
    save_profile(profile, tmp_path / "profile.json")
    kv.HeadKVCache(loaded.model, budget=12, profile=tmp_path / "profile.json")
    other = tiny_loaded()
    with torch.no_grad():
        other.model.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
    with pytest.raises(kv.CheckpointAdmissionError):
        kv.HeadKVCache(other.model, budget=12, profile=tmp_path / "profile.json")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    loaded = tiny_loaded()
    for part in (loaded.model, loaded.tokenizer):
        part.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


SMALL = ["--data", "noise", "--length", "700", "--examples", "5", "--distractors", "1"]


def test_the_command_writes_a_profile(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headkv, "_contains_answer", lambda answer, example: True)
    for policy in ("headkv", "zigzagkv"):
        path = tmp_path / f"{policy}.json"
        result = CliRunner().invoke(app, ["calibrate", policy, "--model", folder, "--out", str(path), *SMALL])
        assert result.exit_code == 0, result.output
        assert f"written: {path}" in result.output
    from transformers import AutoModelForCausalLM

    kv.HeadKVCache(AutoModelForCausalLM.from_pretrained(folder), budget=12, profile=tmp_path / "headkv.json")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["snapkv"], "needs no profile"),
        (["headkv", "--probe", "reasning"], "Did you mean 'reasoning'"),
        (["headkv", "--data", "pydox"], "Did you mean 'pydoc'"),
        (["headkv", "--examples", "7"], "multiple of 5"),
        (["headkv", "--length", "100"], "Ask for a larger length"),
        (["headkv", "--model", "no/such/folder"], "cannot be loaded"),
        (["headkv"], "was answered right"),
    ],
)
def test_refusals_are_one_line(folder: str, tmp_path: Path, arguments: list[str], words: str) -> None:
    path = tmp_path / "profile.json"
    result = CliRunner().invoke(app, ["calibrate", "--out", str(path), "--model", folder, *SMALL, *arguments])
    assert result.exit_code == 2, result.output
    assert words in result.output
    assert "Traceback" not in result.output
    assert not path.exists()


def test_a_text_file_and_a_folder_are_haystacks(tmp_path: Path) -> None:
    lines = [f"This is sentence number {i} of a text that says nothing." for i in range(30)]
    (tmp_path / "a.txt").write_text(" ".join(lines[:15]) + "\n\n    code that is left out\n\n" + " ".join(lines[15:]))
    (tmp_path / "skipped.csv").write_text("This is a table that nobody wants to read in a haystack.")
    by_file, by_folder = load_haystack(str(tmp_path / "a.txt")), load_haystack(str(tmp_path))
    assert by_file.sentences == tuple(lines) == by_folder.sentences
    assert by_file.sha256 == by_folder.sha256
    (tmp_path / "short.txt").write_text("One sentence that is long enough, but alone.")
    with pytest.raises(kv.ConfigError, match="holds 1 sentences"):
        load_haystack(str(tmp_path / "short.txt"))


def test_layers_with_a_window_are_refused() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8,
    )  # fmt: skip
    loaded = LoadedModel(name="tiny", source="tiny", model=MistralForCausalLM(config), tokenizer=tiny_tokenizer())
    with pytest.raises(kv.UnsupportedModelError, match="sliding window"):
        calibrate_headkv(loaded, noise(), PLAN)
