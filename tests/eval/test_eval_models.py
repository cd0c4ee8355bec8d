"""Where the small real model is looked for, and what is said when something is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_kvpolicy.errors import ConfigError, IntegrityError
from hf_kvpolicy.eval import fetch_smollm2
from hf_kvpolicy.eval.extras import require
from hf_kvpolicy.eval.model_loading import SMOLLM2_NAME, load_model, smollm2_directory


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVPOLICY_CACHE", str(tmp_path))
    assert smollm2_directory() == tmp_path / SMOLLM2_NAME
    monkeypatch.delenv("KVPOLICY_CACHE")
    assert smollm2_directory() == Path.home() / ".cache" / "hf_kvpolicy" / SMOLLM2_NAME


def test_a_model_not_fetched_yet_names_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVPOLICY_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="scripts/fetch_model"):
        load_model(SMOLLM2_NAME)


def test_an_unknown_dtype_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'float32'"):
        load_model(SMOLLM2_NAME, dtype="flaot32")


def test_fetching_again_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVPOLICY_CACHE", str(tmp_path))
    monkeypatch.setattr(fetch_smollm2.subprocess, "run", lambda *a, **k: pytest.fail("something was downloaded"))
    smollm2_directory().mkdir()
    (smollm2_directory() / "fetched.json").write_text("{}")
    assert fetch_smollm2.fetch() == smollm2_directory()


def test_a_failed_download_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVPOLICY_CACHE", str(tmp_path))
    monkeypatch.setattr(fetch_smollm2, "_require_packages", lambda *names: None)
    answer = SimpleNamespace(returncode=1, stderr="no index")
    monkeypatch.setattr(fetch_smollm2.subprocess, "run", lambda *a, **k: answer)
    with pytest.raises(ConfigError, match="no index"):
        fetch_smollm2.fetch()
    assert list(tmp_path.iterdir()) == []


def test_remains_of_an_unfinished_folder_are_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVPOLICY_CACHE", str(tmp_path))
    monkeypatch.setattr(fetch_smollm2, "_require_packages", lambda *names: None)
    monkeypatch.setattr(fetch_smollm2, "_download_gguf", lambda scratch: scratch / "x.gguf")

    def convert(gguf: Path, staged: Path) -> Path:
        staged.mkdir()
        (staged / "fetched.json").write_text("{}")
        return staged

    monkeypatch.setattr(fetch_smollm2, "_convert", convert)
    smollm2_directory().mkdir()
    (smollm2_directory() / "half").write_text("")
    assert [p.name for p in fetch_smollm2.fetch().iterdir()] == ["fetched.json"]


def test_a_tokenizer_that_ends_turns_differently_is_refused() -> None:
    config = SimpleNamespace(bos_token_id=1, eos_token_id=2)

    def tokenizer(ids: list[int], template: str) -> Any:
        return SimpleNamespace(chat_template=template, convert_tokens_to_ids=lambda tokens: ids)

    fetch_smollm2._check_tokenizer(tokenizer([1, 2], "<|im_start|>"), config)
    for wrong in (tokenizer([1, 1], "<|im_start|>"), tokenizer([1, 2], "")):
        with pytest.raises(IntegrityError, match="ChatML"):
            fetch_smollm2._check_tokenizer(wrong, config)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "evaluate", None)
    with pytest.raises(ConfigError, match=r"The metric needs .*pip install 'hf-kvpolicy\[eval\]"):
        require("evaluate", "The metric")
