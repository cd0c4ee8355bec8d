"""The `kvpolicy` command: list, show, generate, calibrate, eval, lm-eval."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import ConfigError, KVPolicyError

__all__ = ["app", "main"]

app = typer.Typer(
    help="KV-cache policies for Hugging Face transformers.", no_args_is_help=True, pretty_exceptions_enable=False
)


@app.command("list")
def list_policies() -> None:
    """List policies with their paper, and the supported model families."""
    from .registry import available_policies, supported_model_types
    from .trace import headline, paper

    names = available_policies()
    width, papers = max(len(name) for name in names), {name: paper(name) for name in names}
    paper_width = max(len(identifier) for identifier in papers.values())
    for name in names:
        typer.echo(f"{name:<{width}}  {papers[name] or '-':<{paper_width}}  {headline(name)}")
    typer.echo(f"\nmodel families: {', '.join(supported_model_types())}")


@app.command()
def show(
    policy: Annotated[str, typer.Argument(help="Name of a policy, as `kvpolicy list` prints it.")],
    budget: Annotated[int, typer.Option(min=1, help="Rows per KV head in the drawing.")] = 12,
    prompt: Annotated[int, typer.Option(min=1, help="Prompt tokens in the drawing.")] = 24,
    steps: Annotated[int, typer.Option(min=0, help="Decoded tokens in the drawing.")] = 8,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Policy option, such as window=4.")] = None,
    png: Annotated[Path | None, typer.Option(help="Also draw it as a picture, into this PNG file.")] = None,
) -> None:
    """Show a policy's source, options and defaults, and draw which positions it keeps on a small trace."""
    with _errors_as_exit_code():
        from .picture import save_picture
        from .trace import describe, draw, trace

        _check_policy(policy)
        if png is not None:
            from .eval.extras import require

            require("matplotlib", "The picture of `kvpolicy show --png`")
        run = trace(policy, budget=budget, prompt_tokens=prompt, decode_tokens=steps, options=_options(set_))
        typer.echo(describe(policy))
        typer.echo(draw(run))
        if png is not None:
            save_picture(run, png, title=f"{policy}, {prompt} prompt tokens and {steps} decoded")
            typer.echo(f"\nwritten: {png}")


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    model: Annotated[str, typer.Option(help="Hub name or folder.")] = "smollm2-135m-instruct",
    policy: Annotated[str, typer.Option(help="Name of a policy.")] = "snapkv",
    budget: Annotated[str | None, typer.Option(help='Rows, share of the prompt, or bytes: 512, 0.25, "64MiB".')] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Policy option, such as window=16.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    chat: Annotated[bool, typer.Option(help="Use the model's chat template when it has one.")] = True,
) -> None:
    """Generate with a policy cache, streaming the text; then print what the cache holds."""
    with _errors_as_exit_code():
        text = _prompt(prompt, prompt_file)
        from transformers import TextStreamer

        from .compat import cache_argument
        from .config import load_policy, make_cache, with_tokenizer
        from .eval.model_loading import load_for_command

        _check_policy(policy)
        # A wrong option or a missing budget is told before a model is loaded.
        load_policy({"policy": policy, **_options(set_), **({} if budget is None else {"budget": _value(budget)})})
        loaded = load_for_command(model, dtype, device)
        tokenizer = loaded.tokenizer
        options = with_tokenizer(policy, _options(set_), tokenizer)
        cache = make_cache(policy, loaded.model, _value(budget), **options)
        if chat and getattr(tokenizer, "chat_template", None):
            message = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False).to(device)
        else:
            inputs = tokenizer(text, return_tensors="pt").to(device)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        arguments: dict[str, Any] = {**inputs, cache_argument(): cache, "streamer": streamer}
        loaded.model.generate(**arguments, max_new_tokens=max_new_tokens, do_sample=False, use_cache=True)
        typer.echo(f"\n{cache!r}\n{cache.ledger()}", err=True)


