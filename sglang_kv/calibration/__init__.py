"""Find the retrieval heads of a model: passkey data, head scores, and a simulation to judge them.

Runs on transformers alone, away from the engine; the result is a gates file
(`sglang_kv.compression.gates`).
"""
