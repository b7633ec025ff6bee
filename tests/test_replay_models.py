import json
from pathlib import Path
from typing import Any

import pytest

from npu_kv_ops.replay.models import PRESETS, KVModel, KVTensor, ModelError, load_model
from npu_kv_ops.replay.sizing import GIB, Memory, Sizes, SizingError, choose_sizes
from npu_kv_ops.replay.trace import BlockMap, Request

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("name", "tensors", "block_bytes"),
    [
        ("llama-3.1-8b", 64, 16 * MIB),  # 2 x 32 x 8 x 128 x 2 B x 128 tokens
        ("llama-3.1-70b", 160, 40 * MIB),
        ("qwen3-32b", 128, 32 * MIB),
        ("deepseek-v3", 122, 61 * 144 * KIB),  # (512 + 64) x 2 B x 128 tokens = 144 KiB a layer
    ],
)
def test_presets(name: str, tensors: int, block_bytes: int) -> None:
    model = load_model(name)
    assert model.tensor_count == tensors
    assert model.block_bytes(128) == block_bytes
    assert model.block_bytes(16) == block_bytes // 8


LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}


def write(folder: Path, config: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    ("config", "same_as"),
    [(LLAMA, "llama-3.1-8b"), (DEEPSEEK, "deepseek-v3"), ({"text_config": LLAMA}, "llama-3.1-8b")],
)
def test_a_config_says_the_same_as_the_preset(
    tmp_path: Path, config: dict[str, Any], same_as: str
) -> None:
    model, preset = load_model(write(tmp_path, config)), PRESETS[same_as]
    assert (model.layers, model.tensors, model.dtype) == (
        preset.layers,
        preset.tensors,
        preset.dtype,
    )
    assert load_model(str(tmp_path)) == model


