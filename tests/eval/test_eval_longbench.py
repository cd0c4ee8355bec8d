"""LongBench's tasks on records of our own: rendering, truncation, and the split between context and question."""

from __future__ import annotations

import itertools
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eval_fakes import tiny_tokenizer
from longbench_fakes import PASSAGE, record, write_data, write_records

from hf_kvpolicy.errors import ConfigError
from hf_kvpolicy.eval.prompting import PromptEncoder
from hf_kvpolicy.eval.tasks.base import Example, ExampleRequest
from hf_kvpolicy.eval.tasks.longbench import ENTRIES
from hf_kvpolicy.eval.tasks.longbench_prompts import OURS, load_prompt
from hf_kvpolicy.eval.tasks.longbench_table import LONGBENCH_TASKS, length_bucket
from hf_kvpolicy.eval.tasks.registry import make_task

pytest.importorskip("evaluate")
pytest.importorskip("jieba")
pytest.importorskip("rouge")
pytest.importorskip("rapidfuzz")

from hf_kvpolicy.eval.metrics.registry import score_answer

# A byte a token: lengths are in bytes here, and every record of the fixtures is longer than LENGTH.
LENGTH, MAX_NEW = 400, 16
REQUEST = ExampleRequest(length_tokens=LENGTH, depths=(), num_examples=2, max_new_tokens=MAX_NEW, seed=1)
WHOLE = replace(REQUEST, length_tokens=100_000)
EXTENDED = [
    "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec", "triviaqa", "samsum",
    "passage_count", "passage_retrieval_en", "lcc", "repobench-p",
]  # fmt: skip
NO_TEMPLATE = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_data(tmp_path_factory.mktemp("longbench")))


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(tiny_tokenizer())


def one_record(folder: Path, task: str = "qasper", **changes: Any) -> str:
    write_records(folder / f"{task}.jsonl", [record(task, **changes)])
    return str(folder)


def examples(encoder: PromptEncoder, data: str, name: str = "longbench_qasper", **params: Any) -> list[Example]:
    request = params.pop("request", WHOLE)
    return make_task(name, {"data": data, **params}).examples(request, encoder)


def test_the_tasks_and_their_answers_are_the_published_ones() -> None:
    assert len(LONGBENCH_TASKS) == 21
    assert {task for task, spec in LONGBENCH_TASKS.items() if not spec.chat_template} == NO_TEMPLATE
    assert [name for name in ENTRIES if name.startswith("longbench_e_")] == [f"longbench_e_{task}" for task in EXTENDED]
    by_length = {32: 0, 64: 0, 128: 0, 512: 0}
    for spec in LONGBENCH_TASKS.values():
        by_length[spec.max_new_tokens] += 1
    assert by_length == {32: 7, 64: 6, 128: 4, 512: 4}


