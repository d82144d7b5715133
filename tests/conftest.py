"""Set-up shared by every test: a fixed seed, one thread, torch's modes as they were; and the devices that tests run on.

A test that takes the fixture `device` runs once per device, "cpu" and "cuda"; the CUDA one carries the marker `gpu` and is
skipped where there is no GPU or this build has no kernels for it. `pytest -m gpu` and `-m "not gpu"` choose by it.
"""

from __future__ import annotations

import pytest
import torch

from flash_online._info import build_info


def cuda_is_usable() -> bool:
    """Whether a GPU is visible and this build has kernels for CUDA."""
    return torch.cuda.is_available() and bool(build_info()["architectures"])


def pytest_collection_modifyitems(items):
    if cuda_is_usable():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU, or no kernels for it in this build"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    """The device that a test runs on."""
    return request.param


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
