"""The ids of every prompt are those of its text: compared id by id, for a BOS may also be the turn marker."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("evaluate")

from eval_fakes import fake_builder, tiny_loaded, tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from hf_kvpolicy.errors import ConfigError
from hf_kvpolicy.eval.model_loading import smollm2_directory
from hf_kvpolicy.eval.prompt_ids import check_prompt_ids
from hf_kvpolicy.eval.prompting import PromptEncoder
from hf_kvpolicy.eval.run_directory import RunDirectory
from hf_kvpolicy.eval.runner import run_sweep
from hf_kvpolicy.eval.sweep import parse_sweep
from hf_kvpolicy.eval.tasks.base import Example, ExampleRequest, Turn, without_context
from hf_kvpolicy.eval.tasks.registry import available_tasks, make_task, task_entry

SYSTEM = "<s>system You help."
BOS = 256
EXAMPLE = Example(context="Text.", question="What?", answer_prefix="It is", answers=("42",))
TURNS = (Turn(user="Remember 42.", assistant="I do."), Turn(user="Wait.", assistant="I do."))
SHAPES = (
    EXAMPLE,
    replace(EXAMPLE, answer_prefix=""),
    replace(EXAMPLE, earlier_turns=TURNS),
    replace(EXAMPLE, chat_template=False),
    replace(EXAMPLE, chat_template=False, earlier_turns=TURNS, answer_prefix=""),
    without_context(EXAMPLE),
    replace(EXAMPLE, context="<s>Text with a marker of its own.", chat_template=False),
)


@cache
def smollm2() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_directory()) if smollm2_directory().is_dir() else None


def tokenizer_of(kind: str) -> Any:
    """A byte tokenizer with a template, without one, or with one that adds a system message; or the real model's."""
    tokenizer = tiny_tokenizer(chat=kind != "plain")
    if kind == "system":
        inject = "{% if messages[0]['role'] != 'system' %}" + SYSTEM + "</s>{% endif %}"
        tokenizer.chat_template = inject + tokenizer.chat_template
    if kind == "smollm2":
        return smollm2() or pytest.skip("scripts/fetch_model has not been run")
    return tokenizer


def adding_bos(tokenizer: Any) -> Any:
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


@pytest.mark.parametrize("example", SHAPES)
@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("kind", ["chat", "plain", "system", "smollm2"])
def test_ids_are_those_of_the_text_with_and_without_a_template(kind: str, adds_bos: bool, example: Example) -> None:
    tokenizer = tokenizer_of(kind)
    if adds_bos and kind == "smollm2":
        pytest.skip("SmolLM2's tokenizer adds none")
    encoder = PromptEncoder(adding_bos(tokenizer) if adds_bos else tokenizer)
    for query_aware in (True, False):
        encoded = encoder.encode(example, query_aware=query_aware)
        check_prompt_ids(tokenizer, example, encoded)
        own = tokenizer(encoder.text(example), add_special_tokens=False)["input_ids"]
        untemplated = kind == "plain" or not example.chat_template
        begins_with_it = example.context.startswith("<s>")
        assert encoded.added_bos_tokens == int(untemplated and adds_bos and not begins_with_it)
        assert list(encoded.token_ids) == [BOS] * encoded.added_bos_tokens + own


def test_a_bos_that_is_the_turn_marker_is_not_counted_as_added() -> None:
    tokenizer = tokenizer_of("smollm2")
    encoded = PromptEncoder(tokenizer).encode(replace(EXAMPLE, earlier_turns=TURNS))
    # The template's own system message, three of the user, two answers and the one that begins.
    assert encoded.token_ids.count(tokenizer.bos_token_id) == 7
    assert encoded.added_bos_tokens == 0


def test_what_a_template_adds_by_itself_is_found() -> None:
    assert PromptEncoder(tokenizer_of("chat")).encode(EXAMPLE).template_preamble == ""
    assert PromptEncoder(tokenizer_of("plain")).encode(EXAMPLE).template_preamble == ""
    encoder = PromptEncoder(tokenizer_of("system"))
    assert encoder.encode(EXAMPLE).template_preamble == SYSTEM
    assert encoder.encode(replace(EXAMPLE, chat_template=False)).template_preamble == ""
    beginning = tiny_tokenizer()
    beginning.chat_template = "<s>" + beginning.chat_template
    assert PromptEncoder(beginning).template_preamble == "", "a BOS is no message"