@app.command()
def calibrate(
    policy: Annotated[str, typer.Argument(help="headkv or zigzagkv.")],
    out: Annotated[Path, typer.Option(help="The profile to write, a JSON file.")],
    model: Annotated[str, typer.Option(help="Hub name or folder.")] = "smollm2-135m-instruct",
    data: Annotated[str, typer.Option(help="Text around the needles: a file, a folder, pydoc or noise.")] = "pydoc",
    probe: Annotated[str, typer.Option(help="What a head of headkv earns by: reasoning or retrieval.")] = "reasoning",
    length: Annotated[list[int] | None, typer.Option(min=1, help="Tokens of a prompt, repeatable.")] = None,
    examples: Annotated[int, typer.Option(min=1, help="Prompts per length, a multiple of 5.")] = 10,
    distractors: Annotated[int, typer.Option(min=0, help="Needles with other keys in each text.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of keys, values and places.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
) -> None:
    """Measure a checkpoint once and write its profile: head importances (headkv), rows that layers need (zigzagkv)."""
    with _errors_as_exit_code():
        from .eval.calibration import CALIBRATIONS, Plan
        from .eval.model_loading import load_for_command
        from .eval.tasks.haystack import load_haystack
        from .profiles import save_profile

        if policy not in CALIBRATIONS:
            raise ConfigError(f"{policy!r} needs no profile; {' and '.join(CALIBRATIONS)} can be calibrated.")
        plan = Plan(probe=probe, examples=examples, distractors=distractors, seed=seed, **_lengths(length))
        haystack = load_haystack(data)
        loaded = load_for_command(model, dtype, device)
        profile = CALIBRATIONS[policy](loaded, haystack, plan, say=typer.echo)
        save_profile(profile, out)
        typer.echo(f"written: {out}")


@app.command(
    "lm-eval",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="ARGUMENTS OF LM_EVAL",
)
def lm_eval(context: typer.Context) -> None:
    """Run lm_eval's own command, with the model kvpolicy known to it. Everything behind lm-eval is lm_eval's.

    For example: run --model kvpolicy --model_args pretrained=MODEL policy=snapkv budget=512 --tasks TASK
    --include_path FOLDER --use_cache FILE --output_path FOLDER --batch_size 4 --device cuda --limit 10.
    `kvpolicy lm-eval run --help` prints lm_eval's options.
    """
    if context.args in ([], ["--help"]):
        typer.echo(context.get_help())
        return
    with _errors_as_exit_code():
        from .eval.lm_eval_adapter import run_command

        run_command(context.args)


def main() -> None:
    """Run the command line; `eval` is mounted here, so that the library itself never imports the harness."""
    from .eval.cli import app as evaluation

    app.add_typer(evaluation, name="eval")
    app()


@contextmanager
def _errors_as_exit_code() -> Iterator[None]:
    try:
        yield
    except KVPolicyError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


def _check_policy(name: str) -> None:
    """Refuse an unknown policy before anything is loaded, and say where to look."""
    from .registry import available_policies, policy_class

    if name in available_policies():
        return
    try:
        policy_class(name)
    except ConfigError as error:
        raise ConfigError(f"{error} `kvpolicy list` says what each keeps, `kvpolicy show snapkv` draws one.") from error


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise ConfigError("Give exactly one of --prompt and --prompt-file.")
    if prompt_file is None:
        return prompt or ""
    try:
        return prompt_file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The prompt file {str(prompt_file)!r} cannot be read: {error}.") from error


def _lengths(lengths: list[int] | None) -> dict[str, Any]:
    return {"lengths": tuple(lengths)} if lengths else {}


def _options(pairs: list[str] | None) -> dict[str, Any]:
    """Read `key=value` pairs; values are YAML, so that numbers, lists and null mean what they look like."""
    options: dict[str, Any] = {}
    for pair in pairs or []:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set {pair!r} is not of the form key=value, such as window=16.")
        options[key] = _value(value)
    return options


def _value(text: str | None) -> Any:
    import yaml

    return None if text is None else yaml.safe_load(text)
