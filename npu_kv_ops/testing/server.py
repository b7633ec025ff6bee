"""A server in miniature: requests share a pool of blocks that may be too small for all of them.

Requests take turns. Before a turn, those that hold blocks and are not on turn give them up where
room is needed: their blocks move to a host pool and come back later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from npu_kv_ops import block_views, host_mirror, swap_blocks_batch
from npu_kv_ops.testing.decoder import DecoderConfig, PagedDecoder, Step, StepInputs

__all__ = ["BlockSwap", "Request", "Server"]


@dataclass
class Request:
    """A prompt and what has become of it.

    Attributes:
        prompt: its tokens; at least one.
        generated: tokens so far.
        logits: of each generated token, ``[vocabulary]`` on the CPU.
        blocks: ids in the device pool; empty when it has none there.
        host_blocks: ids in the host pool while it is swapped out.
    """

    prompt: Sequence[int]
    generated: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)

    @property
    def stored(self) -> int:
        """Tokens whose keys and values are in the cache."""
        return len(self.prompt) + len(self.generated) - 1 if self.generated else 0


class BlockSwap:
    """Moves blocks between a decoder's cache and a host pool with ``swap_blocks_batch``.

    Args:
        decoder: the owner of the device pool.
        host_blocks: size of the host pool.
    """

    def __init__(self, decoder: PagedDecoder, host_blocks: int) -> None:
        num_blocks = next(iter(decoder.kv_caches.values()))[0].shape[0]
        views = block_views(decoder.kv_caches, num_blocks)
        self.device = list(views.values())
        self.host = list(host_mirror(views, host_blocks).values())
        self.free = list(range(host_blocks))
        self.blocks_out = 0
        self.blocks_in = 0

    def out(self, blocks: Sequence[int]) -> list[int]:
        """Copy device blocks to free host blocks and return those, in order.

        Raises:
            MemoryError: the host pool has too few free blocks.
        """
        taken = self._take(len(blocks))
        self._copy(self.device, self.host, blocks, taken)
        self.blocks_out += len(blocks)
        return taken

    def back(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy host blocks to device blocks and free them."""
        self._copy(self.host, self.device, host_blocks, blocks)
        self.free += host_blocks
        self.blocks_in += len(blocks)

    def flush(self) -> None:
        """Have all moves on their way that were asked for; nothing here, where none waits."""

    def _take(self, count: int) -> list[int]:
        if count > len(self.free):
            raise MemoryError(f"{len(self.free)} host blocks are free, {count} are needed")
        return [self.free.pop() for _ in range(count)]

    @staticmethod
    def _copy(
        src: Sequence[torch.Tensor],
        dst: Sequence[torch.Tensor],
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
    ) -> None:
        swap_blocks_batch(src, dst, torch.tensor(src_blocks), torch.tensor(dst_blocks))


