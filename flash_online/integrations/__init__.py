"""Doors into other libraries, each a module of its own that is imported by name: transformers, torch_sdpa, diffusers, vllm,
sglang.

Nothing is registered by an import. A module imports its host inside its functions.
"""
