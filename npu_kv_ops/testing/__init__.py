"""What tests and examples share: a small decoder with a paged KV cache, and a server around it.

Imports torch; the runtime has to be chosen before (:mod:`npu_kv_ops.runtime`).
"""

from npu_kv_ops.testing.decoder import (
    CapturedStep,
    DecoderConfig,
    PagedDecoder,
    Step,
    StepInputs,
)
from npu_kv_ops.testing.server import BlockSwap, Request, Server
from npu_kv_ops.testing.swapping import StepSwap, SwappingDecoder

__all__ = [
    "BlockSwap",
    "CapturedStep",
    "DecoderConfig",
    "PagedDecoder",
    "Request",
    "Server",
    "Step",
    "StepInputs",
    "StepSwap",
    "SwappingDecoder",
]
