"""What :mod:`npu_kv_ops.integrations.vllm` and ``vllm_ascend`` are made of.

Import those: they check first that the installed vLLM fits.
"""
