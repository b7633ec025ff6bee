"""From the KV caches that a model runner registers to the views that are copied.

The geometry is :func:`npu_kv_ops.block_views`. Here it gets what shapes do not tell: the number of
blocks and the page of each layer come from vLLM's ``KVCacheConfig``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from npu_kv_ops.kv_cache import KVCache, block_views

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

__all__ = ["device_views"]

_Page = int | list[int] | None


def device_views(
    kv_caches: Mapping[str, KVCache], kv_cache_config: KVCacheConfig
) -> dict[str, torch.Tensor]:
    """View every byte of every block of ``kv_caches`` once.

    Args:
        kv_caches: layer name -> tensor, or tuple or list of tensors, as the model runners of vLLM
            and vLLM-Ascend pass them to ``register_kv_caches``.
        kv_cache_config: of this rank.

    Returns:
        View name -> int8 ``[num_blocks, bytes]``; see :func:`npu_kv_ops.block_views`.

    Raises:
        ValueError: a layer without a cache, a cache that does not hold the bytes that the scheduler
            counts on or cannot be divided into blocks, caches that are not all on one device. Names
            the layer and the reason.
    """
    specs = dict(_layer_specs(kv_cache_config))
    missing = [name for name in specs if name not in kv_caches]
    if missing:
        raise ValueError(f"no KV cache was registered for {missing}; blocks would be incomplete")
    blocks = kv_cache_config.num_blocks
    caches = dict(_placed(kv_caches, specs, kv_cache_config))
    _require_one_device(caches)
    pages = {
        name: _fitting_page(name, cache, blocks, _pages(specs[name], cache))
        for name, cache in caches.items()
        if name in specs
    }
    return block_views(caches, blocks, pages)


def _layer_specs(kv_cache_config: KVCacheConfig) -> Iterator[tuple[str, KVCacheSpec]]:
    for group in kv_cache_config.kv_cache_groups:
        of_layers = getattr(group.kv_cache_spec, "kv_cache_specs", None)  # uniform-type groups
        for name in group.layer_names:
            yield name, group.kv_cache_spec if of_layers is None else of_layers[name]


def _placed(
    kv_caches: Mapping[str, KVCache],
    specs: Mapping[str, KVCacheSpec],
    kv_cache_config: KVCacheConfig,
) -> Iterator[tuple[str, KVCache]]:
    """Caches by layer, without those that share the cache of another layer."""
    known = {_where(kv_caches[name]) for name in specs}
    for name, cache in kv_caches.items():
        spec = specs.get(name)
        if spec is None:
            # vLLM gives a layer that shares another's cache a name of its own, but no spec.
            if _where(cache) not in known:
                yield name, cache
        elif not getattr(spec, "has_layer_views", True) and isinstance(cache, torch.Tensor):
            yield name, _page_view(name, cache, spec, kv_cache_config)
        else:
            yield name, cache


def _where(cache: KVCache) -> tuple[object, ...]:
    tensors = [cache] if isinstance(cache, torch.Tensor) else cache
    return tuple((t.data_ptr(), tuple(t.shape), tuple(t.stride())) for t in tensors)


def _page_view(
    name: str, raw: torch.Tensor, spec: KVCacheSpec, kv_cache_config: KVCacheConfig
) -> torch.Tensor:
    """View the pages of a layer in a buffer that was registered whole."""
    for placement in kv_cache_config.kv_cache_tensors:
        if name in placement.layers:
            start = placement.offset + placement.layers.index(name) * placement.layer_stride
            size = (kv_cache_config.num_blocks, spec.page_size_bytes)
            flat = raw.view(torch.int8)
            return flat.as_strided(size, (placement.block_stride, 1), flat.storage_offset() + start)
    raise ValueError(f"layer {name!r}: no KVCacheTensor says where its pages are")


def _pages(spec: Any, cache: KVCache) -> list[_Page]:
    """What a block of the layer may have, in bytes: its page with padding, or without."""
    shapes = getattr(spec, "shapes", None)
    if shapes is not None:  # Mamba: one size a state
        states = [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, spec.dtypes)]
        if not isinstance(cache, torch.Tensor):
            return [states]
        return [sum(states), int(spec.page_size_bytes)]
    pages: list[_Page] = [int(spec.page_size_bytes)]
    if getattr(spec, "page_size_padded", None) is not None:
        pages.insert(0, int(spec.real_page_size_bytes))
    return pages


def _fitting_page(name: str, cache: KVCache, blocks: int, pages: list[_Page]) -> _Page:
    """The first of ``pages`` that the cache holds; the last, when it takes all layers to say."""
    for page in pages[:-1]:
        try:
            block_views({name: cache}, blocks, {name: page})
        except ValueError:
            continue
        return page
    return pages[-1]


def _require_one_device(caches: Mapping[str, KVCache]) -> None:
    homes: dict[str, str] = {}
    for name, cache in caches.items():
        for tensor in [cache] if isinstance(cache, torch.Tensor) else cache:
            homes.setdefault(str(tensor.device), name)
    if len(homes) > 1:
        listed = ", ".join(f"{device} ({name})" for device, name in homes.items())
        raise ValueError(
            f"KV caches are on several devices: {listed}; caches that an engine keeps in host "
            "memory itself cannot be offloaded"
        )
