"""The exceptions of npu_kv_ops that are not Python's own kinds."""

from __future__ import annotations

__all__ = ["TransferError"]


class TransferError(RuntimeError):
    """A copy failed on its way, after its arguments were found to be right.

    The message carries the runtime's error number and text. An error that happens after the call
    it belongs to has returned is raised by the next npu_kv call on that device and by
    :func:`npu_kv_ops.raise_pending_errors`; the destination blocks of that call then hold old, new
    or mixed content.
    """
