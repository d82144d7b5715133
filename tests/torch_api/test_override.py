"""override(), enable() and disable(): torch.nn.functional made ours and given back."""

from __future__ import annotations

import functools
import importlib
import io
import threading
import types
import warnings
from pathlib import Path

import pytest
import torch
from ranks import run_on_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import flash_online
import flash_online.functional as F
from flash_online import _patches

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


@pytest.fixture
def warns_anew(monkeypatch):
    """Each warning about a replacement comes once per process; a test that waits for one starts from none."""
    monkeypatch.setattr(importlib.import_module("flash_online.override"), "_warned", set())


def replacement(*args, **kwargs):
    return TORCHS["softmax"](*args, **kwargs)


REPLACEMENTS = {
    "a function": replacement,
    "under torch's name": functools.wraps(TORCHS["softmax"])(lambda *args, **kwargs: replacement(*args, **kwargs)),
    "a partial": functools.partial(TORCHS["softmax"], dim=-1),
    "an object": type("Replacement", (), {"__call__": lambda self, *args: replacement(*args)})(),
}


@pytest.mark.parametrize("other", REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_a_replacement_comes_back_and_is_named_once(other, monkeypatch, warns_anew):
    monkeypatch.setattr(TF, "softmax", other)
    with pytest.warns(
        RuntimeWarning, match=r"torch\.nn\.functional\.softmax is (replacement|softmax|partial|Replacement) of .*replaced"
    ) as raised:
        with flash_online.override():
            assert TF.softmax is F.softmax
    assert TF.softmax is other and raised[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with flash_online.override():
            assert all(ours())
    assert TF.softmax is other


def test_enable_and_disable_warn_at_the_callers_line(monkeypatch, warns_anew):
    monkeypatch.setattr(TF, "log_softmax", replacement)
    monkeypatch.setattr(TF, "softmax", TORCHS["softmax"])
    with pytest.warns(RuntimeWarning, match="log_softmax") as raised:
        flash_online.enable()
    TF.softmax = replacement
    with pytest.warns(RuntimeWarning, match="softmax is replacement .*stays") as raised_later:
        flash_online.disable()
    assert raised[0].filename == raised_later[0].filename == __file__
    assert TF.log_softmax is replacement and TF.softmax is replacement


def test_what_came_after_enable_stays(monkeypatch, warns_anew):
    """disable() gives back what it replaced and leaves alone what others have put there since."""
    monkeypatch.setattr(TF, "softmax", TORCHS["softmax"])  # restored after the test
    flash_online.enable()
    TF.softmax = replacement
    with pytest.warns(RuntimeWarning, match="enable: .*softmax is replacement .* stays"):
        flash_online.enable()
    assert TF.softmax is replacement
    flash_online.disable()
    with pytest.warns(RuntimeWarning, match=r"disable: .*softmax is replacement .*call disable\(\) once more"):
        flash_online.disable()
    assert TF.softmax is replacement and TF.log_softmax is TORCHS["log_softmax"]
    with pytest.raises(RuntimeError, match="without an enable"):
        flash_online.disable()

    TF.softmax = F.softmax  # the replacement ends, and puts back what it had found
    flash_online.disable()
    assert_restored()
    with pytest.raises(RuntimeError, match="without an enable"):
        flash_online.disable()


def test_enable_after_a_replacement_has_put_ours_back(monkeypatch, warns_anew):
    """Without the second disable(), the next pair restores torch's function all the same."""
    monkeypatch.setattr(TF, "softmax", TORCHS["softmax"])
    flash_online.enable()
    TF.softmax = replacement
    with pytest.warns(RuntimeWarning):
        flash_online.disable()
    TF.softmax = F.softmax
    with flash_online.override():
        assert all(ours())
    assert_restored()


def test_torchs_own_function_put_back_by_others_is_no_replacement(monkeypatch, warns_anew):
    monkeypatch.setattr(TF, "softmax", TORCHS["softmax"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with flash_online.override():
            TF.softmax = TORCHS["softmax"]
    assert_restored()


def of_module(name):
    """A function that wraps another, with its code in a module of that name."""
    module = types.ModuleType(name)
    exec(
        "def wrap(target):\n    def inner(*args, **kwargs):\n        return target(*args, **kwargs)\n    return inner\n"
        "def get_rank():\n    return 0\n",
        vars(module),
    )
    return module


DISTRIBUTED = of_module("torch.distributed.tensor.experimental.another_place")
SHARDING = DISTRIBUTED.wrap(TORCHS["scaled_dot_product_attention"])


def logged(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    "wrapper",
    [
        SHARDING,
        functools.wraps(TORCHS["scaled_dot_product_attention"])(SHARDING),
        functools.partial(SHARDING, scale=1.0),
        logged(SHARDING),
        logged(logged(functools.partial(SHARDING))),
    ],
    ids=["its wrapper", "under torch's name", "partial", "logged", "deep"],
)
def test_wrappers_of_torch_distributed_are_found(wrapper, monkeypatch):
    monkeypatch.setattr(TF, "scaled_dot_product_attention", wrapper)
    before = {name: getattr(TF, name) for name in NAMES}
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match=r"context_parallel is active.*override\(\) first"):
        flash_online.enable()
    with pytest.raises(RuntimeError, match="directly inside"):
        F.scaled_dot_product_attention(q, q, q)
    assert {name: getattr(TF, name) for name in NAMES} == before
    with pytest.raises(RuntimeError, match="without an enable"):
        flash_online.disable()


def test_a_replacement_that_only_knows_torch_distributed_is_a_replacement(monkeypatch, warns_anew):
    def counting(*args, **kwargs):
        DISTRIBUTED.get_rank()
        return TORCHS["scaled_dot_product_attention"](*args, **kwargs)

    def closing(get_rank):
        return lambda *args, **kwargs: (get_rank(), counting(*args, **kwargs))[1]

    monkeypatch.setattr(TF, "scaled_dot_product_attention", closing(DISTRIBUTED.get_rank))
    q = torch.randn(1, 2, 3, 4)
    F.scaled_dot_product_attention(q, q, q)
    with pytest.warns(RuntimeWarning, match="scaled_dot_product_attention is <lambda> of .*test_override"):
        with flash_online.override():
            assert all(ours())


def test_a_warning_that_is_an_error_leaves_nothing_half_done(monkeypatch, warns_anew):
    monkeypatch.setattr(TF, "softmax", TORCHS["softmax"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TF.softmax = replacement
        with pytest.raises(RuntimeWarning, match="softmax is replacement"):
            flash_online.enable()
        assert TF.scaled_dot_product_attention is TORCHS["scaled_dot_product_attention"] and TF.softmax is replacement
        TF.softmax = TORCHS["softmax"]
        flash_online.enable()
        TF.softmax = replacement
        with pytest.raises(RuntimeWarning, match="softmax is replacement"):
            flash_online.disable()
        TF.softmax = TORCHS["softmax"]
    assert_restored()
    with pytest.raises(RuntimeError, match="without an enable"):
        flash_online.disable()


def test_names_and_homes():
    assert all(_patches.is_torchs(function) for function in TORCHS.values())
    assert not any(_patches.is_torchs(function) for function in (replacement, F.softmax, REPLACEMENTS["under torch's name"]))
    assert not any(_patches.shards(function, function) for function in (*TORCHS.values(), *REPLACEMENTS.values()))

    def unset():
        return later

    assert not _patches.shards(unset)  # its closure has no value yet
    later = None


@pytest.mark.slow
def test_context_parallel_on_two_ranks():
    """The real one, by gloo: the wrong order raises, the right one is right, and its wrapper survives disable()."""
    printed = run_on_ranks(Path(__file__).with_name("context_parallel_ranks.py"))
    assert [lines.split() for lines in printed] == [["ok", "0"], ["ok", "1"]]


def test_an_import_inside_context_parallel_finds_torchs_function():
    assert F.ORIGINALS["scaled_dot_product_attention"] is torch._C._nn.scaled_dot_product_attention
    assert TORCHS["scaled_dot_product_attention"] is torch._C._nn.scaled_dot_product_attention


class Calls(torch.nn.Module):
    """All four functions that ONNX has operators for, of torch.nn.functional or called as ours."""

    def __init__(self, functions, say):
        super().__init__()
        self.linear, self.functions, self.say = torch.nn.Linear(8, 24), functions, say

    def forward(self, x):
        query, key, value = self.linear(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        f = self.functions
        out = f.scaled_dot_product_attention(query, key, value, is_causal=True)
        if torch.onnx.is_in_onnx_export():
            self.say(str(flash_online.explain(F.softmax, x, -1)))
        loss = f.cross_entropy(out.flatten(0, 2), torch.zeros(20, dtype=torch.int64))
        return f.softmax(out, -1), f.log_softmax(out, 1), loss


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("functions", [TF, F], ids=["override", "functional"])
def test_onnx_export_goes_to_torch(functions, dynamo, requires_grad):
    """ONNX has no operators of ours. The exported model has torch's, and explain says why."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    reasons: list[str] = []
    model, x = Calls(functions, reasons.append).requires_grad_(requires_grad).eval(), torch.randn(2, 5, 8)
    expected = model(x)
    with flash_online.override():
        if dynamo:
            proto = torch.onnx.export(model, (x,), dynamo=True, verbose=False).model_proto
        else:
            file = io.BytesIO()
            torch.onnx.export(model, (x,), file, dynamo=False)
            proto = onnx.load_model_from_string(file.getvalue())
        assert all(ours())
    assert {"MatMul", "Softmax", "LogSoftmax"} <= {node.op_type for node in proto.graph.node}
    assert reasons and all("not flash_online: torch.onnx.export is active" in reason for reason in reasons)
    evaluator = pytest.importorskip("onnx.reference")
    found = evaluator.ReferenceEvaluator(proto).run(None, {proto.graph.input[0].name: x.numpy()})
    for ours_, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(ours_.copy()).view(theirs.shape), theirs.detach())


def test_strict_forbids_what_onnx_export_forwards(monkeypatch):
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(flash_online._plain, "is_compiling", lambda: True)
    rows = torch.randn(2, 3)
    assert flash_online.explain(F.softmax, rows, -1).ours is False
    assert flash_online.explain(flash_online.softmax, rows, -1).ours  # torch has no such function: the exporter decides
    with flash_online.strict(), pytest.raises(RuntimeError, match="torch.onnx.export is active"):
        F.softmax(rows, -1)


def test_modules_follow():
    """torch.nn's modules look the functions up in torch.nn.functional."""
    torch.manual_seed(0)
    x, logits, target = torch.randn(2, 5, 8), torch.randn(4, 7), torch.tensor([0, 6, 3, 3])
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    calls = {
        "softmax_forward": lambda: torch.nn.Softmax(-1)(logits),
        "cross_entropy_loss": lambda: torch.nn.CrossEntropyLoss(label_smoothing=0.1)(logits, target),
        "attention_training": lambda: attention(x, x, x, need_weights=False)[0],
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
    with FakeTensorMode():
        elsewhere = torch.empty(2, 3, device="xpu")
    with pytest.warns(UserWarning, match="Implicit dimension choice for softmax") as raised:
        F.softmax(elsewhere)
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
