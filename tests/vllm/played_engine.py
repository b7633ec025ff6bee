"""vLLM's scheduler and our connector, with a model runner that is played by copies.

Everything above the model is vLLM's own: requests, prefix cache, preemption, load failures. The
"model" writes for each token a row that depends on all tokens before it, reads the rows of earlier
tokens as attention would, and samples a token that depends on them. Reads and writes are copies on
the current stream of the device. Nothing waits for them: what was read is compared at the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from worker_pools import config_of

from npu_kv_ops.integrations.vllm import NpuKVOffloadConnector

BLOCK = 16  # tokens
ROW = 32  # bytes of a token in each of K and V
SPEC = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float16)
LAYERS = ("l0", "l1")
WINDOW = 40  # tokens that the second layer of a hybrid model sees
SLIDING = SlidingWindowSpec(
    block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float16, sliding_window=WINDOW
)
BLOCK_BYTES = len(LAYERS) * SPEC.page_size_bytes
MAX_TOKENS = 256

init_none_hash(sha256)


def vllm_config(
    folder: Path,
    *,
    host_blocks: int = 64,
    policy: str = "recompute",
    prefix_caching: bool = True,
    extra: dict[str, Any] | None = None,
    max_batched_tokens: int = 96,
) -> VllmConfig:
    """A config of vLLM's, for a model that has no weights."""
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": 512,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": len(LAYERS),
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "max_position_embeddings": MAX_TOKENS,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
            }
        )
    )
    options = {"cpu_bytes_to_use": host_blocks * BLOCK_BYTES, **(extra or {})}
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float16", max_model_len=MAX_TOKENS
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=prefix_caching),
        scheduler_config=SchedulerConfig(
            max_num_seqs=6,
            max_num_batched_tokens=max_batched_tokens,
            max_model_len=MAX_TOKENS,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="NpuKVOffloadConnector",
            kv_connector_module_path="npu_kv_ops.integrations.vllm",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config=options,
        ),
        device_config=DeviceConfig("cpu"),
    )


def cache_config(num_blocks: int, *, hybrid: bool = False) -> KVCacheConfig:
    """Both layers in one group; or one in each of two, which share the memory and its blocks."""
    if hybrid:
        groups = [(LAYERS[:1], SPEC), (LAYERS[1:], SLIDING)]
        return config_of(num_blocks, groups, num_blocks * SPEC.page_size_bytes)
    return config_of(num_blocks, [(LAYERS, SPEC)], num_blocks * BLOCK_BYTES)


def prefix_hashes(tokens: Sequence[int]) -> np.ndarray:
    """For each token a number that depends on it and on all before it."""
    values, state = np.empty(len(tokens), np.uint64), 1469598103934665603
    for position, token in enumerate(tokens):
        state = (state ^ (token + 1)) * 1099511628211 % (1 << 64)
        values[position] = state ^ (state >> 29)
    return values


def rows(hashes: np.ndarray, tensor: int) -> torch.Tensor:
    """What the model keeps of tokens in one tensor: ``[tokens, ROW]`` bytes."""
    columns = np.arange(ROW, dtype=np.uint64)
    mixed = hashes[:, None] * (2 * (columns + np.uint64(ROW * tensor)) + np.uint64(1))
    return torch.from_numpy((mixed >> np.uint64(40)).astype(np.uint8).view(np.int8))


def sample(tokens: Sequence[int]) -> int:
    return int(prefix_hashes(tokens)[-1] >> np.uint64(17)) % 500


