"""The benchmarks: python -m flash_online bench, whose commands run.py lists.

case.py says what a case is, harness.py runs a list of them, timing.py times and machine.py describes the machine. rows.py,
attention/, decode/, training.py, paper/, family/ and linear.py say what is measured, check and measure it; nvcc.py builds the
CUDA kernels of two of them. tables.py, figures.py and docs.py make the pages from the records in results/.
"""
