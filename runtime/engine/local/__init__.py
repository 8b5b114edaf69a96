"""The embedded engine: a small real model served on CPU with vLLM's HTTP shapes.

`server` has the routes, `batching` the scheduler, `kv_cache` what is reused, `llama` the forward
pass, `lora` the adapters. Importing this package loads torch.
"""

from runtime.engine.local.server import serve

__all__ = ["serve"]
