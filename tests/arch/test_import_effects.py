"""`import hf_kvpolicy` registers `kvpolicy*` and does nothing else to the process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PROBE = """
import json, random, sys
import numpy, torch, transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
import transformers.cache_utils, transformers.generation.utils, transformers.masking_utils, transformers.modeling_utils

made = []
original = torch.nn.Module.__init__
def counted(self, *args, **kwargs):
    made.append(type(self).__name__)
    original(self, *args, **kwargs)

def registries():
    return {
        "attention": {name: id(ALL_ATTENTION_FUNCTIONS[name]) for name in ALL_ATTENTION_FUNCTIONS},
        "mask": {name: id(ALL_MASK_ATTENTION_FUNCTIONS[name]) for name in ALL_MASK_ATTENTION_FUNCTIONS},
    }

def functions():
    modules = [transformers.cache_utils, transformers.generation.utils, transformers.masking_utils,
               transformers.modeling_utils, torch.nn.functional]
    found = {}
    for module in modules:
        for name, thing in vars(module).items():
            if callable(thing) and not name.startswith("__"):
                found[module.__name__ + "." + name] = id(thing)
            if isinstance(thing, type):
                for attribute, member in vars(thing).items():
                    if callable(member) or isinstance(member, property | classmethod | staticmethod):
                        found[module.__name__ + "." + name + "." + attribute] = id(member)
    return found

def torch_state():
    return {
        "threads": torch.get_num_threads(), "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()), "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "sdp": [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled(),
                torch.backends.cuda.math_sdp_enabled()],
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "rng": hash(torch.get_rng_state().numpy().tobytes()),
        "random": hash(random.getstate()), "numpy": hash(numpy.random.get_state()[1].tobytes()),
        "cuda": torch.cuda.is_initialized(),
        "verbosity": transformers.logging.get_verbosity(),
    }

before = registries(), functions(), torch_state()
torch.nn.Module.__init__ = counted
import hf_kvpolicy
torch.nn.Module.__init__ = original
after = registries(), functions(), torch_state()
changed = [name for name, value in before[1].items() if after[1].get(name) != value]
print(json.dumps({
    "before": before[0], "after": after[0], "functions": len(before[1]), "changed": changed,
    "state_before": before[2], "state_after": after[2], "made": made,
    "models": [name for name in sys.modules if name.startswith("transformers.models.llama.modeling")],
    "network": [name for name in sys.modules if name in ("hf_kvpolicy.eval", "datasets", "evaluate", "matplotlib")],
}))
"""


@pytest.fixture(scope="module")
def effects() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["attention", "mask"])
def test_only_our_names_are_added(effects: dict[str, Any], kind: str) -> None:
    before, after = effects["before"][kind], effects["after"][kind]
    assert {name: after.get(name) for name in before} == before, "an entry of transformers was replaced"
    added = set(after) - set(before)
    assert added
    assert all(name.startswith("kvpolicy") and "flash" not in name for name in added)
    assert added == set(effects["after"]["attention"]) - set(effects["before"]["attention"])


def test_no_function_is_replaced(effects: dict[str, Any]) -> None:
    assert effects["functions"] > 100
    assert effects["changed"] == []


def test_process_state_is_untouched(effects: dict[str, Any]) -> None:
    assert effects["state_after"] == effects["state_before"]


def test_importing_takes_no_model_and_no_harness(effects: dict[str, Any]) -> None:
    assert effects["made"] == []
    assert effects["models"] == []
    assert effects["network"] == []


def test_importing_is_silent() -> None:
    """Nothing is printed and nothing deprecated is used."""
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:hf_kvpolicy", "-c", "import hf_kvpolicy"],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
