"""Attention over cached keys on a GPU, compared with its peers: python -m flash_online bench decode.

cases.py lists the cells and makes their tensors, peers.py has the providers, measure.py checks and times them, read.py and
read.cu are the read-only baseline, summary.py summarises the results and checks the targets.
"""
