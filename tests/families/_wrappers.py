"""Tiny random models that put images before a text decoder, and prompts with one image a row."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers
from helpers import TINY_DECODER, WINDOW_TOKENS, left_padded, prompt
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

IMAGE = 95
_START, _END, _VIDEO = 92, 93, 94
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_QWEN_VISION: dict[str, Any] = {"depth": 1, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 1}
_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": _VIDEO,
    "vision_start_token_id": _START,
    "vision_end_token_id": _END,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
# The four patches of an image between the marks around it.
_MARKED = (_START, *[IMAGE] * 4, _END)


@dataclass(frozen=True)
class Wrapper:
    """How to make a tiny model, and what stands for an image in its prompts."""

    text: dict[str, Any]
    vision: dict[str, Any]
    options: dict[str, Any]
    placeholders: tuple[int, ...] = (IMAGE,) * 4
    # Pixels of one image; Qwen's come as flat patches of two frames or one.
    pixels: tuple[int, ...] = (3, 8, 8)
    # Whether a row of pixels is one image of several, or its patches follow those of the others.
    stacked: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def has_axes(self) -> bool:
        """Whether positions have three axes (M-RoPE)."""
        return not self.stacked


def _qwen(text: dict[str, Any], vision: dict[str, Any]) -> Wrapper:
    options, frames = {**_QWEN_IDS}, vision.get("temporal_patch_size", 2)
    return Wrapper(text, {**_QWEN_VISION, **vision}, options, _MARKED, pixels=(4, 3 * frames * 16), stacked=False)


WRAPPERS: dict[str, Wrapper] = {
    "llava": Wrapper(
        {"model_type": "llama"},
        {"model_type": "clip_vision_model", "projection_dim": 16},
        {"image_token_index": IMAGE, "vision_feature_select_strategy": "full", "vision_feature_layer": -1},
        placeholders=(IMAGE,) * 5,
    ),
    "idefics3": Wrapper({"model_type": "llama"}, {}, {"image_token_id": IMAGE, "scale_factor": 1}, pixels=(1, 3, 8, 8)),
    "smolvlm": Wrapper({"model_type": "llama"}, {}, {"image_token_id": IMAGE, "scale_factor": 1}, pixels=(1, 3, 8, 8)),
    "mistral3": Wrapper(
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "pixtral"},
        {"image_token_index": IMAGE, "vision_feature_layer": -1, "spatial_merge_size": 1},
        extra={"image_sizes": [8, 8]},
    ),
    "internvl": Wrapper(
        {"model_type": "qwen2"},
        {"image_size": [8, 8], "patch_size": [4, 4]},
        {"image_token_id": IMAGE, "downsample_ratio": 1.0, "vision_feature_layer": -1},
    ),
    "llama4_images": Wrapper(
        {
            "head_dim": 12,
            "attention_chunk_size": WINDOW_TOKENS,
            "no_rope_layers": [1, 0, 1, 0],
            "floor_scale": 4,
            "attn_scale": 0.5,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
        {
            "intermediate_size": 16,
            "pixel_shuffle_ratio": 1.0,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
            "vision_output_dim": 16,
        },
        {"image_token_index": IMAGE, "boi_token_index": _START, "eoi_token_index": _END},
    ),
    # Tokens of an image see one another, in full layers and within sliding windows.
    "gemma3_images": Wrapper(
        {
            "head_dim": 12,
            "sliding_window": WINDOW_TOKENS,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 6,
        },
        {"model_type": "siglip_vision_model"},
        {
            "image_token_index": IMAGE,
            "boi_token_index": _START,
            "eoi_token_index": _END,
            "mm_tokens_per_image": 4,
        },
    ),
    "qwen2_vl": _qwen({"rope_parameters": _MROPE}, {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}),
    "qwen2_5_vl": _qwen(
        {"rope_parameters": _MROPE},
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "out_hidden_size": 32,
            "window_size": 8,
            "fullatt_block_indexes": [0],
        },
    ),
    "qwen3_vl": _qwen(
        {"rope_parameters": {**_MROPE, "mrope_section": [3, 2, 1]}, "head_dim": 12},
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    ),
    "qwen3_5_images": _qwen(
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
        },
        {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "temporal_patch_size": 1},
    ),
}


@lru_cache(maxsize=32)
def _master(name: str, backend: str) -> Any:
    wrapper, kind = WRAPPERS[name], name.removesuffix("_images")
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind} models")
    vision = dict(wrapper.vision) if not wrapper.stacked else {**_VISION, **wrapper.vision}
    config = CONFIG_MAPPING[kind](
        text_config={**TINY_DECODER, **copy.deepcopy(wrapper.text)}, vision_config=vision, **wrapper.options
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(3)
    try:
        model: Any = AutoModelForImageTextToText.from_config(config, attn_implementation=backend)
    finally:
        torch.random.set_rng_state(state)
    for parameter, weight in model.named_parameters():
        if parameter.endswith("mm_input_projection_weight"):  # zeros, under which no image would matter
            torch.nn.init.normal_(weight.detach(), std=0.2, generator=torch.Generator().manual_seed(0))
    model.generation_config.eos_token_id = None
    _require_runs(model.eval(), name)
    return model


@torch.no_grad()
def _require_runs(model: Any, name: str) -> None:
    """Skip a model that transformers itself cannot run (5.24: Llama 4 returns what its decoder does not have)."""
    try:
        model(prompt(3))
    except AttributeError as error:
        pytest.skip(f"transformers {transformers.__version__} does not run {name}: {error}")


def tiny_wrapper(name: str, backend: str = "sdpa") -> Any:
    """Return a fresh, unattached tiny random model with its vision tower."""
    with torch.inference_mode(False), torch.enable_grad():
        return copy.deepcopy(_master(name, backend))


def with_images(
    name: str, lengths: Sequence[int], seed: int = 0, before: int | None = 2
) -> tuple[Tensor, dict[str, Any]]:
    """Return a left-padded batch of prompts of so many tokens, each with one image after so many words (None: all)."""
    wrapper, rows = WRAPPERS[name], []
    placeholders = torch.tensor([wrapper.placeholders])
    for row, length in enumerate(lengths):
        words = prompt(length - len(wrapper.placeholders), seed=seed + row) % 90 + 2
        at = words.shape[1] if before is None else before
        rows.append(torch.cat([words[:, :at], placeholders, words[:, at:]], dim=1))
    ids, mask = left_padded(rows)
    noise = torch.Generator().manual_seed(seed)
    pixels = torch.randn((len(rows), *wrapper.pixels), generator=noise)
    given: dict[str, Any] = {"pixel_values": pixels, "attention_mask": mask}
    if not wrapper.stacked:
        given["pixel_values"] = pixels.flatten(0, 1)
        given["image_grid_thw"] = torch.tensor([[1, 2, 2]] * len(rows))
        given["mm_token_type_ids"] = (ids == IMAGE).long()
    if name == "gemma3_images":
        given["token_type_ids"] = (ids == IMAGE).long()
    for key, value in wrapper.extra.items():
        given[key] = torch.tensor([value] * len(rows))
    return ids, given
