"""Integrations with other libraries, each a module that is imported by name: transformers, torch_sdpa, diffusers, vllm, sglang.

Importing registers nothing. A module imports its host library inside its functions.
"""
