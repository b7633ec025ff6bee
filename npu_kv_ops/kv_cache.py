"""Block views over the KV caches of a model runner, and their page-locked host mirrors.

:func:`block_views` turns whatever a model runner registers (one tensor a layer, a tuple of K and V,
a list of Mamba states, packed or stacked layouts, ...) into plain ``int8`` views of shape
``[num_blocks, payload_bytes]`` that :func:`npu_kv_ops.swap_blocks_batch` can copy.
:func:`host_mirror` makes the host side of them. ``docs/kv-cache.md`` lists the layouts.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

import torch

from npu_kv_ops.pinned_memory import empty_pinned, host_mirror

__all__ = ["KVCache", "PageBytes", "block_views", "empty_pinned", "host_mirror"]

KVCache = torch.Tensor | Sequence[torch.Tensor]
"""What a model runner registers for one layer: a tensor, or a tuple or list of tensors."""

PageBytes = int | Mapping[str, int | Sequence[int] | None]
"""Bytes of one manager block: for every layer, or by layer name, or by name and component."""

# torch_npu formats whose bytes lie as shape and strides say (NCHW, NHWC, ND, NDHWC, NCDHW); others
# are tiled, with blocks of another size than the shape tells.
_PLAIN_NPU_FORMATS = frozenset({-1, 0, 1, 2, 27, 30})
_MAX_COMBINATIONS = 4096


def block_views(
    kv_caches: Mapping[str, KVCache],
    num_blocks: int,
    page_bytes: PageBytes | None = None,
) -> dict[str, torch.Tensor]:
    """Views every byte of every block of ``kv_caches`` exactly once, without copying.

    Args:
        kv_caches: layer name -> tensor, or tuple or list of tensors (K and V, latent and rope,
            Mamba states, indexer keys and scales, ...), on CPU or NPU. Data is never read.
        num_blocks: blocks the cache manager hands out ids for, at least 1. Taken from the manager,
            never from a shape: a tensor may hold more blocks, or finer ones.
        page_bytes: bytes of one manager block. An int holds for every layer; a mapping gives
            each layer an int (all its tensors together), a sequence (one int a tensor, or for a
            single stacked tensor one int a plane) or None. Needed where a tensor has several
            times ``num_blocks`` kernel blocks, and checked wherever it is given.

    Returns:
        View name -> ``int8`` tensor ``[num_blocks, payload_bytes]``, ``stride(1) == 1``,
        ``stride(0) >= payload_bytes``, in the order of ``kv_caches``, sharing storage with it.
        A view is named for its layer when it holds all of the layer's bytes, else ``layer.i`` for
        tensor i of a tuple, ``layer.j`` for plane j of a single tensor, ``layer.i.j`` for plane j
        of tensor i. Where pieces of several layers touch inside every block they become one view,
        named for the first of them.

    Raises:
        TypeError: a cache that is no tensor or sequence of tensors; arguments of another type.
        ValueError: a cache that cannot be viewed so, or that does not hold ``page_bytes``; the
            message names layer, component, shape, strides and reason.

    With ``num_blocks <= 2`` a tensor of shape ``(2, 2, ...)`` could be two blocks or two planes of
    two blocks: it is read as two blocks, unless ``page_bytes`` gives the layer two sizes. Shape
    ``(2, 1, ...)`` with one block is read as two planes, which covers the same bytes either way.

    Thread-safe; keeps no state. Contract of the layouts: vLLM 0.32 ``KVCacheTensor`` placement and
    the caches vLLM-Ascend's model runner registers.
    """
    _check_count("num_blocks", num_blocks)
    if not isinstance(kv_caches, Mapping):
        raise TypeError(f"kv_caches must map layer names to caches, got {type(kv_caches).__name__}")
    if isinstance(page_bytes, Mapping):
        unknown = [name for name in page_bytes if name not in kv_caches]
        if unknown:
            raise ValueError(f"page_bytes names layers that kv_caches does not have: {unknown}")
    elif page_bytes is not None:
        _check_count("page_bytes", page_bytes)

    pieces: list[_Piece] = []
    for order, (name, cache) in enumerate(kv_caches.items()):
        page = page_bytes.get(name) if isinstance(page_bytes, Mapping) else page_bytes
        parts = _parts(name, cache)
        for part, reading in zip(parts, _choose(parts, num_blocks, page), strict=True):
            single = len(parts) == 1
            for plane, runs in enumerate(reading.planes):
                suffix = [] if single else [part.index]
                suffix += [plane] if len(reading.planes) > 1 else []
                owner = _Owner(name, (order, part.index, plane), tuple(suffix), part)
                pieces += [_Piece(owner, run, reading.ratio) for run in runs]

    regions = _merge(_fold(pieces, num_blocks), num_blocks)
    _refuse_shared_bytes(regions, num_blocks)
    _refuse_split_payloads(regions)
    _check_coverage(pieces, regions, num_blocks)
    return _name(regions, num_blocks)


# --------------------------------------------------------------------------- what is in a layer


@dataclass(frozen=True, eq=False)
class _Part:
    """One tensor of one layer."""

    layer: str
    index: int
    tensor: torch.Tensor

    def __str__(self) -> str:
        return (
            f"layer {self.layer!r}, component {self.index}: shape {tuple(self.tensor.shape)}, "
            f"strides {tuple(self.tensor.stride())}, {self.tensor.dtype}"
        )


def _parts(layer: str, cache: KVCache) -> list[_Part]:
    tensors: object = [cache] if isinstance(cache, torch.Tensor) else cache
    if not isinstance(tensors, Sequence) or isinstance(tensors, (str, bytes)):
        raise TypeError(
            f"layer {layer!r}: expected a tensor or a sequence of tensors, "
            f"got {type(cache).__name__}"
        )
    if len(tensors) == 0:
        raise ValueError(f"layer {layer!r}: the sequence of tensors is empty")
    parts = []
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"layer {layer!r}, component {index}: expected a tensor, "
                f"got {type(tensor).__name__}"
            )
        part = _Part(layer, index, tensor)
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise ValueError(f"{part}: only strided tensors with memory have block views")
        if tensor.dim() == 0 or tensor.numel() == 0:
            raise ValueError(f"{part}: holds no blocks")
        if tensor.device.type == "npu":
            number = sys.modules["torch_npu"].get_npu_format(tensor)
            if number not in _PLAIN_NPU_FORMATS:
                raise ValueError(f"{part}: NPU format {number} is tiled; cast the cache to ND")
        parts.append(part)
    return parts


# ------------------------------------------------------------------ how a tensor lies in memory


@dataclass(frozen=True)
class _Run:
    """Contiguous bytes of every kernel block: ``address + k * stride``, ``payload`` bytes each."""

    address: int
    stride: int
    payload: int


@dataclass(frozen=True)
class _Reading:
    """One way to read a tensor: where its blocks are, and how many make a manager block.

    A plane is what lies outside the block dimension (K or V of a stacked tensor, a head of a
    head-outermost one); a plane has several runs where other layers lie between its bytes.
    """

    block_dim: int
    ratio: int
    planes: tuple[tuple[_Run, ...], ...]

    @property
    def runs(self) -> Iterator[_Run]:
        return (run for plane in self.planes for run in plane)


def _read(part: _Part, block_dim: int, ratio: int) -> _Reading:
    """Raises ValueError where the blocks of dimension ``block_dim`` do not lie apart."""
    tensor = part.tensor
    element = tensor.element_size()
    count = tensor.shape[block_dim]
    dims = [
        (stride * element, size, dim)
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if size > 1 and dim != block_dim
    ]
    if any(stride == 0 for stride, _, _ in dims):
        raise ValueError(f"{part}: expanded (stride 0), so bytes appear more than once")

    payload = element
    outer = []
    for stride, size, dim in sorted(dims):
        # Leading dimensions never join a run: planes stay planes even where one block makes them
        # neighbours.
        if stride == payload and dim > block_dim:
            payload *= size
        else:
            outer.append((stride, size))

    block_stride = tensor.stride(block_dim) * element
    if count == 1:  # torch gives a dimension of size 1 any stride it likes
        block_stride = max(block_stride, payload)
    inside = [(stride, size) for stride, size in outer if stride < block_stride]
    outside = [(stride, size) for stride, size in outer if stride >= block_stride]
    extent = payload + sum(stride * (size - 1) for stride, size in inside)
    if count > 1 and extent > block_stride:
        raise ValueError(
            f"{part}: a block spans {extent} bytes but the next one starts after {block_stride}, "
            "so blocks overlap"
        )
    if outside and block_dim == 0 and payload == element:
        raise ValueError(
            f"{part}: the payload of a block is not contiguous (no two of its elements touch)"
        )

    inside_offsets = _offsets(inside)
    planes = tuple(
        tuple(
            _Run(tensor.data_ptr() + plane + offset, block_stride, payload)
            for offset in inside_offsets
        )
        for plane in _offsets(outside)
    )
    return _Reading(block_dim, ratio, planes)


def _offsets(dims: Sequence[tuple[int, int]]) -> list[int]:
    """Byte offsets of every index of ``(stride, size)`` dimensions, ascending."""
    return sorted(
        sum(offsets) for offsets in product(*([s * i for i in range(n)] for s, n in dims))
    )


# ------------------------------------------------------- which of several readings is meant


def _choose(
    parts: Sequence[_Part], num_blocks: int, page: int | Sequence[int] | None
) -> list[_Reading]:
    """The reading of each tensor of one layer."""
    if page is None:
        return [_read_without_page(part, num_blocks) for part in parts]
    layer = parts[0].layer
    if isinstance(page, Sequence):
        for size in page:
            _check_count(f"page_bytes[{layer!r}]", size)
        if len(page) == len(parts):
            return [
                _choose_by_page([part], num_blocks, size)[0]
                for part, size in zip(parts, page, strict=True)
            ]
        if len(parts) == 1:
            return [_choose_by_planes(parts[0], num_blocks, page)]
        raise ValueError(
            f"page_bytes[{layer!r}] has {len(page)} sizes, but the layer has {len(parts)} tensors"
        )
    _check_count(f"page_bytes[{layer!r}]", page)
    return _choose_by_page(parts, num_blocks, page)


def _read_without_page(part: _Part, num_blocks: int) -> _Reading:
    shape = part.tensor.shape
    if shape[0] == num_blocks:
        return _read(part, 0, 1)
    if _is_stacked(part) and shape[1] == num_blocks:
        return _read(part, 1, 1)
    if shape[0] < num_blocks:
        raise _too_few(part, num_blocks)
    if shape[0] % num_blocks == 0:
        raise ValueError(
            f"{part}: {shape[0]} blocks could be {num_blocks} manager blocks of "
            f"{shape[0] // num_blocks} kernel blocks each, or {num_blocks} blocks and spare ones; "
            "pass page_bytes"
        )
    return _read(part, 0, 1)


def _too_few(part: _Part, num_blocks: int) -> ValueError:
    text = f"{part}: fewer blocks than the {num_blocks} asked for; allowed are (blocks, ...)"
    text += ", (2, blocks, ...), and with page_bytes any (planes, blocks, ...)"
    return ValueError(text)


def _is_stacked(part: _Part) -> bool:
    return part.tensor.dim() > 1 and part.tensor.shape[0] == 2


def _choose_by_page(parts: Sequence[_Part], num_blocks: int, page: int) -> list[_Reading]:
    """The readings under which a manager block of all ``parts`` together has ``page`` bytes."""
    options = [_options(part, num_blocks) for part in parts]
    # Tensors of one layer are mostly split alike: look for one answer that fits them all first.
    for block_dim, exact in ((0, True), (1, True), (0, False), (1, False)):
        alike = [[r for r in readings if r.block_dim == block_dim] for readings in options]
        if not all(alike):
            continue
        counts = [part.tensor.shape[block_dim] for part in parts]
        if exact and any(count != num_blocks for count in counts):
            continue
        if exact and block_dim == 1 and not all(_is_stacked(part) for part in parts):
            continue
        single = [readings[0] for readings in alike]
        # Kernel blocks whose payloads add up to the page are better evidence than single blocks
        # whose padded stride happens to be the page.
        payload = _payload(single)
        ratios = [page // payload, 1] if page % payload == 0 else [1]
        for ratio in ratios:
            found = [_Reading(block_dim, ratio, reading.planes) for reading in single]
            if min(counts) >= ratio * num_blocks and _has_page(found, page):
                return found
    if prod(len(readings) for readings in options) <= _MAX_COMBINATIONS:
        fitting = [found for found in product(*options) if _has_page(found, page)]
        if len(fitting) == 1:
            return list(fitting[0])
        if len(fitting) > 1:
            raise ValueError(
                f"{_list(parts)}: {page} page_bytes fit more than one way of splitting the "
                "tensors into blocks; pass one size a tensor"
            )
    raise ValueError(
        f"{_list(parts)}: a block of {page} page_bytes is not what {num_blocks} blocks of these "
        f"tensors hold (found: {_describe(options)})"
    )


def _choose_by_planes(part: _Part, num_blocks: int, sizes: Sequence[int]) -> _Reading:
    for option in _options(part, num_blocks):
        if len(option.planes) != len(sizes):
            continue
        for ratio in dict.fromkeys([part.tensor.shape[option.block_dim] // num_blocks, 1]):
            planes = [_Reading(option.block_dim, ratio, (plane,)) for plane in option.planes]
            if all(_has_page([p], size) for p, size in zip(planes, sizes, strict=True)):
                return _Reading(option.block_dim, ratio, option.planes)
    raise ValueError(
        f"{part}: page_bytes gives {len(sizes)} sizes {list(sizes)}, but the tensor does not have "
        f"{len(sizes)} planes of {num_blocks} blocks of these sizes"
    )


def _options(part: _Part, num_blocks: int) -> list[_Reading]:
    """Every reading of ``part`` that holds ``num_blocks`` blocks, the most natural first."""
    found: list[_Reading] = []
    reason: ValueError | None = None
    for block_dim in range(min(2, part.tensor.dim())):
        count = part.tensor.shape[block_dim]
        if count < num_blocks:
            continue
        try:
            found.append(_read(part, block_dim, 1))
        except ValueError as error:
            reason = reason or error
            continue
        if count > num_blocks and count % num_blocks == 0:
            found.append(_Reading(block_dim, count // num_blocks, found[-1].planes))
    if not found:
        raise reason or _too_few(part, num_blocks)
    return found


def _has_page(readings: Sequence[_Reading], page: int) -> bool:
    """True when one manager block of all ``readings`` has ``page`` bytes, padding in or out."""
    if _payload(readings) == page:
        return True
    # With padding: planes inside one page share its stride, others have a page each.
    planes = sorted(
        (min(run.address for run in plane), plane[0].stride, reading.ratio)
        for reading in readings
        for plane in reading.planes
    )
    pages: dict[tuple[int, int], list[int]] = defaultdict(list)
    for start, stride, ratio in planes:
        starts = pages[stride, ratio]
        if not starts or start >= starts[-1] + stride:
            starts.append(start)
    return sum(stride * ratio * len(starts) for (stride, ratio), starts in pages.items()) == page


def _payload(readings: Sequence[_Reading]) -> int:
    """Bytes of one manager block, those that several tensors share counted once."""
    by_ratio: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for reading in readings:
        for run in reading.runs:
            by_ratio[reading.ratio].append((run.address, run.address + run.payload))
    return sum(ratio * _length(_union(spans)) for ratio, spans in by_ratio.items())


def _list(parts: Sequence[_Part]) -> str:
    return "; ".join(str(part) for part in parts)


def _describe(options: Sequence[Sequence[_Reading]]) -> str:
    return "; ".join(
        f"component {index}: "
        + " or ".join(dict.fromkeys(f"{_payload([reading])} bytes" for reading in readings))
        for index, readings in enumerate(options)
    )


# ------------------------------------------------------------ from tensors to regions of blocks


@dataclass(frozen=True, eq=False)
class _Owner:
    """A plane of a tensor of a layer; what a view is named for."""

    layer: str
    order: tuple[int, int, int]
    suffix: tuple[int, ...]
    part: _Part


@dataclass(frozen=True, eq=False)
class _Piece:
    owner: _Owner
    run: _Run
    ratio: int


@dataclass(eq=False)
class _Region:
    """``num_blocks`` times ``payload`` contiguous bytes at ``address + block * stride``."""

    device: torch.device
    storage: torch.UntypedStorage
    address: int
    stride: int
    payload: int
    owners: list[_Owner] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.address + self.payload

    @property
    def first(self) -> _Owner:
        return min(self.owners, key=lambda owner: owner.order)

    def span(self, num_blocks: int) -> tuple[int, int]:
        return self.address, self.address + (num_blocks - 1) * self.stride + self.payload


def _fold(pieces: Iterable[_Piece], num_blocks: int) -> list[_Region]:
    """Puts the kernel blocks of each manager block together."""
    regions = []
    padded: dict[int, list[_Region]] = defaultdict(list)
    for piece in pieces:
        tensor = piece.owner.part.tensor
        run, ratio = piece.run, piece.ratio
        region = _Region(
            tensor.device,
            tensor.untyped_storage(),
            run.address,
            run.stride,
            run.payload,
            [piece.owner],
        )
        if ratio == 1 or run.stride == run.payload:
            regions.append(_widen(region, ratio))
        else:
            padded[ratio].append(region)
    # Kernel blocks with other tensors between them: contiguous only together with those.
    for ratio, group in padded.items():
        for region in _merge(group, ratio * num_blocks):
            if region.payload != region.stride:
                raise ValueError(
                    f"{region.first.part}: {ratio} kernel blocks make a manager block, but they "
                    f"are not contiguous: {region.payload} bytes every {region.stride}"
                )
            regions.append(_widen(region, ratio))
    return regions


def _widen(region: _Region, ratio: int) -> _Region:
    region.stride *= ratio
    region.payload *= ratio
    return region


def _merge(regions: Iterable[_Region], num_blocks: int) -> list[_Region]:
    """Joins regions that overlap or touch inside every block, and lists equal ones once."""
    equal: dict[tuple[torch.device, int, int, int], _Region] = {}
    for region in regions:
        key = (region.device, region.address, region.stride, region.payload)
        if key in equal:
            equal[key].owners += region.owners
        else:
            equal[key] = region

    alike: dict[tuple[torch.device, int, int], list[_Region]] = defaultdict(list)
    for region in equal.values():
        alike[region.device, region.storage.data_ptr(), region.stride].append(region)

    merged: list[_Region] = []
    for group in alike.values():
        group.sort(key=lambda region: (region.address, -region.payload))
        first = last = None  # of the regions whose block 0 lies in the same stretch of one stride
        for region in group:
            if first is None or last is None or region.address >= first.address + first.stride:
                first = last = region
                merged.append(region)
            elif num_blocks > 1 and region.end > first.address + first.stride:
                raise _shares_bytes(first, region)
            elif region.address > last.end:
                last = region
                merged.append(region)
            else:
                last.payload = max(region.end, last.end) - last.address
                last.owners += region.owners
    return merged


def _shares_bytes(one: _Region, other: _Region) -> ValueError:
    return ValueError(
        f"different blocks share bytes: {one.first.part} ({one.payload} bytes every {one.stride}) "
        f"and {other.first.part} ({other.payload} bytes every {other.stride}); copying a block of "
        "one would overwrite another block of the other"
    )


def _refuse_shared_bytes(regions: Sequence[_Region], num_blocks: int) -> None:
    by_device: dict[torch.device, list[_Region]] = defaultdict(list)
    for region in regions:
        by_device[region.device].append(region)
    for group in by_device.values():
        group.sort(key=lambda region: region.address)
        reach = 0
        touching: list[_Region] = []
        for region in group:
            start, end = region.span(num_blocks)
            if start >= reach:
                touching = []
            for other in touching:
                if other.span(num_blocks)[1] > start and _overlap(other, region, num_blocks):
                    raise _shares_bytes(other, region)
            touching.append(region)
            reach = max(reach, end)


def _overlap(one: _Region, other: _Region, num_blocks: int) -> bool:
    """True when any block of ``one`` has a byte of any block of ``other``."""
    if one.stride == other.stride:
        # Blocks i and i + k of the two are k strides apart; only two k bring them close.
        nearest = (one.address - other.address) // one.stride
        return any(
            one.address < other.end + k * one.stride and other.address + k * one.stride < one.end
            for k in (nearest, nearest + 1)
        )
    i = j = 0
    while i < num_blocks and j < num_blocks:
        start, begin = one.address + i * one.stride, other.address + j * other.stride
        if start < begin + other.payload and begin < start + one.payload:
            return True
        if start + one.payload <= begin:
            i += 1
        else:
            j += 1
    return False


def _refuse_split_payloads(regions: Sequence[_Region]) -> None:
    """A plane whose bytes of one block are in several regions has gaps nothing else fills."""
    home: dict[tuple[int, int, int], _Region] = {}
    for region in regions:
        for owner in region.owners:
            if home.setdefault(owner.order, region) is not region:
                raise ValueError(
                    f"{owner.part}: the payload of a block is not contiguous (gaps that no other "
                    "layer fills)"
                )


def _check_coverage(pieces: Sequence[_Piece], regions: Sequence[_Region], num_blocks: int) -> None:
    """Compares, for the first and the last block, the bytes of the tensors and of the views."""
    for block in {0, num_blocks - 1}:
        wanted: dict[torch.device, list[tuple[int, int]]] = defaultdict(list)
        for piece in pieces:
            run, ratio = piece.run, piece.ratio
            start = run.address + block * ratio * run.stride
            steps = [(0, ratio * run.payload)] if run.stride == run.payload else []
            steps = steps or [(k * run.stride, run.payload) for k in range(ratio)]
            wanted[piece.owner.part.tensor.device] += [
                (start + step, start + step + size) for step, size in steps
            ]
        listed: dict[torch.device, list[tuple[int, int]]] = defaultdict(list)
        for region in regions:
            start = region.address + block * region.stride
            listed[region.device].append((start, start + region.payload))
        for device, spans in wanted.items():
            union = _union(listed[device])
            if union != _union(spans) or _length(union) != _length(listed[device]):
                raise ValueError(
                    f"the views of block {block} on {device} do not hold the bytes of the caches "
                    f"exactly once ({_length(listed[device])} bytes viewed, "
                    f"{_length(_union(spans))} in the caches)"
                )


def _union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted disjoint spans; touching ones are joined."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _length(spans: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in spans)


# ------------------------------------------------------------------------------ names and views


def _name(regions: Sequence[_Region], num_blocks: int) -> dict[str, torch.Tensor]:
    homes: dict[str, set[int]] = defaultdict(set)
    for region in regions:
        for owner in region.owners:
            homes[owner.layer].add(id(region))
    views: dict[str, torch.Tensor] = {}
    for region in sorted(regions, key=lambda region: region.first.order):
        owner = region.first
        name = owner.layer
        if len(homes[owner.layer]) > 1:
            name = ".".join([name, *(str(index) for index in owner.suffix)])
        if name in views:
            raise ValueError(f"two views would be named {name!r}; rename one of the layers")
        views[name] = _view(region, num_blocks)
    return views


def _view(region: _Region, num_blocks: int) -> torch.Tensor:
    storage = region.storage
    offset = region.address - storage.data_ptr()
    end = region.span(num_blocks)[1] - storage.data_ptr()
    if offset < 0 or end > storage.nbytes():
        raise ValueError(
            f"{region.first.part}: blocks end at byte {end} of a storage of {storage.nbytes()}"
        )
    # A new tensor on the old storage: no kernel runs, and autograd knows nothing of it. Not an
    # inference tensor either, so that it can be written to in any mode.
    with torch.inference_mode(False), torch.no_grad():
        empty = torch.empty(0, dtype=torch.int8, device=region.device)
        size, stride = (num_blocks, region.payload), (max(region.stride, region.payload), 1)
        return empty.set_(storage, offset, size, stride)


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
