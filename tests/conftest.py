"""Set-up shared by every test: a fixed seed, one thread, torch's modes as they were; and the devices that tests run on.

A test that takes the fixture `device` runs once per device, "cpu" and "cuda"; the CUDA one carries the marker `gpu` and is not
in the list where there is no GPU or this build has no kernels for it. `pytest -m gpu` and `-m "not gpu"` choose by it.
"""

from __future__ import annotations

import gc

import pytest
import torch
from devices import why_no_cuda

import flash_online
from flash_online import _policy

# torch.manual_seed() also queues the seed for each kind of device that is not there, with a stack trace that takes a
# millisecond.
for kind in (torch.cuda, torch.xpu, torch.mtia):
    if not kind.is_available():
        kind.manual_seed_all = lambda seed: None


def pytest_itemcollected(item):
    """Of a test with the marker `thin(n)` one cell in n of its grid stays quick on the CPU, and the other cells are slow.

    The quick cells lie on diagonals of the grid. A parameter keeps all its values if the sizes of the other parameters, less
    one each, sum to n - 1 or more.
    """
    thin = item.get_closest_marker("thin")
    if thin and not item.get_closest_marker("gpu"):
        if sum(place_of(item, *mark.args) for mark in item.iter_markers("parametrize")) % thin.args[0]:
            item.add_marker(pytest.mark.slow)


def place_of(item, names, values):
    """The index of a test's parameters among the values of one @parametrize."""
    name, *others = names.split(",")
    firsts = (v.values[0] if isinstance(v, type(pytest.param())) else v[0] if others else v for v in values)
    return next(i for i, first in enumerate(firsts) if first is item.callspec.params[name])


LONG = {"distributed", "package"}  # folders of tests that start processes


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.path.parent.name not in LONG)  # a long test that began last would keep one worker busy
    reason = why_no_cuda()
    if reason is None:
        return
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if len(on_gpu) < len(items):
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=on_gpu)
    else:  # the run asks for tests of a GPU alone, and is told why they do not run
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    """torch's modules and the list of tests live to the end, and a collector that walks them takes a tenth of the time."""
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The device that a test runs on, by our kernels alone: a call that went to torch would pass each comparison with torch.

    A test with the marker `forwards` is about calls that go to torch: it runs outside of strict().
    """
    if request.node.get_closest_marker("forwards"):
        yield request.param
        return
    with flash_online.strict():
        yield request.param


@pytest.fixture
def cache_device(device, request):
    """The device of a test, where cached keys have kernels; none takes float64 on CUDA."""
    parameters = getattr(request.node, "callspec", None)
    if device == "cuda" and parameters and torch.float64 in parameters.params.values():
        pytest.skip("no kernel takes float64 on CUDA over cached keys")
    if device == "cuda" and "kvcache_attention" not in _policy.ON_CUDA:
        pytest.skip("this build has no CUDA kernels for cached keys")
    return device


@pytest.fixture
def ours_alone():
    """Calls that would go to torch are errors, as under the fixture `device`."""
    with flash_online.strict():
        yield


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