@pytest.mark.parametrize("name", ENTRIES)
def test_every_task_renders_and_scores(name: str, data: str, encoder: PromptEncoder) -> None:
    task = make_task(name, {"data": data})
    found = task.examples(WHOLE, encoder)
    assert len(found) == 2
    source = name.removeprefix("longbench_").removeprefix("e_")
    for example in found:
        index = int(str(example.coordinates["record_id"]).rpartition("-")[2])
        values = record(source, index)
        head, _, after = OURS[source].partition("{context}")
        assert example.context == head.format(**values) + values["context"]
        assert example.question == after.format(**values)
        assert example.joint == example.answer_prefix == ""
        assert example.dropped_tokens == 0
        assert example.chat_template is (source not in NO_TEMPLATE)
        assert example.answers == tuple(values["answers"])
        assert (example.stop, example.min_new_tokens) == ((("\n",), 1) if source == "samsum" else ((), 0))
        assert score_answer(task.metric, values["answers"][-1], example) == pytest.approx(1.0)
        assert score_answer(task.metric, "", example) == 0.0
        # An English example is continued behind "Type:" or "Answer:", the others at the beginning of a line or turn.
        assert example.gold_text == (" " if source in ("trec", "triviaqa") else "") + values["answers"][0]
        text = encoder.text(example)
        assert text.startswith("<s>user") is example.chat_template
        bucket = {3000: "0-4k", 5500: "4-8k", 8000: "8k+", 10500: "8k+"}[values["length"]]
        assert example.coordinates.get("length_bucket") == (bucket if "_e_" in name else None)
        assert example.coordinates["source_length"] == values["length"]


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("compat", [True, False])
def test_every_task_is_cut_in_the_middle_and_split_behind_its_context(
    name: str, compat: bool, data: str, encoder: PromptEncoder
) -> None:
    whole = {e.coordinates["record_id"]: e for e in examples(encoder, data, name, compat=compat)}
    length = 700  # the longest question is over 300 bytes
    for example in examples(encoder, data, name, compat=compat, request=replace(REQUEST, length_tokens=length)):
        before = whole[example.coordinates["record_id"]]
        long, short = before.context + before.question, example.context + example.question
        kept = short.replace("\N{REPLACEMENT CHARACTER}", "")  # half a character, where bytes are tokens
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(long, kept, strict=False)))
        assert long.endswith(kept[same:])
        assert example.question == before.question
        assert example.dropped_tokens > 0
        if compat:  # the published rule: half of the bound from either end, and the template on top
            assert short == encoder.cut_middle(long, length)[0]
            assert example.dropped_tokens == len(long.encode()) - 2 * (length // 2)
        else:
            assert length - MAX_NEW - 8 <= len(encoder.encode(example).token_ids) <= length - MAX_NEW
        encoded = encoder.encode(example, query_aware=False)
        assert len(encoded.segments) == 2
        fed = encoder._tokenizer.decode(list(encoded.segments[1]))
        assert fed.startswith(before.question.strip())


def test_the_split_follows_a_cut_through_the_question(tmp_path: Path, encoder: PromptEncoder) -> None:
    question = "Why? " * 100
    data = one_record(tmp_path, context="Short.", input=question)
    (example,) = examples(encoder, data, request=replace(REQUEST, length_tokens=260))
    assert example.context.endswith("Short.")
    assert example.question.endswith("\n\nAnswer:")
    # A cut through both: nothing of the question may end up in the context.
    data = one_record(tmp_path, context="Long. " * 100, input=question)
    (example,) = examples(encoder, data, request=replace(REQUEST, length_tokens=260))
    assert "Why?" not in example.context
    assert example.question.endswith("Why? \n\nAnswer:")


def test_a_question_is_no_part_of_the_context_where_decoding_drops_spaces(
    tmp_path: Path, encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(text: str, max_tokens: int) -> tuple[str, int]:
        short, dropped = PromptEncoder.cut_middle(encoder, text, max_tokens)
        return short.replace(" ?", "?"), dropped

    data = one_record(tmp_path, context="Long. " * 100, input="Which ? Why ?")
    sizer = PromptEncoder(tiny_tokenizer())
    monkeypatch.setattr(sizer, "cut_middle", cut)
    (example,) = make_task("longbench_qasper", {"data": data}).examples(replace(REQUEST, length_tokens=700), sizer)
    assert "Reply" not in example.context
    assert "Question: Which? Why?" in example.question


@pytest.mark.parametrize("compat", [True, False])
def test_a_length_that_leaves_nothing_is_refused(compat: bool, data: str, encoder: PromptEncoder) -> None:
    with pytest.raises(ConfigError, match="leaves nothing of a prompt of task 'longbench_qasper'"):
        examples(encoder, data, compat=compat, request=replace(REQUEST, length_tokens=1))


def test_the_seed_draws_records_and_more_go_on_from_fewer(data: str, encoder: PromptEncoder) -> None:
    def drawn(**changes: Any) -> list[Any]:
        return [e.coordinates["record_id"] for e in examples(encoder, data, request=replace(REQUEST, **changes))]

    assert drawn() == drawn(length_tokens=700)
    assert drawn(num_examples=3)[:2] == drawn()
    assert len({tuple(drawn(seed=seed)) for seed in range(6)}) > 1
    assert sorted(drawn(num_examples=500)) == [f"qasper-{index}" for index in range(4)]


def test_fixed_measures_go_under_names_of_their_own(data: str) -> None:
    changed = {}
    for name in ENTRIES:
        published, fixed = (make_task(name, {"data": data, "compat": compat}).metric for compat in (True, False))
        if published != fixed:
            changed[name] = fixed
    assert changed == {
        **dict.fromkeys(["longbench_trec", "longbench_e_trec", "longbench_lsht"], "classification_first_line_fixed"),
        **dict.fromkeys([f"longbench_{e}{task}" for e in ("", "e_") for task in ("lcc", "repobench-p")],
                        "code_sim_fixed"),
    }  # fmt: skip


def test_an_archive_holds_what_the_folder_holds(data: str, tmp_path: Path, encoder: PromptEncoder) -> None:
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as stream:
        for path in Path(data).iterdir():
            stream.write(path, f"data/{path.name}")
    for name in ("longbench_qasper", "longbench_e_qasper"):
        packed, plain = (make_task(name, {"data": place}) for place in (str(archive), data))
        assert packed.examples(WHOLE, encoder) == plain.examples(WHOLE, encoder)
        assert packed.provenance == plain.provenance
    unpacked = tmp_path / "unpacked"
    write_data(unpacked / "data")
    assert examples(encoder, str(unpacked)) == examples(encoder, data)


@pytest.mark.parametrize("damage", ["directory", "content", "encrypted"])
def test_an_archive_that_cannot_be_read_is_named(
    data: str, tmp_path: Path, encoder: PromptEncoder, damage: str
) -> None:
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as stream:
        stream.write(Path(data) / "qasper.jsonl", "data/qasper.jsonl")
    content = bytearray(archive.read_bytes())
    entry = content.index(b"PK\1\2")
    if damage == "directory":
        content[entry : entry + 4] = b"...."
    elif damage == "content":
        content[60:64] = b"...."
    else:
        for flags in (6, entry + 8):  # of the local header, and of the directory
            content[flags] |= 1
    archive.write_bytes(content)
    with pytest.raises(ConfigError, match=r"data\.zip cannot be read"):
        make_task("longbench_qasper", {"data": str(archive)}).examples(WHOLE, encoder)


def test_provenance_tells_data_and_prompts_apart(data: str, tmp_path: Path) -> None:
    def of(**params: Any) -> dict[str, str]:
        return dict(make_task("longbench_qasper", {"data": data, **params}).provenance)

    assert (of()["prompts"], of()["compat"], of(compat=False)["compat"]) == ("ours", "true", "false")
    other = {"data": one_record(tmp_path)}
    assert of(**other)["data_sha256"] != of()["data_sha256"]
    given = of(prompts=prompt_folder(tmp_path))
    assert given["prompts"] == "dataset2prompt.json"
    assert given["template_sha256"] != of()["template_sha256"]


def prompt_folder(folder: Path, text: Any = "Read {context} and {input}.", tokens: Any = 99) -> str:
    place = folder / "LongBench" / "config"
    place.mkdir(parents=True, exist_ok=True)
    (place / "dataset2prompt.json").write_text(json.dumps({"qasper": text}))
    (place / "dataset2maxlen.json").write_text(json.dumps({"qasper": tokens}))
    return str(folder)


def test_given_prompts_are_used_with_their_answer_lengths(tmp_path: Path, encoder: PromptEncoder) -> None:
    params = {"data": one_record(tmp_path), "prompts": prompt_folder(tmp_path)}
    task = make_task("longbench_qasper", params)
    assert task.max_new_tokens == 99
    (example,) = task.examples(WHOLE, encoder)
    assert (example.context, example.question) == (f"Read {PASSAGE} (0)", f" and {record('qasper')['input']}.")
    # Braces in a record are text.
    one_record(tmp_path, context="{input} {0}", input="{context}")
    (example,) = task.examples(WHOLE, encoder)
    assert example.context + example.question == "Read {input} {0} and {context}."


def test_prompts_of_our_own_are_templates_with_the_fields_of_the_task() -> None:
    assert set(OURS) == set(LONGBENCH_TASKS)
    no_input = {task for task, text in OURS.items() if "{input}" not in text}
    assert no_input == {"gov_report", "multi_news", "vcsum", "passage_count", "lcc"}
    for task in OURS:
        head, tail = load_prompt(task, None).render(context="CONTEXT", question="INPUT")
        assert head.endswith("CONTEXT")
        assert head.count("CONTEXT") == 1
        assert ("INPUT" in tail) is (task not in no_input)


@pytest.mark.parametrize(
    ("text", "tokens", "message"),
    [
        ("{context} {length}", 9, "unknown field {length}; there are {context} and {input}"),
        ("{context!r}", 9, "unknown field {context!r}"),
        ("{context} {", 9, "is no template"),
        ("{input}", 9, r"has no field {context}"),
        (["{context}"], 9, "has no text for 'qasper'"),
        ("{context}", "9", "has no number of tokens for 'qasper' but '9'"),
        ("{context}", True, "has no number of tokens"),
    ],
)
def test_a_prompt_that_is_none_is_refused(tmp_path: Path, text: Any, tokens: Any, message: str) -> None:
    params = {"data": one_record(tmp_path), "prompts": prompt_folder(tmp_path, text, tokens)}
    with pytest.raises(ConfigError) as caught:
        make_task("longbench_qasper", params)
    assert message in str(caught.value)


def test_a_folder_without_the_prompts_is_refused(tmp_path: Path) -> None:
    data = one_record(tmp_path)
    with pytest.raises(ConfigError, match=r"no dataset2prompt\.json"):
        make_task("longbench_qasper", {"data": data, "prompts": data})
    prompts = prompt_folder(tmp_path)
    with pytest.raises(ConfigError, match="has no entry 'hotpotqa'"):
        load_prompt("hotpotqa", prompts)
    (tmp_path / "LongBench" / "config" / "dataset2maxlen.json").write_text("{")
    with pytest.raises(ConfigError, match=r"dataset2maxlen\.json cannot be read as JSON"):
        load_prompt("qasper", prompts)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "needs LongBench's records"),
        ({"data": 3}, "'data' of task 'longbench_qasper' must be a path; got 3"),
        ({"data": "absent"}, "There is no folder or archive 'absent'"),
        ({"data": "."}, "holds no qasper.jsonl; it holds qaspr.jsonl"),
        ({"data": "qaspr.jsonl"}, "is no zip archive"),
        ({"data": "data.zip"}, "Did you mean 'qaspr.jsonl'"),
        ({"data": ".", "prompts": 3}, "'prompts' of task 'longbench_qasper' must be a path"),
        ({"data": ".", "compat": "no"}, "must be true or false; got 'no'"),
        ({"dat": "."}, "Did you mean 'data'"),
    ],
)
def test_data_that_is_not_there_is_refused_before_any_model(
    params: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("qaspr.jsonl").write_text("")
    with zipfile.ZipFile("data.zip", "w") as stream:
        stream.write("qaspr.jsonl", "data/qaspr.jsonl")
    with pytest.raises(ConfigError) as caught:
        make_task("longbench_qasper", params)
    assert message in str(caught.value)


LINE = json.dumps(record("qasper")).encode()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([LINE, LINE[:-20]], "line 2 is not JSON in UTF-8"),
        ([LINE, b"\xff" + LINE], "line 2 is not JSON in UTF-8"),
        ([LINE.replace(b"Which", b"\\ud800")], "line 1 is not JSON in UTF-8"),
        ([b"[]"], "line 1 holds no record but list"),
        ([b""], "holds no records"),
        ([LINE.replace(b'"context"', b'"text"')], "line 1 has no text under 'context' but None"),
        ([LINE, b"", json.dumps(record("qasper", context="")).encode()], "line 3 has an empty context"),
        ([json.dumps(record("qasper", answers=[])).encode()], "line 1 has no answer"),
        ([json.dumps(record("qasper", answers=[""])).encode()], "line 1 has no answer"),
        ([json.dumps(record("qasper", answers="white")).encode()], "has no list of texts under 'answers'"),
        ([json.dumps(record("qasper", length="long")).encode()], "has the length 'long'"),
    ],
)
def test_a_line_that_is_no_record_is_named(
    tmp_path: Path, encoder: PromptEncoder, lines: list[bytes], message: str
) -> None:
    (tmp_path / "qasper.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        examples(encoder, str(tmp_path))
    assert message in str(caught.value)
    assert "qasper.jsonl" in str(caught.value)


def test_what_a_task_needs_of_a_record_is_named(tmp_path: Path, encoder: PromptEncoder) -> None:
    data = one_record(tmp_path, "trec", all_classes=None)
    with pytest.raises(ConfigError, match="line 1 names no classes"):
        examples(encoder, data, "longbench_trec")
    write_records(tmp_path / "qasper_e.jsonl", [record("qasper", length=None)])
    with pytest.raises(ConfigError, match="line 1 has no 'length'"):
        examples(encoder, data, "longbench_e_qasper")
    one_record(tmp_path, "passage_retrieval_en", answers=["the second"])
    with pytest.raises(ConfigError, match="it names no paragraph"):
        examples(encoder, data, "longbench_passage_retrieval_en")


def test_a_text_keeps_every_character(tmp_path: Path, encoder: PromptEncoder) -> None:
    # A line separator, a vertical tab and an emoji end no line of the file; the first answer may be empty.
    odd = "one\u2028two\u000bthree \N{GRINNING FACE} \u0915\u094d\u0937 "
    data = one_record(tmp_path, context=odd * 60, answers=["", "white"])
    (whole,) = examples(encoder, data)
    assert whole.context.endswith(odd * 60)
    assert (whole.gold_text, whole.answers) == ("white", ("", "white"))
    (cut,) = examples(encoder, data, request=replace(REQUEST, length_tokens=700))
    assert cut.question == whole.question
    assert cut.example_id != whole.example_id


def test_a_package_that_is_missing_is_named_before_the_first_prompt(
    data: str, encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from hf_kvpolicy.eval.metrics import code_similarity

    monkeypatch.setitem(sys.modules, "rapidfuzz.fuzz", None)
    code_similarity._ratio.cache_clear()
    task = make_task("longbench_lcc", {"data": data})
    with pytest.raises(ConfigError, match=r"pip install 'hf-kvpolicy\[longbench\]'"):
        task.examples(WHOLE, encoder)


def test_the_hub_is_asked_only_where_it_is_named(
    data: str, encoder: PromptEncoder, tmp_path: Path, monkeypatch: Any
) -> None:
    import huggingface_hub

    asked = []
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as stream:
        stream.write(Path(data) / "qasper.jsonl", "data/qasper.jsonl")

    def download(repository: str, file_name: str, *, repo_type: str) -> str:
        asked.append((repository, file_name, repo_type))
        return str(archive)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    examples(encoder, data)
    task = make_task("longbench_qasper", {"data": "hub"})
    assert asked == []
    assert task.examples(WHOLE, encoder) == examples(encoder, data)
    assert asked == [("THUDM/LongBench", "data.zip", "dataset")]


def test_a_hub_that_cannot_be_reached_is_one_error(encoder: PromptEncoder) -> None:
    with pytest.raises(ConfigError, match=r"data\.zip of the data set THUDM/LongBench cannot be fetched"):
        examples(encoder, "hub")


def test_lengths_fall_into_the_published_buckets() -> None:
    assert [length_bucket(n) for n in (0, 3999, 4000, 7999, 8000, 90_000)] == ["0-4k"] * 2 + ["4-8k"] * 2 + ["8k+"] * 2