class Server:
    """Generates greedily for many requests over one pool. Not thread-safe.

    Block 0 is never given to a request: padding rows write there.

    Args:
        decoder: the model.
        batch: requests that decode together; a decode step always has this many rows.
        step: computes a decode step, default the decoder itself.
        swap: where blocks go when the pool is too small; without it such a pool is an error.
        after_swap_in: called with the device blocks that have just come back.
    """

    def __init__(
        self,
        decoder: PagedDecoder,
        *,
        batch: int,
        step: Step | None = None,
        swap: BlockSwap | None = None,
        after_swap_in: Callable[[list[int]], None] | None = None,
    ) -> None:
        self.decoder = decoder
        self.config: DecoderConfig = decoder.config
        self.batch = batch
        self.step: Step = decoder if step is None else step
        self.swap = swap
        self.after_swap_in = after_swap_in
        keys = next(iter(decoder.kv_caches.values()))[0]
        self.device = keys.device
        self.free = list(range(1, keys.shape[0]))
        self._holders: list[Request] = []  # the one that waits longest for its turn comes last

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], tokens: int, *, turn: int = 4) -> None:
        """Generate ``tokens`` more tokens for each request, ``turn`` of them at a time.

        Raises:
            ValueError: a sequence gets longer than the decoder's longest.
            MemoryError: the blocks of one turn do not fit in the pool, or those of the others not
                in the host pool.
        """
        for request in requests:
            length = len(request.prompt) + len(request.generated) + tokens
            if not request.prompt or length > self.config.max_tokens:
                raise ValueError(
                    f"a prompt of {len(request.prompt)} tokens that grows to {length}; allowed are "
                    f"1 to {self.config.max_tokens}"
                )
        goal = {id(request): len(request.generated) + tokens for request in requests}
        while waiting := [r for r in requests if len(r.generated) < goal[id(r)]]:
            waiting.sort(key=lambda request: len(request.generated))
            group = waiting[: self.batch]
            self._make_resident(group, turn)
            stop = {id(r): min(len(r.generated) + turn, goal[id(r)]) for r in group}
            for request in group:
                if not request.generated:
                    self._prefill(request)
            while active := [r for r in group if len(r.generated) < stop[id(r)]]:
                self._decode(active)

    def release(self, requests: Iterable[Request]) -> None:
        """Free the blocks of finished requests."""
        for request in requests:
            self.free += request.blocks
            if self.swap is not None:
                self.swap.free += request.host_blocks
            request.blocks, request.host_blocks = [], []
            self._holders = [holder for holder in self._holders if holder is not request]

    def _make_resident(self, group: Sequence[Request], turn: int) -> None:
        self._holders = [holder for holder in self._holders if holder not in group]
        for request in group:
            tokens = min(
                len(request.prompt) + len(request.generated) + turn, self.config.max_tokens
            )
            needed = -(-tokens // self.config.block_tokens) - len(request.blocks)
            while needed > len(self.free):
                self._evict(needed)
            taken = [self.free.pop() for _ in range(max(needed, 0))]
            if request.host_blocks and self.swap is not None:
                returning = taken[: len(request.host_blocks)]
                self.swap.back(request.host_blocks, returning)
                request.host_blocks = []
                if self.after_swap_in is not None:
                    self.after_swap_in(returning)
            request.blocks += taken
        self._holders += group

    def _evict(self, needed: int) -> None:
        if self.swap is None or not self._holders:
            raise MemoryError(f"{len(self.free)} blocks are free, {needed} are needed")
        request = self._holders.pop()
        kept = -(-request.stored // self.config.block_tokens)
        request.host_blocks = self.swap.out(request.blocks[:kept])
        self.free += request.blocks
        request.blocks = []

    def _prefill(self, request: Request) -> None:
        if self.swap is not None:
            self.swap.flush()
        length = len(request.prompt)
        inputs = self._inputs([request] * length, request.prompt, range(length))
        logits, tokens = self.decoder(*inputs)
        request.logits.append(logits[length - 1].cpu())
        request.generated.append(int(tokens[length - 1]))

    def _decode(self, active: Sequence[Request]) -> None:
        rows = [request.generated[-1] for request in active]
        inputs = self._inputs(active, rows, [request.stored for request in active])
        logits, tokens = self.step(*inputs)
        for request, row, token in zip(active, logits.cpu(), tokens.tolist()):
            request.logits.append(row.clone())
            request.generated.append(token)

    def _inputs(
        self, requests: Sequence[Request], tokens: Sequence[int], positions: Iterable[int]
    ) -> StepInputs:
        """One row a request, padded to the batch with rows that write to block 0."""
        size, blocks, offsets, tables = self.config.block_tokens, [], [], []
        places = list(positions)
        for request, place in zip(requests, places):
            blocks.append(request.blocks[place // size])
            offsets.append(place % size)
            unused = self.config.max_blocks - len(request.blocks)
            tables.append(request.blocks[: self.config.max_blocks] + [0] * unused)
        padding = max(self.batch - len(tables), 0)
        columns = (
            [*tokens, *[0] * padding],
            [*places, *[0] * padding],
            [*blocks, *[0] * padding],
            [*offsets, *range(padding)],
            [*tables, *[[0] * self.config.max_blocks] * padding],
        )
        return StepInputs(*(torch.tensor(column).to(self.device) for column in columns))