@pytest.mark.parametrize(
    ("changes", "bytes_a_token_and_layer"),
    [
        ({}, 2 * 8 * 128 * 2),
        ({"head_dim": 64}, 2 * 8 * 64 * 2),
        ({"num_key_value_heads": None}, 2 * 32 * 128 * 2),
        ({"torch_dtype": "float32"}, 2 * 8 * 128 * 4),
        ({"torch_dtype": "torch.float16"}, 2 * 8 * 128 * 2),
        ({"torch_dtype": None, "dtype": "float8_e4m3fn"}, 2 * 8 * 128),
        ({"torch_dtype": None}, 2 * 8 * 128 * 2),
    ],
)
def test_config_keys(tmp_path: Path, changes: dict[str, Any], bytes_a_token_and_layer: int) -> None:
    model = load_model(write(tmp_path, {**LLAMA, **changes}))
    assert model.block_bytes(16) == 16 * 32 * bytes_a_token_and_layer


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": None}, "no 'num_hidden_layers'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ({"num_hidden_layers": True}, "'num_hidden_layers' is True"),
        ({"num_key_value_heads": "8"}, "'num_key_value_heads' is '8'"),
        ({"num_key_value_heads": None, "num_attention_heads": None}, "no 'num_attention_heads'"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"hidden_size": 4097}, "'hidden_size' 4097 is not a multiple"),
        ({"kv_lora_rank": 512}, "no 'qk_rope_head_dim'"),
        ({"torch_dtype": "int4"}, "'torch_dtype' is 'int4', it must be one of bfloat16"),
    ],
)
def test_configs_that_make_no_sense(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        load_model(write(tmp_path, {**LLAMA, **changes}))


def test_files_that_are_no_configs(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a JSON object but list"):
        load_model(write(tmp_path, [1]))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(str(tmp_path))
    with pytest.raises(ModelError, match=r"'gpt-9' is neither .* llama-3\.1-8b"):
        load_model("gpt-9")


@pytest.mark.parametrize("shrink", [1, 2, 3, 7, 128, 10**9])
def test_shrinking_keeps_every_tensor_in_whole_words(shrink: int) -> None:
    model = KVModel("m", 3, (KVTensor("key", 96), KVTensor("scale", 1)), "bfloat16")
    for tensor in model.tensors:
        payload = model.payload_bytes(tensor, 128, shrink)
        exact = tensor.elements_per_token * 2 * 128 / shrink
        assert payload % 8 == 0
        assert exact <= payload < exact + 8


# ------------------------------------------------------------------------------------------ sizes

BLOCKS = BlockMap(128)
MODEL = PRESETS["llama-3.1-8b"]


def sizes_for(requests: list[Request], memory: Memory, **given: int) -> Sizes:
    needs = [BLOCKS.need(request) for request in requests]
    return choose_sizes(MODEL, 128, requests, needs, memory, **given)


def prompts(count: int, hash_blocks: int) -> list[Request]:
    return [
        Request(i + 1, 0, hash_blocks * 512, 0, tuple(range(i * 1000, i * 1000 + hash_blocks)))
        for i in range(count)
    ]


PLENTY = Memory(host=1 << 50, device=1 << 50, device_is_host=False)


def test_pools_are_chosen_from_the_requests() -> None:
    sizes = sizes_for(prompts(100, 20), PLENTY)
    assert sizes.device_blocks >= 2 * 80
    assert 4 * sizes.device_blocks <= sizes.host_blocks <= 8 * sizes.device_blocks
    assert sizes.chosen == ("device_blocks", "host_blocks", "shrink")
    few = sizes_for(prompts(2, 20), PLENTY)
    assert few.host_blocks == 4 * few.device_blocks


@pytest.mark.parametrize(
    "memory",
    [
        Memory(host=8 * GIB, device=1 << 50, device_is_host=False),
        Memory(host=1 << 50, device=1 * GIB, device_is_host=False),
        Memory(host=2 * GIB, device=1 << 50, device_is_host=True),
    ],
)
def test_blocks_shrink_no_further_than_memory_demands(memory: Memory) -> None:
    requests = prompts(3, 20)
    sizes = sizes_for(requests, memory)

    def host_bytes(shrink: int) -> float:
        block = MODEL.block_bytes(128, shrink)
        device = sizes.device_blocks * block
        return sizes.host_blocks * block + (device if memory.device_is_host else 0)

    assert sizes.shrink & (sizes.shrink - 1) == 0
    assert host_bytes(sizes.shrink) + sizes.staging_bytes <= memory.host / 2
    assert sizes.device_bytes <= memory.device / 2
    assert sizes.device_bytes + sizes.host_bytes <= 3 * GIB
    half = sizes.shrink // 2
    device_half = sizes.device_blocks * MODEL.block_bytes(128, half)
    assert (
        host_bytes(half) + sizes.staging_bytes > memory.host / 2
        or device_half > memory.device / 2
        or (sizes.device_blocks + sizes.host_blocks) * MODEL.block_bytes(128, half) > 3 * GIB
    )


def test_long_traces_shrink_blocks_even_where_memory_is_plenty() -> None:
    short, long = sizes_for(prompts(10, 20), PLENTY), sizes_for(prompts(3000, 20), PLENTY)
    assert long.shrink > short.shrink
    assert 3000 * 80 * long.block_bytes <= 16 * GIB


def test_a_request_larger_than_the_device_pool_is_refused_with_its_line() -> None:
    requests = [*prompts(3, 2), Request(77, 0, 512 * 5, 1, tuple(range(5)))]
    with pytest.raises(SizingError, match=r"1 of 4 .* line 77, needs 21: use --device-blocks 21"):
        sizes_for(requests, PLENTY, device_blocks=20)
    assert sizes_for(requests, PLENTY, device_blocks=21).device_blocks == 21


def test_a_given_shrink_that_does_not_fit_is_refused() -> None:
    memory = Memory(host=1 * GIB, device=1 << 50, device_is_host=False)
    with pytest.raises(SizingError, match=r"free on the host: 1073741824: raise --shrink"):
        sizes_for(prompts(3, 20), memory, shrink=1)
    memory = Memory(host=1 << 50, device=1 * GIB, device_is_host=False)
    with pytest.raises(SizingError, match=r"free on the device: 1073741824: raise --shrink"):
        sizes_for(prompts(3, 20), memory, shrink=1)


def test_pools_that_fit_at_no_size_are_refused() -> None:
    memory = Memory(host=1 << 20, device=1 << 50, device_is_host=False)
    with pytest.raises(SizingError, match="lower --device-blocks or --host-blocks"):
        sizes_for(prompts(3, 20), memory)
