"""Attention on a GPU beside its peers: python benchmarks/run.py attention.

cases.py lists the cells and makes their tensors, peers.py has the providers, measure.py checks and times them, tables.py sums
up, judges the targets and makes docs/attention_benchmarks.md, figures.py its curves.
"""
