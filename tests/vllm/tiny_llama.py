"""A Llama checkpoint small enough for two cores, whose output depends on every block of its cache.

vLLM's own dummy weights are of a scale at which attention hardly matters: with them the tokens stay
the same when the KV cache is filled with zeros, and equal tokens prove nothing.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

VOCABULARY = 512
LAYERS = 4
HIDDEN = 128
HEADS = 2
KV_HEADS = 2
HEAD_DIM = HIDDEN // HEADS
INTERMEDIATE = 256
MAX_TOKENS = 1024
BLOCK_TOKENS = 32
"""The smallest block that vLLM's CPU attention takes."""
BLOCK_BYTES = LAYERS * KV_HEADS * BLOCK_TOKENS * 2 * HEAD_DIM * 4
"""What one block of all layers takes in float32."""


def word(token: int) -> str:
    """Return the text of a token, which the tokenizer of the checkpoint takes apart again."""
    return f"t{token}"


def prompt(seed: int, length: int) -> list[int]:
    """Return a prompt of ``length`` tokens; prompts of different seeds share no prefix."""
    chooser = random.Random(seed)
    return [chooser.randrange(3, VOCABULARY) for _ in range(length)]


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Write configuration, weights (normal, float32) and tokenizer; return ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    _write_weights(folder / "model.safetensors", seed)
    _write_tokenizer(folder)
    return folder


def _write_weights(file: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 0.1) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    query, key_value = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    weights = {
        "model.embed_tokens.weight": normal(VOCABULARY, HIDDEN, scale=1.0),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": normal(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": torch.ones(HIDDEN),
            prefix + "post_attention_layernorm.weight": torch.ones(HIDDEN),
            prefix + "self_attn.q_proj.weight": normal(query, HIDDEN),
            prefix + "self_attn.k_proj.weight": normal(key_value, HIDDEN),
            prefix + "self_attn.v_proj.weight": normal(key_value, HIDDEN),
            prefix + "self_attn.o_proj.weight": normal(HIDDEN, query),
            prefix + "mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN),
            prefix + "mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN),
            prefix + "mlp.down_proj.weight": normal(HIDDEN, INTERMEDIATE),
        }
    save_file(weights, file, metadata={"format": "pt"})


def _write_tokenizer(folder: Path) -> None:
    vocabulary = {word(token): token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=word(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": word(0),
        "bos_token": word(1),
        "eos_token": word(2),
        "model_max_length": MAX_TOKENS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
