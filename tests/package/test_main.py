"""The command line: python -m flash_online info | check | demo | trace | bench."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest
import torch
from torch.utils._pytree import tree_leaves

import flash_online
from flash_online import _info
from flash_online.__main__ import main

REPOSITORY = Path(__file__).parents[2]


def trace(capsys, *words):
    """(the walk's rows, the rest of the output)"""
    assert main(["trace", *words]) == 0
    walk, rest = capsys.readouterr().out.split("\n\n", 2)[1:]
    return [[float(cell) for cell in line.split()] for line in walk.splitlines()[1:]], rest


# The rows worked by hand in docs/online_softmax.md, section 3: (x, m, factor, d) after each number.
@pytest.mark.parametrize(
    "row, walk",
    [
        ("1 3 2", [(1, 1, 0, 1), (3, 3, math.exp(-2), 1.135335), (2, 3, 1, 1.503215)]),
        ("2 1 3", [(2, 2, 0, 1), (1, 2, 1, 1.367879), (3, 3, math.exp(-1), 1.503215)]),
        ("-1 -inf 5", [(-1, -1, 0, 1), (-math.inf, -1, 1, 1), (5, 5, math.exp(-6), 1.002479)]),
        ("-inf", [(-math.inf, -math.inf, 0, 0)]),
        ("1 inf", [(1, 1, 0, 1), (math.inf, math.inf, 0, math.nan)]),
        ("nan 1", [(math.nan, -math.inf, 0, math.nan), (1, 1, 0, math.nan)]),
    ],
)
@pytest.mark.parametrize("options", [(), ("--float64",)])
def test_trace_prints_the_walk(capsys, row, walk, options):
    rows, _ = trace(capsys, *options, *row.split())
    assert len(rows) == len(walk)
    for got, expected in zip(rows, walk, strict=True):
        assert got == pytest.approx(expected, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize(
    "row, sentence",
    [
        ("1 2 3 4", "differ by 2 units in the last place"),  # the counterexample of docs/online_softmax_rounding.md, section 8
        ("1 3 2", "agree to the last bit"),
        ("100 101", "The naive softmax over- or underflows"),
        ("nan 1", "A NaN in the row"),
        ("1 inf", "+inf has no softmax"),
        ("1e300 1", "+inf has no softmax"),  # infinite in float32
        ("-inf -inf", "an empty row"),
    ],
)
def test_trace_says_what_to_see(capsys, row, sentence):
    assert sentence in trace(capsys, *row.split())[1]


def walk_of(row: str, kind: str = "Float32") -> list[tuple]:
    from flash_online import _introspect

    return getattr(_introspect, kind)([]).walk([float(word) for word in row.split()])


@pytest.mark.parametrize(
    "row, factors",
    [
        ("1 3 2", ["0.135"]),
        ("2 1 3 5", ["0.368", "0.135"]),
        ("-inf 1 -inf 3", ["0.135"]),  # the first finite number finds no sum to rescale
        ("3 1e38", ["0"]),  # the factor underflows
        ("3 3 2", []),
        ("7", []),
        ("-inf -inf", []),
        (" ".join(map(str, range(300))), ["0.368"] * 299),
    ],
)
def test_the_picture_of_a_walk_marks_its_rescales(row, factors):
    pytest.importorskip("matplotlib")
    from flash_online import _trace_plot

    walk = walk_of(row)
    figure = _trace_plot.draw(walk, "float32")
    for axes in figure.axes:
        marks = [c for c in axes.collections if c.get_gid() == "rescale"]
        assert sum(len(mark.get_segments()) for mark in marks) == len(factors)
    written = [text.get_text() for text in figure.axes[1].texts if "times" in text.get_text()]
    assert all(label.startswith(f"$\\times${factor}") for label, factor in zip(written, factors, strict=False))
    assert len(written) == len(factors) if len(walk) < 10 else 10 < len(written) < 40

    named = {artist.get_gid(): artist for axes in figure.axes for artist in axes.get_children() if artist.get_gid()}
    finite = [x for x, *_ in walk if x > -math.inf]
    assert (list(named["x"].get_ydata()) if finite else []) == finite
    assert len(named["-inf"].get_xdata() if "-inf" in named else []) == len(walk) - len(finite)
    assert list(named["d"].get_data().values) == [d for _, _, d, _ in walk]
    if finite:
        drawn = named["m"].get_data().values
        assert all(a == m or (math.isnan(a) and m == -math.inf) for a, (_, m, _, _) in zip(drawn, walk, strict=True))


@pytest.mark.parametrize("words", ["1 3 2", "-inf", "-1 --float64 -inf 1e300 -1e300", "1e38 -1e38", "0 0"])
def test_trace_writes_a_picture(capsys, monkeypatch, tmp_path, words):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    monkeypatch.chdir(tmp_path)
    assert main(["trace", *words.split(), "--plot", "walk.png"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {tmp_path / 'walk.png'}"
    picture = imread(tmp_path / "walk.png")
    assert min(picture.shape[:2]) > 500 and picture.std() > 0.01


@pytest.mark.parametrize(
    "words, code, says",
    [
        ("1 nan --plot a.png", 2, "this row has nan"),
        ("1 1e39 --plot a.png", 2, "this row has inf in float32"),
        ("1 --float64 1e301 --plot a.png", 2, "this row has 1e+301"),
        ("1 --plot", 2, "no file given"),
        ("--plot 1 3 2", 2, "no file given"),
        ("1 --plot a.unknown", 1, "not supported"),
        ("1 --plot gone/a.png", 1, "No such file"),
    ],
)
def test_trace_says_why_there_is_no_picture(capsys, monkeypatch, tmp_path, words, code, says):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main(["trace", *words.split()]) == code
    assert says in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_trace_names_the_package_that_a_picture_needs(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["trace", "1", "3", "--plot", str(tmp_path / "walk.png")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


def test_trace_help(capsys):
    assert main(["trace", "--help"]) == 0
    assert "trace NUMBER ... [--float64] [--plot FILE]" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["trace"], ["trace", "one"], ["trace", "--float64"], ["unknown"]])
def test_bad_command_lines_exit_with_2(capsys, words):
    assert main(words) == 2
    assert "trace 1 3 2" in "".join(capsys.readouterr())


def test_info_names_versions_kernels_and_devices(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    facts = _info.build_info()
    for expected in (facts["version"], facts["compiler"], f"chosen: {facts['cpu']}", "CUDA", "cross_entropy"):
        assert expected in out


@pytest.mark.parametrize(
    "capability, architectures, runs",
    [
        ((9, 0), ["9.0a"], True),
        ((10, 0), ["9.0a"], False),  # architecture-specific code runs nowhere else
        ((8, 6), ["8.0"], True),  # within a major version, upwards
        ((8, 0), ["8.6"], False),
        ((9, 0), ["8.0"], False),  # machine code does not cross major versions
        ((12, 0), ["8.0+PTX"], True),  # PTX does
        ((12, 0), ["9.0a+PTX"], False),
        ((7, 5), ["8.0+PTX"], False),
        ((9, 0), [], False),
    ],
)
def test_which_gpus_a_build_runs_on(capability, architectures, runs):
    assert (_info.why_not_on(capability, architectures) is None) == runs


def test_check_passes_and_has_a_line_per_function(capsys):
    assert main(["check"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("ok: ")
    checked = {line.split()[0] for line in out.splitlines() if " cpu " in line and " of " in line}
    public = {name for name in flash_online.__all__ if isinstance(getattr(flash_online, name), FunctionType)}
    # enable and disable are what override calls; the other two change and compute no result.
    assert checked == public - {"checked", "enable", "disable", "explain", "strict"}


def wrong_value(right, *arguments, **options):
    result = right(*arguments, **options)
    return (result[0] * 1.01, *result[1:]) if isinstance(result, tuple) else result * 1.01


def wrong_gradient(right, *arguments, **options):
    def scale(result):
        return result * 1.01 - 0.01 * result.detach() if result.is_floating_point() else result

    result = right(*arguments, **options)
    return tuple(map(scale, result)) if isinstance(result, tuple) else scale(result)


def raises(right, *arguments, **options):
    raise RuntimeError("no kernel image is available")


CHECKED = (
    "softmax log_softmax logsumexp topk_softmax cross_entropy linear_cross_entropy attention varlen_attention merge_attention"
).split()


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("fault", [wrong_value, wrong_gradient, raises])
def test_check_fails_and_names_the_function(capsys, monkeypatch, name, fault):
    from flash_online import _check_install, _self_check

    monkeypatch.setattr(_check_install, "DTYPES", (torch.float32,))
    monkeypatch.setattr(_self_check, "why_no_cuda", lambda: "not wanted in this test")
    # The other functions would only take time.
    for calls in ("row_calls", "attention_calls", "override_calls"):
        every = getattr(_check_install, calls)
        monkeypatch.setattr(_check_install, calls, lambda *a, every=every: (c for c in every(*a) if c.name == name))
    monkeypatch.setattr(flash_online, name, functools.partial(fault, getattr(flash_online, name)))
    assert main(["check"]) == 1
    out = capsys.readouterr().out
    assert f"FAILED: flash_online.{name}(" in out and "float32[" in out and "ok:" not in out
    assert "no kernel image" in out if fault is raises else "max error" in out


def test_check_moves_every_tensor_to_the_device():
    from flash_online import _check_install

    generator = torch.Generator().manual_seed(0)
    for call in (*_check_install.row_calls(generator), *_check_install.attention_calls(generator, 64)):
        tensors = [t for t in tree_leaves(call.given(torch.bfloat16, "meta")) if isinstance(t, torch.Tensor)]
        assert tensors and all(t.is_meta for t in tensors), call.title


def test_check_sees_that_override_does_nothing(capsys, monkeypatch):
    monkeypatch.setattr(flash_online, "override", contextlib.nullcontext)
    assert main(["check"]) == 1
    out = capsys.readouterr().out
    assert "did not replace" in out and "inside override()" in out
    assert all("inside override()" in line for line in out.splitlines() if line.startswith("FAILED"))


@pytest.mark.parametrize("agree", [True, False])
def test_demo_writes_its_files_and_reports_disagreement(capsys, monkeypatch, tmp_path, agree):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    from flash_online import _demo

    if not agree:
        monkeypatch.setattr(_demo, "LOSS_TOLERANCE", -1.0)
    arguments = "--device cpu --lengths 48 64 --seconds 0 --steps 3 --batch 2 --context 32".split()
    assert main(["demo", *arguments, "--out", str(tmp_path)]) == (0 if agree else 1)
    out = capsys.readouterr().out
    assert ("they agree" in out) == agree and ("DO NOT AGREE" in out) != agree
    assert (tmp_path / "training.png").stat().st_size > 10_000
    steps = [line for line in out.splitlines() if line.startswith("[")]  # of 8 problems, 2 trainings and a drawing
    assert [line.partition("]")[0] for line in steps] == [f"[{n:2}/11" for n in range(1, 12)]
    assert [sum(word in line for line in steps) for word in ("measuring", "training through", "drawing")] == [8, 2, 1]
    *_, figure, next_command = out.splitlines()
    assert str(tmp_path / "training.png") in figure
    assert next_command.endswith("trace 1 3 2 --plot walk.png" if agree else "check")
    numbers = json.loads((tmp_path / "demo.json").read_text())
    assert {m["function"] for m in numbers["measurements"]} == {"attention", "softmax", "cross_entropy"}
    assert all(m["error"] < 1e-4 for m in numbers["measurements"])
    assert len(numbers["losses"]["torch"]) == len(numbers["losses"]["flash_online"]) == 3


@pytest.mark.slow
def test_demo_trains_as_long_as_it_may(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    arguments = "--device cpu --lengths 48 --seconds 0 --steps 30 --batch 2 --context 32 --training-seconds 0".split()
    assert main(["demo", *arguments, "--out", str(tmp_path)]) == 0
    losses = json.loads((tmp_path / "demo.json").read_text())["losses"]
    assert len(losses["torch"]) == len(losses["flash_online"]) == 1
    out = capsys.readouterr().out
    assert (
        "Time was up: the first 1 steps" in out
        and "30 steps or 0 seconds" in out
        and "training through flash_online.functional, 1 steps" in out
    )


@pytest.mark.slow
def test_bench_hands_its_arguments_on():
    pytest.importorskip("tqdm")
    command = [sys.executable, "-m", "flash_online", "bench", "rows", "--device", "cpu", "--list", "--cases", "topk_softmax"]
    listed = subprocess.run(command, check=True, cwd=REPOSITORY, capture_output=True, text=True).stdout.splitlines()
    assert listed and all(line.startswith("topk_softmax") and "k 5" in line for line in listed)


def test_bench_outside_a_checkout_says_so(capsys, monkeypatch, tmp_path):
    from flash_online import __main__

    monkeypatch.setattr(__main__, "__file__", str(tmp_path / "flash_online" / "__main__.py"))
    assert main(["bench"]) == 1
    assert "part of a checkout" in capsys.readouterr().err
