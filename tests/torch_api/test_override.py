"""override(), enable() and disable(): torch.nn.functional made ours and given back."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flash_online
import flash_online.functional as F

TF = torch.nn.functional
NAMES = tuple(name for name in F.NAMES if hasattr(TF, name))  # torch has linear_cross_entropy from 2.13 on
TORCHS = {name: getattr(TF, name) for name in NAMES}


class Operators(TorchDispatchMode):
    """The names of our operators that run inside it."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "flash_online":
            self.names.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def ours():
    return [getattr(TF, name) is getattr(F, name) for name in NAMES]


def assert_restored():
    assert {name: getattr(TF, name) for name in NAMES} == TORCHS


def test_block():
    with flash_online.override():
        assert all(ours())
        assert TF.relu is F.relu
    assert_restored()


def test_blocks_nest_with_enable():
    flash_online.enable()
    with flash_online.override():
        with flash_online.override():
            assert all(ours())
        assert all(ours())
    assert all(ours())
    flash_online.disable()
    assert_restored()


def test_an_error_inside_restores():
    with pytest.raises(ZeroDivisionError), flash_online.override():
        1 / 0  # noqa: B018
    assert_restored()


def test_disable_without_enable():
    with pytest.raises(RuntimeError, match="disable"):
        flash_online.disable()
    assert_restored()


def test_what_stood_there_before_comes_back(monkeypatch):
    """Also where somebody else had put a function of his own."""

    def other(*args, **kwargs):
        return TORCHS["softmax"](*args, **kwargs)

    monkeypatch.setattr(TF, "softmax", other)
    with flash_online.override():
        assert TF.softmax is F.softmax
    assert TF.softmax is other


def test_modules_follow():
    """torch.nn's modules look the functions up in torch.nn.functional."""
    torch.manual_seed(0)
    x, logits, target = torch.randn(2, 5, 8), torch.randn(4, 7), torch.tensor([0, 6, 3, 3])
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    calls = {
        "softmax_forward": lambda: torch.nn.Softmax(-1)(logits),
        "cross_entropy_loss": lambda: torch.nn.CrossEntropyLoss(label_smoothing=0.1)(logits, target),
        "attention_forward": lambda: attention(x, x, x, need_weights=False)[0],
    }
    for name, call in calls.items():
        with Operators() as before:
            expected = call()
        with flash_online.override(), Operators() as inside:
            torch.testing.assert_close(call(), expected)
        assert (before.names, inside.names) == ([], [name])


def test_compiled_modules_follow():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LogSoftmax(-1)).requires_grad_(False)
    x = torch.randn(2, 4)
    expected = model(x)
    graphs = []

    def backend(graph, inputs):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with flash_online.override():
        torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(compiled(x), expected)  # torch's function again: the replacement is guarded on
    assert [any("flash_online" in target for target in graph) for graph in graphs] == [True, False]


def test_forwarding_inside_a_block_reaches_torch():
    """The call goes to torch's function, not to ours, which has replaced it in torch.nn.functional."""
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    with flash_online.override():
        result = TF.softmax(nested, -1)
    for ours, row in zip(result.unbind(), nested.unbind(), strict=True):
        torch.testing.assert_close(ours, torch.softmax(row, -1))


def test_warnings_name_the_callers_line():
    with flash_online.override(), pytest.warns(UserWarning, match="Implicit dimension choice for softmax") as raised:
        TF.softmax(torch.randn(2, 3))
    assert raised[0].filename == __file__


def test_warnings_of_forwarded_calls_do_too():
    with pytest.warns(UserWarning, match="Implicit dimension choice for softmax") as raised:
        F.softmax(torch.randn(2, 3).to("meta"))
    assert raised[0].filename == __file__


def test_star_import():
    names = {}
    exec("from flash_online.functional import *", names)
    assert names["softmax"] is F.softmax and names["relu"] is TF.relu


def test_all_threads_see_it_until_the_last_block_ends():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with flash_online.override():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(10) and all(ours())
    with flash_online.override():
        pass
    assert all(ours())
    leave.set()
    thread.join()
    assert_restored()
