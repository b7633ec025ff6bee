"""How many bytes a KV block of a model has, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DTYPE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}

_ALIGNMENT = 8
"""Payloads are whole 64-bit words, the unit in which contents are written and checked."""


@dataclass(frozen=True)
class KVTensor:
    """One KV-cache tensor of every layer: its name and its elements a token."""

    name: str
    elements_per_token: int


@dataclass(frozen=True)
class KVModel:
    """The KV cache of a model: `layers` layers with the same tensors of one dtype."""

    name: str
    layers: int
    tensors: tuple[KVTensor, ...]
    dtype: str

    def payload_bytes(self, tensor: KVTensor, block_tokens: int, shrink: int = 1) -> int:
        """Bytes that a block of `tensor` has in one layer, divided by `shrink`.

        Rounded up to whole 64-bit words, so every tensor keeps at least one.
        """
        full = tensor.elements_per_token * DTYPE_BYTES[self.dtype] * block_tokens
        unit = shrink * _ALIGNMENT
        return -(-full // unit) * _ALIGNMENT

    def block_bytes(self, block_tokens: int, shrink: int = 1) -> int:
        """Bytes that a block has over all layers and tensors."""
        return self.layers * sum(
            self.payload_bytes(tensor, block_tokens, shrink) for tensor in self.tensors
        )

    @property
    def tensor_count(self) -> int:
        """KV-cache tensors over all layers."""
        return self.layers * len(self.tensors)


def _attention(kv_heads: int, head_dim: int) -> tuple[KVTensor, ...]:
    return (KVTensor("key", kv_heads * head_dim), KVTensor("value", kv_heads * head_dim))


def _mla(latent: int, rope: int) -> tuple[KVTensor, ...]:
    return (KVTensor("latent", latent), KVTensor("rope", rope))


PRESETS: Mapping[str, KVModel] = {
    model.name: model
    for model in (
        KVModel("llama-3.1-8b", 32, _attention(8, 128), "bfloat16"),
        KVModel("llama-3.1-70b", 80, _attention(8, 128), "bfloat16"),
        KVModel("qwen3-32b", 64, _attention(8, 128), "bfloat16"),
        KVModel("deepseek-v3", 61, _mla(512, 64), "bfloat16"),
    )
}


class ModelError(ValueError):
    """A model that is neither a preset nor a config.json we understand."""


def _positive(config: Mapping[str, Any], key: str, where: str) -> int:
    if config.get(key) is None:
        raise ModelError(f"{where}: no '{key}'")
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{where}: '{key}' is {value!r}, it must be a positive integer")
    return value


def model_from_config(config: Mapping[str, Any], name: str) -> KVModel:
    """The KV cache that a Hugging Face `config.json` describes.

    Reads `num_hidden_layers`; for multi-head latent attention `kv_lora_rank` and
    `qk_rope_head_dim`; else `num_key_value_heads` (or `num_attention_heads`) and `head_dim` (or
    `hidden_size` divided by the heads); and `torch_dtype` or `dtype`. Models that keep the language
    model's settings under `text_config` work too.

    Raises:
        ModelError: a key is missing or makes no sense; names it.
    """
    text = config.get("text_config")
    if "num_hidden_layers" not in config and isinstance(text, Mapping):
        config = {**config, **text}
    layers = _positive(config, "num_hidden_layers", name)
    if config.get("kv_lora_rank") is not None:
        tensors = _mla(
            _positive(config, "kv_lora_rank", name), _positive(config, "qk_rope_head_dim", name)
        )
    else:
        heads_key = (
            "num_attention_heads"
            if config.get("num_key_value_heads") is None
            else "num_key_value_heads"
        )
        kv_heads = _positive(config, heads_key, name)
        if config.get("head_dim") is not None:
            head_dim = _positive(config, "head_dim", name)
        else:
            hidden = _positive(config, "hidden_size", name)
            heads = _positive(config, "num_attention_heads", name)
            if hidden % heads:
                raise ModelError(
                    f"{name}: 'hidden_size' {hidden} is not a multiple of "
                    f"'num_attention_heads' {heads}, and there is no 'head_dim'"
                )
            head_dim = hidden // heads
        tensors = _attention(kv_heads, head_dim)
    dtype = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    if not isinstance(dtype, str) or dtype.removeprefix("torch.") not in DTYPE_BYTES:
        known = ", ".join(sorted(DTYPE_BYTES))
        raise ModelError(f"{name}: 'torch_dtype' is {dtype!r}, it must be one of {known}")
    return KVModel(name, layers, tensors, dtype.removeprefix("torch."))


def load_model(text: str) -> KVModel:
    """A preset by its name, or the model of a `config.json` (or of a folder that holds one).

    Raises:
        ModelError: neither; lists the presets.
    """
    if text in PRESETS:
        return PRESETS[text]
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ModelError(
            f"'{text}' is neither a file nor one of the presets {', '.join(sorted(PRESETS))}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: not a JSON object but {type(config).__name__}")
    return model_from_config(config, str(path))
