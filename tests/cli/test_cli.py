"""The command line: what it prints and how it fails."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import hf_kvpolicy as kv
from hf_kvpolicy.cli import app
from hf_kvpolicy.trace import trace

RUN = CliRunner()


def test_list_names_every_policy_and_family() -> None:
    result = RUN.invoke(app, ["list"])
    assert result.exit_code == 0
    for name in (*kv.available_policies(), *kv.supported_model_types()):
        assert name in result.output


@pytest.mark.parametrize("name", kv.available_policies())
def test_show_prints_source_options_and_a_drawing(name: str) -> None:
    result = RUN.invoke(app, ["show", name, "--budget", "10", "--prompt", "20", "--steps", "3"])
    assert result.exit_code == 0, result.output
    assert "Deviations:" in result.output
    assert "23 tokens" in result.output


def test_show_draws_what_the_policy_keeps() -> None:
    result = RUN.invoke(app, ["show", "streaming_llm", "--budget", "6", "--prompt", "12", "--steps", "1"])
    assert "████·······██" in result.output
    heads = trace("sliding_window", budget=4, prompt_tokens=9, decode_tokens=2, options={})
    assert [row.positions for row in heads[0]] == [(5, 6, 7, 8), (6, 7, 8, 9), (7, 8, 9, 10)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "snapvk"], "Did you mean 'snapkv'"),
        (["show", "snapkv", "--set", "windwo=3"], "Did you mean 'window'"),
        (["show", "snapkv", "--set", "window"], "key=value"),
        (["show", "snapkv", "--set", "window=50"], "budget"),
        (["generate"], "exactly one of"),
        (["generate", "--prompt", "a", "--prompt-file", "b"], "exactly one of"),
        (["generate", "--prompt-file", "no/such/file"], "cannot be read"),
    ],
)
def test_refusals_are_one_line_and_status_2(arguments: list[str], words: str) -> None:
    result = RUN.invoke(app, arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output


def test_the_installed_command_has_all_four_verbs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from hf_kvpolicy.cli import main; main()", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    for verb in ("list", "show", "generate", "eval"):
        assert verb in done.stdout
