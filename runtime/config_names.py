"""Names of settings that are not fields: other engines' spellings, and features that are not there
yet. Torch-free."""

from __future__ import annotations

ALIASES = {
    "model": "model_path",
    "tokenizer": "tokenizer_path",
    "max_model_len": "context_length",
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "gpu_memory_utilization": "mem_fraction_static",
    "block_size": "page_size",
    "seed": "random_seed",
    "enforce_eager": "disable_cuda_graph",
    "cuda_graph_max_batch_size": "cuda_graph_max_bs",
    "scheduling_policy": "schedule_policy",
    "enable_prefix_caching": "disable_radix_cache",
    "hicache_size": "host_cache_gb",
}
"""Common spellings of other engines. ``enable_prefix_caching`` is turned round."""

ABSENT = {
    "quantization": "quantized weights",
    **dict.fromkeys(("tp", "tp_size", "tensor_parallel_size"), "tensor parallelism"),
    **dict.fromkeys(("pp", "pp_size", "pipeline_parallel_size"), "pipeline parallelism"),
    **dict.fromkeys(("ep", "ep_size", "expert_parallel_size"), "expert parallelism"),
    **dict.fromkeys(("dp", "dp_size", "data_parallel_size"), "data parallelism"),
    "speculative_config": "speculative decoding",
    "attention_backend": "a choice of attention kernels",
    "lora_paths": "LoRA adapters",
    "enable_lora": "LoRA adapters",
    "trust_remote_code": "running code that comes with a model",
}
