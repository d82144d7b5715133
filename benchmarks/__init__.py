"""The benchmarks: python -m flash_online bench; run.py lists the commands.

case.py defines a case, harness.py runs a list of cases, timing.py times calls and machine.py describes the machine. rows.py,
attention/, decode/, training.py, paper/, family/ and linear.py define, check and measure their cases; float8_accuracy.py
measures errors alone; nvcc.py builds the CUDA kernels of two of them. row_pages.py, attention_pages.py and readme.py make the
docs' tables from the records in results/, using the formats of tables.py; figures.py draws the curves, and docs.py writes both
into the docs.
"""
