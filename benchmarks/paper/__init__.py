"""The paper, reproduced: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867.

kernels.cu holds its algorithms as plain CUDA kernels, build.py compiles and calls them, measure.py times them beside this
library (`python benchmarks/run.py paper`), tables.py and figures.py make docs/paper.md from the results. The library does not
use it.
"""
