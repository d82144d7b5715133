"""The family of attention kernels: the organisations of FlashAttention-1 and -2 as our own plain kernels, compared with peers.

kernels.cu holds the two organisations and intermediate ones, build.py compiles and calls them, triton_attention.py is fused
attention in Triton. measure.py checks and times them with this library, torch and FlexAttention (python -m flash_online bench
family); traffic.py profiles the bytes that they move, and summary.py computes the expected bytes. The library does not use this
folder.
"""
