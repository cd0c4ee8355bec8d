"""The command line: what it prints and how it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hf_kvpolicy as kv
from hf_kvpolicy.cli import app
from hf_kvpolicy.picture import save_picture
from hf_kvpolicy.trace import draw, paper, trace

RUN = CliRunner()


def test_list_names_every_policy_and_family() -> None:
    result = RUN.invoke(app, ["list"])
    assert result.exit_code == 0
    for name in (*kv.available_policies(), *kv.supported_model_types()):
        assert name in result.output
    assert "arXiv 2404.14469" in result.output


def test_lm_eval_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = RUN.invoke(app, ["lm-eval", "--help"])
    assert shown.exit_code == 0
    assert "--model kvpolicy" in " ".join(shown.output.split())
    monkeypatch.delitem(sys.modules, "hf_kvpolicy.eval.lm_eval_adapter", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    result = RUN.invoke(app, ["lm-eval", "run", "--help"])
    assert result.exit_code == 2
    assert "pip install 'hf-kvpolicy[lm-eval]'" in " ".join(result.output.split())


def test_papers_are_read_from_the_policy_files() -> None:
    assert paper("snapkv") == "arXiv 2404.14469"
    assert paper("full") == ""


@pytest.mark.parametrize("name", kv.available_policies())
def test_show_prints_source_options_and_a_drawing(name: str) -> None:
    result = RUN.invoke(app, ["show", name, "--budget", "10", "--prompt", "20", "--steps", "3"])
    assert result.exit_code == 0, result.output
    assert "Deviations:" in result.output
    assert "23 tokens" in result.output


def test_show_draws_what_the_policy_keeps() -> None:
    result = RUN.invoke(app, ["show", "streaming_llm", "--budget", "6", "--prompt", "12", "--steps", "1"])
    assert "████·······██" in result.output
    run = trace("sliding_window", budget=4, prompt_tokens=9, decode_tokens=2, options={})
    assert [row.positions for row in run.heads[0]] == [(5, 6, 7, 8), (6, 7, 8, 9), (7, 8, 9, 10)]
    assert "·····████    4 rows" in draw(run)


@pytest.mark.parametrize(
    ("policy", "sizes"), [("snapkv", (24, 8)), ("sliding_window", (1, 0)), ("h2o", (130, 40)), ("full", (3, 1))]
)
def test_show_draws_a_picture_of_what_it_prints(policy: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the eval extra is not installed")
    path = tmp_path / "new" / "kept.png"
    prompt, steps = sizes
    result = RUN.invoke(app, ["show", policy, "--prompt", str(prompt), "--steps", str(steps), "--png", str(path)])
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")
    assert f"written: {path}" in result.output
    assert f"{prompt + steps} tokens" in result.output


def test_the_picture_colours_exactly_the_kept_positions(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the eval extra is not installed")
    import matplotlib.image

    run = trace("sliding_window", budget=3, prompt_tokens=6, decode_tokens=0, options={})
    save_picture(run, tmp_path / "kept.png", "title")
    pixels = matplotlib.image.imread(tmp_path / "kept.png")[..., :3]
    blue = (abs(pixels - [0x1F / 255, 0x6F / 255, 0x9F / 255]) < 0.01).all(-1)
    panel = blue[round(blue.shape[0] * 0.35) :].any(0).nonzero()[0]
    assert panel.min() > 0.45 * blue.shape[1], "the older half of the positions was dropped"


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the eval extra is not installed")
    (tmp_path / "file").write_text("")
    result = RUN.invoke(app, ["show", "full", "--png", str(tmp_path / "file" / "kept.png")])
    assert result.exit_code == 2
    assert "cannot be written" in result.output


def test_a_picture_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = RUN.invoke(app, ["show", "snapkv", "--png", str(tmp_path / "kept.png")])
    assert result.exit_code == 2
    assert "pip install '.[eval]'" in " ".join(result.output.split())


@pytest.mark.parametrize("model", ["no/such/folder", "nobody/no-such-model"])
def test_a_model_that_cannot_be_loaded_is_one_line(model: str) -> None:
    result = RUN.invoke(app, ["generate", "--budget", "16", "--prompt", "a", "--model", model])
    assert result.exit_code == 2
    (line,) = [line for line in result.output.splitlines() if line.startswith("error:")]
    for words in (model, "--model", "scripts/fetch_model"):
        assert words in line
    assert "Traceback" not in result.output


def test_load_policy_of_a_bare_name_says_what_to_call() -> None:
    with pytest.raises(kv.ConfigError, match=r"make_cache\('snapkv', model, .*\{'policy': 'snapkv'"):
        kv.load_policy("snapkv")
    with pytest.raises(kv.ConfigError, match="cannot be read"):
        kv.load_policy("snapkv.yaml")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "snapvk"], "Did you mean 'snapkv'"),
        (["show", "nope"], "`kvpolicy list` says"),
        (["generate", "--prompt", "a", "--policy", "nope"], "`kvpolicy list` says"),
        (["show", "snapkv", "--set", "windwo=3"], "Did you mean 'window'"),
        (["show", "snapkv", "--set", "window"], "key=value"),
        (["show", "full", "--set", "block_rows=16"], "Give quantize too, or leave block_rows out."),
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


def test_the_installed_command_has_all_verbs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from hf_kvpolicy.cli import main; main()", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    for verb in ("list", "show", "generate", "calibrate", "eval"):
        assert verb in done.stdout


def test_every_policy_with_a_paper_is_listed_with_it() -> None:
    lines = RUN.invoke(app, ["list"]).output.splitlines()
    found = {line.split()[0]: line for line in lines if line and not line.startswith("model families")}
    for name, number in (("adakv", "2407.11550"), ("zigzagkv", "2412.09036"), ("snapkv", "2404.14469")):
        assert f"arXiv {number}" in found[name]


def test_show_says_what_it_drew_with() -> None:
    text = RUN.invoke(app, ["show", "adakv"]).output
    assert "window = 32" in text, "the default"
    assert "drawn with budget=12, window=4" in text


def test_a_missing_budget_is_told_before_a_model_is_loaded() -> None:
    result = RUN.invoke(app, ["generate", "--prompt", "x", "--model", "nobody/no-such-model"])
    assert result.exit_code == 2
    assert "needs budget" in result.output


def test_an_option_that_says_nothing_is_told_before_a_model_is_loaded() -> None:
    options = ["--budget", "16", "--set", "block_rows=16", "--model", "nobody/no-such-model"]
    result = RUN.invoke(app, ["generate", "--prompt", "x", *options])
    assert result.exit_code == 2
    assert "block_rows=16 says how many rows are quantized together, but no row is" in result.output
