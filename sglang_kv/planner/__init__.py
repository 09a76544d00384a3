"""Plan capacity: how much KV memory a model, its traffic and a policy take, and who fits.

``sglang-kv plan`` is `command`. Nothing here imports torch, sglang or transformers; what a policy
keeps is asked of the same plans that the server obeys (`sglang_kv.compression`).
"""
