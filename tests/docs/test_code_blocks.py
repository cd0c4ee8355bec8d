"""Runs the ```python blocks of the README and of docs/, in order, one namespace a file.

`model`, `tokenizer` and `inputs` are there before the first block. The working directory holds a folder named
as the hub model the pages load, so `from_pretrained` finds a tiny one. ```python no-run marks the others.
"""

from __future__ import annotations

import linecache
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import hf_kvpolicy as kv
from hf_kvpolicy.cli import app as cli_app
from hf_kvpolicy.eval.cli import app as eval_app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
FENCE = re.compile(r"^```python(?P<info>[^\n]*)\n(?P<code>.*?)^```\s*$", re.MULTILINE | re.DOTALL)
CHAT_TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"


class Block(NamedTuple):
    line: int
    code: str


def code_blocks(text: str) -> Iterator[Block]:
    """Yield the blocks that are to run, with the line their code starts at."""
    for match in FENCE.finditer(text):
        if "no-run" not in match["info"].split():
            yield Block(text.count("\n", 0, match.start("code")) + 1, match["code"])


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: enough for any text, and nothing to download."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<eos>": 1, **{symbol: i + 2 for i, symbol in enumerate(alphabet)}}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def run_page(page: Path, namespace: dict[str, object]) -> None:
    for block in code_blocks(page.read_text(encoding="utf-8")):
        name = f"{page.name}:{block.line}"
        # A traceback then quotes the page's own lines.
        linecache.cache[name] = (len(block.code), None, block.code.splitlines(keepends=True), name)
        exec(compile(block.code, name, "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = tiny_model(), byte_tokenizer()
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / HUB_NAME)
    monkeypatch.chdir(tmp_path)
    inputs = tokenizer(["A question about the text above, long enough to be cut. " * 8], return_tensors="pt")
    run_page(page, {"model": model, "tokenizer": tokenizer, "inputs": inputs, "__name__": "__docs__"})
    kv.detach(model)


@pytest.mark.allow_deprecated  # by transformers itself, where its assisted decoding calls generate
def test_the_block_on_assisted_decoding_runs() -> None:
    text = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
    (code,) = [match["code"] for match in FENCE.finditer(text) if "assistant_model" in match["code"]]
    model, tokenizer = tiny_model(), byte_tokenizer()
    inputs = tokenizer(["A question about the text above, long enough to be cut. " * 8], return_tensors="pt")
    found = {"model": model, "small_model": tiny_model(), "inputs": inputs, "kv": kv}
    exec(code, found)
    assert found["out"].shape[1] > inputs["input_ids"].shape[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_exist(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    missing = [target for target in local if not (page.parent / target).exists()]
    assert not missing, f"{page.name} links to files that are not there: {missing}"


def test_scripts_named_in_the_readme_exist() -> None:
    named = set(re.findall(r"scripts/[a-z_]+", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_commands_in_the_docs_exist_with_their_options() -> None:
    lines = [line for page in PAGES for line in re.findall(r"^kvpolicy .*", page.read_text(encoding="utf-8"), re.M)]
    assert lines
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        application, verb = (cli_app, words[0]) if words[0] != "eval" else (eval_app, words[1])
        shown = CliRunner().invoke(application, [verb, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
        assert shown.exit_code == 0, line
        for option in (word for word in words if word.startswith("--")):
            assert re.search(rf"{option}\b", shown.output), f"{line}: no {option}"


def test_test_folders_are_those_of_the_contributing_table() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `tests/(\w+)/` \|", text, re.MULTILINE))
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders <= named, "each test folder has its row"
    assert named - folders <= {"policies"}, "only scripts/new_policy makes this one"


def test_blocks_are_found_with_their_lines() -> None:
    text = "# Title\n\n```python\na = 1\n```\ntext\n```python no-run\nb\n```\n```python\nc = 2\nd = 3\n```\n"
    assert list(code_blocks(text)) == [Block(4, "a = 1\n"), Block(11, "c = 2\nd = 3\n")]


def test_a_failing_block_fails_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError):
        run_page(page, {})