def completion(prompt: Sequence[int], length: int) -> list[int]:
    """What the model answers."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(sample(tokens))
    return tokens[len(prompt) :]


@dataclass
class _Read:
    what: str
    got: torch.Tensor
    wanted: torch.Tensor


class PlayedEngine:
    """An engine of one rank, stepped by the caller."""

    def __init__(
        self,
        config: VllmConfig,
        device: str,
        num_blocks: int = 24,
        connector: type[SimpleCPUOffloadConnector] = NpuKVOffloadConnector,
        hybrid: bool = False,
    ) -> None:
        self.device = torch.device(device)
        kv_config = cache_config(num_blocks, hybrid=hybrid)
        config.cache_config.num_gpu_blocks = num_blocks
        # The order of the real engine: first the worker and its caches, then the scheduler.
        self.rank = connector(config, KVConnectorRole.WORKER, kv_config)
        shape = (num_blocks, BLOCK, 2, 8)
        made = [
            tuple(torch.zeros(shape, dtype=torch.float16, device=device) for _ in "kv")
            for _ in (LAYERS[:1] if hybrid else LAYERS)
        ]
        self.rank.register_kv_caches(dict(zip(LAYERS, made * 2 if hybrid else made)))
        tensors = [t.view(torch.int8).view(num_blocks, BLOCK, ROW) for pair in made for t in pair]
        # By group; a group does not look back further than its window.
        self.kv = [tensors, tensors] if hybrid else [tensors]
        self.windows = [MAX_TOKENS, WINDOW][: len(self.kv)]
        config.kv_transfer_config.kv_connector = connector.__name__
        config.kv_transfer_config.kv_connector_module_path = connector.__module__
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        self.connector: SimpleCPUOffloadConnector = self.scheduler.connector
        if (handshake := self.rank.get_handshake_metadata()) is not None:
            self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})
        self.requests: dict[str, Request] = {}
        self.blocks: dict[str, list[list[int]]] = {}  # by group
        self.outputs: dict[str, list[int]] = {}
        self.errors: set[str] = set()
        self.steps = 0
        self.preemptions = 0
        self.totals: dict[str, Any] = {}
        self._reads: list[_Read] = []

    def add(self, name: str, prompt: Sequence[int], max_tokens: int) -> None:
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        self.requests[name] = request
        self.outputs[name] = []
        self.scheduler.add_request(request)

    def step(self) -> None:
        """Schedule, run the model, take in the results."""
        self.steps += 1
        out = self.scheduler.schedule()
        self.preemptions += len(out.preempted_req_ids or ())
        rank = self.rank
        rank.handle_preemptions(out.kv_connector_metadata)
        rank.bind_connector_metadata(out.kv_connector_metadata)
        sampled = self._forward(out)
        rank.start_load_kv(None)
        rank.wait_for_save()
        results = rank.get_transfer_results(out.finished_req_ids)
        connector_output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=rank.get_block_ids_with_load_errors(),
            kv_connector_stats=rank.get_kv_connector_stats(),
            kv_connector_worker_meta=rank.build_connector_worker_meta(),
        )
        rank.clear_connector_metadata()
        names = list(out.num_scheduled_tokens)
        model_output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=connector_output,
        )
        for outputs in self.scheduler.update_from_output(out, model_output).values():
            for output in outputs.outputs:
                self.outputs[output.request_id] += output.new_token_ids
                if output.finish_reason is not None and str(output.finish_reason) == "error":
                    self.errors.add(output.request_id)
            stats = outputs.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                self._add_stats(stats.kv_connector_stats)

    def run(self, until: Callable[[], bool] | None = None, most_steps: int = 20_000) -> None:
        """Step until ``until``, or until nothing is left to do, transfers included."""
        done = until or (lambda: not self.scheduler.has_requests())
        for _ in range(most_steps):
            if done():
                return
            self.step()
        raise AssertionError(f"not done after {most_steps} steps: {list(self.scheduler.requests)}")

    def check(self) -> None:
        """Compare everything that was read since the last call, byte by byte."""
        for read in self._reads:
            wrong = (read.got.cpu() != read.wanted).any(1).nonzero().flatten().tolist()
            assert not wrong, f"{read.what}: tokens {wrong} are wrong"
        assert self._reads
        self._reads.clear()

    def total(self, name: str, *labels: str) -> float:
        """Sum of a counter over all steps so far."""
        return self.totals.get((name, labels), 0)

    def shutdown(self) -> None:
        self.rank.shutdown()
        self.scheduler.shutdown()

    def _forward(self, out: Any) -> dict[str, list[int]]:
        groups = range(len(self.kv))
        for new in out.scheduled_new_reqs:
            self.blocks[new.req_id] = [list(blocks) for blocks in new.block_ids]
        cached = out.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in out.scheduled_new_reqs}
        for name, blocks, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens
        ):
            starts[name] = start
            fresh = [list(blocks[g]) if blocks is not None else [] for g in groups]
            if name not in cached.resumed_req_ids:
                fresh = [self.blocks[name][g] + fresh[g] for g in groups]
            self.blocks[name] = fresh
        sampled: dict[str, list[int]] = {}
        for name, count in out.num_scheduled_tokens.items():
            request = self.requests[name]
            tokens = list(request.all_token_ids)
            start, end = starts[name], starts[name] + count
            hashes = prefix_hashes(tokens[:end])
            for group in groups:
                self._read(name, group, hashes, start)
                self._write(name, group, hashes, start)
            sampled[name] = [sample(tokens)] if end == len(tokens) else []
        return sampled

    def _read(self, name: str, group: int, hashes: np.ndarray, end: int) -> None:
        """What attention at token ``end`` reads: the rows of the tokens before it."""
        begin = max(0, end + 1 - self.windows[group])
        blocks = self.blocks[name][group][begin // BLOCK : -(-end // BLOCK)]
        skipped = begin % BLOCK
        for tensor, kv in enumerate(self.kv[group] if begin < end else ()):
            got = torch.empty(len(blocks), BLOCK, ROW, dtype=torch.int8, device=self.device)
            for index, block in enumerate(blocks):
                got[index].copy_(kv[block], non_blocking=True)
            what = f"step {self.steps}, {name}, group {group}, tensor {tensor}, from {begin}"
            flat = got.view(-1, ROW)[skipped : skipped + end - begin]
            self._reads.append(_Read(what, flat, rows(hashes[begin:end], 2 * group + tensor)))

    def _write(self, name: str, group: int, hashes: np.ndarray, start: int) -> None:
        blocks = self.blocks[name][group]
        for tensor, kv in enumerate(self.kv[group]):
            values = rows(hashes[start:], 2 * group + tensor).to(self.device)
            position = start
            while position < len(hashes):
                block, offset = blocks[position // BLOCK], position % BLOCK
                count = min(BLOCK - offset, len(hashes) - position)
                piece = values[position - start : position - start + count]
                kv[block, offset : offset + count].copy_(piece, non_blocking=True)
                position += count

    def _add_stats(self, data: dict[str, Any]) -> None:
        for name, values in data["data"].items():
            for label, value in values.items():
                key = (name, tuple(label))
                if data["types"][name] == "counter":
                    self.totals[key] = self.totals.get(key, 0) + value
