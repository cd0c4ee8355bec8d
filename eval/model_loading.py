"""Where models of an evaluation come from, and how they are loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..contract.replacement import declared_training
from ..errors import ConfigError, KVPolicyError, did_you_mean
from ..geometry import text_config

__all__ = [
    "DTYPES",
    "SMOLLM2_NAME",
    "LoadedModel",
    "check_path",
    "load_for_command",
    "load_model",
    "smollm2_directory",
    "source_of",
    "trained_policy",
]

SMOLLM2_NAME = "smollm2-135m-instruct"
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in eval mode with its tokenizer; `source` is the folder or hub name it came from."""

    name: str
    source: str
    model: Any
    tokenizer: Any

    @property
    def trained_policy(self) -> str | None:
        """As `trained_policy` of its model."""
        return trained_policy(self.model)


def trained_policy(model: Any) -> str | None:
    """The policy that a checkpoint was trained for, whose rows no other one may read; None for an ordinary checkpoint.

    Raises:
        CheckpointAdmissionError: the config declares a training that this library does not know.
    """
    declared = declared_training(text_config(model.config))
    return None if declared is None else str(declared[1]["kind"])


def smollm2_directory() -> Path:
    """Folder of the converted SmolLM2-135M-Instruct: under `$KVPOLICY_CACHE`, else `~/.cache/hf_kvpolicy`."""
    root = os.environ.get("KVPOLICY_CACHE") or Path.home() / ".cache" / "hf_kvpolicy"
    return Path(root) / SMOLLM2_NAME


def load_model(name_or_path: str, dtype: str = "auto", device: str = "cpu") -> LoadedModel:
    """Load a causal language model and its tokenizer.

    Args:
        name_or_path: `"smollm2-135m-instruct"` (fetched before by `scripts/fetch_model`), a folder, or a hub
            name.
        dtype: `"auto"`, `"float32"`, `"bfloat16"` or `"float16"`.
        device: a torch device such as `"cpu"` or `"cuda:0"`.

    Raises:
        ConfigError: unknown dtype, or the SmolLM2 folder does not exist yet.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"Model dtype {dtype!r} is not one of {', '.join(DTYPES)}.{did_you_mean(dtype, DTYPES)}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = source_of(name_or_path)
    torch_dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch_dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(source)
    return LoadedModel(name=name_or_path, source=source, model=model, tokenizer=tokenizer)


def load_for_command(name: str, dtype: str, device: str) -> LoadedModel:
    """Load a model for a command, whose user can act on a name and not on a traceback.

    Raises:
        ConfigError: there is no such model, or it cannot be reached or read.
    """
    try:
        return load_model(name, dtype=dtype, device=device)
    except KVPolicyError:
        raise
    except (OSError, ValueError) as error:  # what transformers raises for a missing, unreachable or foreign model
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ConfigError(
            f"The model {name!r} cannot be loaded: {reason}. Give --model a folder, or the name of a hub model that "
            "this machine can reach; scripts/fetch_model fetches the default model and prints its folder."
        ) from error


def source_of(name_or_path: str) -> str:
    """The folder or hub name that a model is loaded from.

    Raises:
        ConfigError: it is a path, or the default model's folder, and does not exist.
    """
    check_path(name_or_path)
    if name_or_path != SMOLLM2_NAME:
        return name_or_path
    directory = smollm2_directory()
    if not directory.is_dir():
        raise ConfigError(
            f"The model {SMOLLM2_NAME!r} is looked up in {directory}, which does not exist. "
            "Run scripts/fetch_model once, or name another model with --model."
        )
    return str(directory)


def check_path(name_or_path: str) -> None:
    """Refuse what can only be a path and leads to no folder: a hub name has one slash at most, and none in front.

    Raises:
        ConfigError: there is no such folder.
    """
    is_path = name_or_path.startswith(("/", "./", "../", "~")) or name_or_path.count("/") > 1
    if is_path and not Path(name_or_path).is_dir():
        raise ConfigError(
            f"The model {name_or_path!r} cannot be loaded: there is no such folder. Give --model a model's folder "
            "(scripts/fetch_model prints that of SmolLM2-135M-Instruct), or the name of a hub model."
        )
