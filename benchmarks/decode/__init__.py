"""Attention over cached keys on a GPU beside its peers: python -m flash_online bench decode.

cases.py lists the cells and makes their tensors, peers.py has the providers, measure.py checks and times them, read.py and
read.cu are the pass of reads alone that they stand beside, summary.py sums up and judges the targets.
"""
