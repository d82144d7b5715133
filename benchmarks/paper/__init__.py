"""The paper, reproduced: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867.

kernels.cu holds its algorithms as plain CUDA kernels, build.py compiles and calls them, measure.py times them and this library
(python -m flash_online bench paper), summary.py computes the speedups in docs/performance/paper.md. The library does not use
this folder.
"""
