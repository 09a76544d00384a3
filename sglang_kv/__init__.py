"""Long contexts in a fraction of the KV memory, on SGLang.

Nothing is imported here: SGLang loads `sglang_kv.plugin`, and `import sglang_kv` stays free.
"""

__version__ = "0.1.0"
