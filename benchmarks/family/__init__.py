"""The family of attention kernels: the organisations of FlashAttention-1 and -2 as plain kernels of our own, beside others.

kernels.cu holds the two organisations and what lies between them, build.py compiles and calls them, triton_attention.py is
fused attention in Triton. measure.py checks and times them beside this library, torch and FlexAttention (python -m flash_online
bench family); traffic.py asks the profiler how many bytes they move, and summary.py says how many they should. The library does
not use it.
"""
