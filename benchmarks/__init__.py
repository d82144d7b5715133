"""The benchmarks: python -m flash_online bench, whose commands run.py lists.

case.py says what a case is, harness.py runs a list of them, timing.py times and machine.py describes the machine. rows.py,
attention/, decode/, training.py, paper/, family/ and linear.py say what is measured, check and measure it; nvcc.py builds the
CUDA kernels of two of them. row_pages.py, attention_pages.py and readme.py make the tables of the docs from the records in
results/, in the form that tables.py gives them; figures.py draws the curves, and docs.py writes both into the docs.
"""
