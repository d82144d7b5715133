"""Attention on a GPU, compared with its peers: python -m flash_online bench attention.

cases.py lists the cells and makes their tensors, peers.py has the providers, measure.py checks and times them, summary.py
summarises the results and checks the targets. float8.py has the providers of products in float8, and their check.
"""