def test_smollm2s_template_adds_a_system_message() -> None:
    preamble = PromptEncoder(tokenizer_of("smollm2")).template_preamble
    assert preamble.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert "user" not in preamble


@pytest.mark.parametrize("kind", ["system", "smollm2"])
@pytest.mark.parametrize("name", [name for name in available_tasks() if "noise" in name or name.endswith("_pydoc")])
def test_every_example_of_every_task_that_needs_no_data(kind: str, name: str) -> None:
    tokenizer, task = tokenizer_of(kind), make_task(name)
    encoder = PromptEncoder(tokenizer)
    assert "data" not in task_entry(name).params
    count = len(getattr(task, "distances", "123"))
    request = ExampleRequest(
        length_tokens=2400, depths=task.depths[:1], num_examples=count, max_new_tokens=task.max_new_tokens, seed=0
    )
    for example in task.examples(request, encoder):
        for asked in (example, without_context(example)):
            check_prompt_ids(tokenizer, asked, encoder.encode(asked))


@pytest.mark.parametrize("kind", ["chat", "plain"])
@pytest.mark.parametrize("place", [0, 5, -1])
def test_one_token_too_many_is_refused(kind: str, place: int) -> None:
    tokenizer = tokenizer_of(kind)
    encoded = PromptEncoder(tokenizer).encode(EXAMPLE)
    ids = list(encoded.token_ids)
    ids.insert(place if place >= 0 else len(ids), BOS)
    with pytest.raises(ConfigError, match="differ at token"):
        check_prompt_ids(tokenizer, EXAMPLE, replace(encoded, token_ids=tuple(ids)))


def test_two_added_bos_are_refused() -> None:
    tokenizer = adding_bos(tokenizer_of("plain"))
    encoded = PromptEncoder(tokenizer).encode(EXAMPLE)
    assert encoded.added_bos_tokens == 1
    twice = replace(encoded, token_ids=(BOS, *encoded.token_ids), added_bos_tokens=2)
    with pytest.raises(ConfigError, match="behind one BOS at most"):
        check_prompt_ids(tokenizer, EXAMPLE, twice)


def test_a_tokenizer_that_tokenises_a_chat_otherwise_than_its_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of("chat")
    encoded = PromptEncoder(tokenizer).encode(EXAMPLE)
    rendering = tokenizer.apply_chat_template

    def doubled(messages: Any, *, tokenize: bool, **arguments: Any) -> Any:
        found = rendering(messages, tokenize=tokenize, **arguments)
        return [BOS, *found] if tokenize else found

    monkeypatch.setattr(tokenizer, "apply_chat_template", doubled)
    with pytest.raises(ConfigError, match="differ at token 1"):
        check_prompt_ids(tokenizer, EXAMPLE, encoded)


def test_a_run_checks_its_prompts_and_records_what_was_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = replace(tiny_loaded(), tokenizer=tokenizer_of("system"))
    document = {
        "model": "tiny",
        "max_new_tokens": 2,
        "tasks": [{"name": "needle_single_noise", "lengths_tokens": [600], "depths": [0.5], "num_examples": 1}],
        "policies": ["full"],
        "floor": True,
    }
    run_sweep(parse_sweep(document), loaded, RunDirectory(tmp_path / "run"), fake_builder, say=lambda line: None)
    rows = RunDirectory(tmp_path / "run").rows()
    assert {row.cell["policy"] for row in rows} == {"full", "no_context"}
    for row in rows:
        assert (row.example["template_preamble"], row.example["added_bos_tokens"]) == (SYSTEM, 0)
    encode = PromptEncoder.encode

    def longer(self: PromptEncoder, example: Example, **arguments: Any) -> Any:
        found = encode(self, example, **arguments)
        return replace(found, token_ids=(BOS, *found.token_ids))

    monkeypatch.setattr(PromptEncoder, "encode", longer)
    with pytest.raises(ConfigError, match="without special tokens"):
        run_sweep(parse_sweep(document), loaded, RunDirectory(tmp_path / "two"), fake_builder, say=lambda line: None)
