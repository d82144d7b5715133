"""Attention on a GPU beside its peers: python -m flash_online bench attention.

cases.py lists the cells and makes their tensors, peers.py has the providers, measure.py checks and times them, summary.py sums
up and judges the targets.
"""
