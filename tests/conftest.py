"""Set-up shared by every test: a fixed seed, one thread, and torch's modes as they were."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def fixed_state():
    """Every test starts from the same random state and leaves torch's global switches as it found them.

    One thread: the problems are small, and threads that wait for each other on a busy machine take twenty times as long. That
    results do not depend on their number is a test of its own.
    """
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.manual_seed(20180508)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
