"""The benchmarks: that a run measures what it says, that ratios point the right way, that the pages show the results."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
BENCHMARKS = REPOSITORY / "benchmarks"

if not (BENCHMARKS / "run.py").is_file():
    pytest.skip("the benchmarks are part of a checkout", allow_module_level=True)


@pytest.fixture
def modules(monkeypatch):
    """The modules of the package benchmarks."""
    pytest.importorskip("tqdm")
    monkeypatch.syspath_prepend(str(REPOSITORY))
    names = (
        "cases",
        "summary",
        "timing",
        "peers",
        "cuda_peers",
        "rows",
        "tables",
        "row_pages",
        "attention_pages",
        "readme",
        "docs",
        "training",
        "models",
        "linear",
        "scaling",
        "harness",
        "case",
        "nvcc",
    )
    names += tuple(f"attention.{name}" for name in ("cases", "summary", "peers", "measure"))
    names += tuple(f"decode.{name}" for name in ("cases", "summary", "peers", "measure", "read"))
    names += tuple(f"paper.{name}" for name in ("build", "summary", "measure"))
    names += tuple(f"family.{name}" for name in ("summary", "measure", "traffic"))
    return {name: importlib.import_module(f"benchmarks.{name}") for name in names}


def bench(*arguments, check=False):
    """The finished command. One that does not end shows where all of its threads are."""
    command = [sys.executable, "-m", "flash_online", "bench", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "FLASH_ATTENTION_3"} | {
        "PYTHONFAULTHANDLER": "1"
    }
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)
            output, errors = process.communicate()
            pytest.fail(f"{' '.join(command)} did not end:\n{output}\n{errors}")
    if check and process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@pytest.fixture(scope="module")
def quick_record(tmp_path_factory):
    pytest.importorskip("tqdm")
    path = tmp_path_factory.mktemp("bench") / "cpu.json"
    bench("rows", "--device", "cpu", "--quick", "--seconds", 0, "--rounds", 1, "--out", path, check=True)
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def attention_record(tmp_path_factory):
    pytest.importorskip("tqdm")
    path = tmp_path_factory.mktemp("bench") / "attention.json"
    bench("attention", "--quick", "--seconds", 0, "--rounds", 1, "--out", path, check=True)
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def decode_record(tmp_path_factory):
    pytest.importorskip("tqdm")
    path = tmp_path_factory.mktemp("bench") / "decode.json"
    bench("decode", "--quick", "--seconds", 0, "--rounds", 1, "--out", path, check=True)
    return json.loads(path.read_text())


def result_of(
    forward, backward, *, function="softmax", kind="long rows", case="rows 32, classes 65536", dtype="float32", **more
):
    """A result whose peer takes `forward` and `backward` times as long as ours."""
    ours = {"forward_ms": 2.0, "backward_ms": 4.0, "forward_share": 0.5, "backward_share": 0.25}
    theirs = {"forward_ms": 2.0 * forward, "backward_ms": 4.0 * backward}
    for entry in (ours, theirs):
        entry |= {f"{direction}_best_ms": entry[f"{direction}_ms"] / 2 for direction in ("forward", "backward")}
    result = {
        "family": function,
        "kind": kind,
        "case": case,
        "dtype": dtype,
        "sizes": {"rows": 32, "classes": 65536},
        "options": {},
        "providers": {"flash_online": ours, "torch": theirs},
        "copy": {"gb_per_s": 10.0, "best_gb_per_s": 15.0},
    }
    return result | more


def with_ratio(summary, *results):
    for result in results:
        result["ratio"] = summary.ratio(result["providers"])
    return list(results)


def test_geometric_mean(modules):
    mean = modules["summary"].geometric_mean
    assert mean([3.0]) == pytest.approx(3.0)
    assert mean([0.5, 2.0]) == pytest.approx(1.0)
    assert mean(x for x in (1.0, 10.0, 100.0)) == pytest.approx(10.0)


def test_above_one_means_that_ours_is_faster(modules):
    summary = modules["summary"]
    (result,) = with_ratio(summary, result_of(3.0, 0.5))
    assert result["ratio"] == {"against": "torch", "forward": 3.0, "backward": 0.5, "forward_best": 3.0, "backward_best": 0.5}
    assert summary.ratio({"torch": {}}) is None and summary.ratio({"flash_online": {}}) is None


def test_summary_has_means_worst_cases_and_shares(modules):
    summary = modules["summary"]
    results = with_ratio(summary, result_of(2.0, 1.0, case="a"), result_of(8.0, 0.25, case="b"))
    (entry,) = summary.summarize(results)
    assert entry["cases"] == 2 and entry["against"] == "torch" and entry["share_of"] == "copy"
    assert entry["forward"] == {"mean": pytest.approx(4.0), "worst": 2.0, "worst_case": "a", "share": pytest.approx(0.5)}
    assert entry["backward"] == {"mean": pytest.approx(0.5), "worst": 0.25, "worst_case": "b", "share": pytest.approx(0.25)}


def test_the_fastest_peer_may_be_another_in_each_direction(modules):
    summary = modules["summary"]
    result = result_of(2.0, 2.0, function="cross_entropy", case="a")
    peers = {"quack": (2.5, 3.0), "torch math": (0.1, 0.1), "Liger": (9.0, 0.1)}  # ours takes 2 and 4 ms
    for name, (forward, backward) in peers.items():
        result["providers"][name] = {"forward_ms": forward, "backward_ms": backward}
    best = summary.over_best(result["providers"])
    assert best["forward"] == {"times": pytest.approx(1.25), "peer": "quack"}
    assert best["backward"] == {"times": pytest.approx(0.025), "peer": "Liger"}
    assert best["step"] == {"times": pytest.approx(5.5 / 6), "peer": "quack"}
    assert summary.over_best({name: result["providers"][name] for name in ("flash_online", "torch", "torch math")}) is None
    (entry,) = summary.summarize([r | {"over_best": best} for r in with_ratio(summary, result)])
    assert entry["over_best"]["step"]["worst_case"] == "a" and entry["over_best"]["backward"]["peer"] == "Liger"
    record = {"device": "", "torch": "", "commit": "", "date": "", "summary": [entry]}
    assert any("1.25 / 0.03 / 0.92" in line and "Liger" in line for line in modules["row_pages"].best_table(record))


def test_noise_is_the_baselines_median_over_its_least(modules):
    noise = modules["summary"].noise
    assert noise([]) is None and noise([result_of(1.0, 1.0)]) == pytest.approx(1.5)
    loud = {"dtype": "float32", "matmul": {"gflop_per_s": 100.0, "best_gflop_per_s": 100.0}}
    calm = {"dtype": "float32", "matmul": {"gflop_per_s": 400.0, "best_gflop_per_s": 400.0}}
    assert noise([loud, calm, result_of(1.0, 1.0)]) == pytest.approx(2.0)


def test_targets_are_judged_by_mean_and_by_every_case(modules):
    summary = modules["summary"]

    def attention(forward, backward, case, **more):
        result = result_of(forward, backward, function="attention", kind="causal", case=case, sizes={"L": 8192}, **more)
        result["providers"]["torch flash"] = result["providers"].pop("torch")
        return result

    window = attention(2.9, 30.0, "window", options={"window": 512})
    results = with_ratio(summary, attention(2.0, 2.0, "a"), attention(0.9, 0.8, "b"), window, result_of(5.0, 3.0))
    targets = {target["target"]: target for target in summary.targets(results)}
    forward, backward = (targets[f"attention, float32, x torch flash, {direction}"] for direction in summary.DIRECTIONS)
    assert forward["cases"] == 2 and forward["met"]  # the window is not in this mean
    assert backward["mean"] > 1 and backward["worst_case"] == "b, float32" and not backward["met"]
    assert not targets["attention, window 512, L 8192, x torch flash, forward"]["met"]
    assert targets["attention, window 512, L 8192, x torch flash, backward"]["met"]
    assert targets["softmax, 32768 classes and more, x torch, forward"]["met"]
    assert not targets["softmax, 32768 classes and more, x torch, backward"]["met"]
    assert targets["softmax, 32768 classes and more, of the copy rate, forward"]["met"]


def test_targets_of_a_gpu_look_at_the_fastest_peer_and_at_the_copy(modules):
    summary = modules["summary"]
    results = [
        result_of(2.0, 2.0, function=name, sizes={"rows": 4000}) for name in ("softmax", "cross_entropy", "topk_softmax")
    ]
    for result in results:
        ours = result["providers"]["flash_online"]
        result["providers"]["quack"] = {f"{d}_ms": ours[f"{d}_ms"] * 1.05 for d in summary.DIRECTIONS}
        result["over_best"] = summary.over_best(result["providers"])
    targets = {target["target"]: target for target in summary.cuda_targets(results)}
    assert targets["softmax, log_softmax, x the fastest peer, forward"]["met"]
    assert targets["cross_entropy, x quack, step"]["mean"] == pytest.approx(1.05)
    assert not targets["cross_entropy, x quack, step"]["met"]  # 1.1 is wanted
    share = results[2]["providers"]["flash_online"]["forward_share"]
    assert targets["topk_softmax, 4000 rows, of the copy rate, forward"]["worst"] == share
    assert not any("10 rows" in name for name in targets)
    assert summary.cuda_targets([]) == []


def test_rows_of_any_width_have_a_line_per_width(modules, quick_record):
    summary, cases = modules["summary"], modules["cases"].ODD
    assert {case.sizes["classes"] for case in cases} >= {1, 31, 77, 50257}
    assert {str(case.dtype)[6:] for case in cases} == {"bfloat16", "float32"}
    assert all(case.sizes["rows"] * case.sizes["classes"] <= 1 << 26 for case in cases)
    results = []
    for case in cases:
        result = result_of(2.0, 1.0, function=case.family, dtype=str(case.dtype)[6:], sizes=case.sizes, case=case.label)
        result["providers"]["Liger"] = dict(result["providers"]["torch"], forward_ms=3.0)
        result["over_best"] = summary.over_best(result["providers"])
        results.append(result)
    facts = {name: quick_record[name] for name in ("device", "torch", "commit", "date", "seconds", "rounds")}
    record = facts | {"results": results, "targets": summary.odd_targets(results)}
    lines = [line for line in modules["row_pages"].odd_page(record) if line.startswith(("| 1 |", "| 77 |", "| 151936 |"))]
    assert len(lines) == 3 and all(line.count("1.50 / 1.00 (50 / 25)") == 8 for line in lines)
    met = {target["target"]: target["met"] for target in record["targets"]}
    assert met["x the fastest peer, forward"] and not met["x the fastest peer, backward"]
    assert not met["of the copy rate, forward"]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": "random"}, {"mask": "padding"}, {"window": 5}])
def test_flops_count_the_pairs_that_see_each_other(modules, options):
    case = modules["cases"].RowCase("attention", {"B": 2, "H": 3, "L": 16, "E": 8}, options, torch.float32)
    _, extras = case.inputs("cpu")
    visible = torch.ones(16, 16, dtype=torch.bool).tril() if "causal" in options else torch.ones(16, 16, dtype=torch.bool)
    visible = (extras[0] if extras else visible).expand(2, 3, 16, 16)
    assert case.flops("forward", extras) == 4 * 8 * int(visible.sum())
    assert case.flops("backward", extras) == 10 * 8 * int(visible.sum())
    if "window" in options:
        assert visible[0, 0].sum(-1).tolist() == [min(i + 1, 5) for i in range(16)]


def test_a_wrong_result_is_caught_before_it_is_timed(modules, monkeypatch):
    """A window one key wider than the mask that torch got; a peer that does not see the mask."""
    run, peers = modules["rows"], modules["peers"]
    case = modules["cases"].RowCase("attention", {"B": 1, "H": 1, "L": 64, "E": 16}, {"window": 8}, torch.float32)
    run.measure(case, "cpu", 0, 1)
    ours, flash = peers.PEERS["attention"]["flash_online"], peers.PEERS["attention"]["torch flash"]

    def wider(inputs, extras, options):
        return ours.call(inputs, extras, {"window": options["window"] + 1})

    def unmasked(inputs, extras, options):
        return flash.call(inputs, [], {})

    for name, provider in {"flash_online": wider, "torch flash": unmasked}.items():
        replaced = peers.Provider(provider, peers.PEERS["attention"][name].setting)
        with monkeypatch.context() as patch:
            patch.setitem(peers.PEERS["attention"], name, replaced)
            with pytest.raises(AssertionError, match=name):
                run.measure(case, "cpu", 0, 1)


def test_peers_that_are_not_there_are_unavailable_with_a_word(modules, monkeypatch):
    run, case = modules["rows"], modules["cases"].RowCase("softmax", {"rows": 4, "classes": 8}, dtype=torch.float32)
    monkeypatch.setitem(sys.modules, "quack", None)
    inputs, extras = case.inputs("cpu")
    providers = run.providers_on("softmax", "cuda")
    assert list(providers) == ["flash_online", "torch", "torch.compile", "quack", "Liger"]
    with pytest.raises(modules["peers"].Unavailable, match="quack"):
        providers["quack"].first_call(inputs, extras, {})
    assert list(run.providers_on("softmax", "cuda", ["quack"])) == ["flash_online", "quack"]
    assert list(run.providers_on("softmax", "cpu")) == ["flash_online", "torch"]


def test_a_peer_that_overwrites_its_input_works_on_a_copy(modules, monkeypatch):
    """With a stand-in for Liger that writes the gradient over the logits, as Liger does."""

    class Overwriting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, target, weight):
            loss = torch.nn.functional.cross_entropy(x, target)
            x.data.copy_((torch.softmax(x, -1) - torch.nn.functional.one_hot(target, x.shape[1])) / len(x))
            ctx.save_for_backward(x.detach())
            return loss, None

        @staticmethod
        def backward(ctx, grad, _):
            return ctx.saved_tensors[0].data.mul_(grad), None, None

    module = types.ModuleType("liger_kernel.ops.cross_entropy")
    module.LigerCrossEntropyFunction = Overwriting
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    run, peers = modules["rows"], modules["peers"]
    case = modules["cases"].RowCase("cross_entropy", {"rows": 16, "classes": 40}, dtype=torch.float32)
    monkeypatch.setitem(peers.PEERS["cross_entropy"], "Liger", run.CUDA_PEERS["cross_entropy"]["Liger"])
    result = run.measure(case, "cpu", 0, 2)
    assert result["unavailable"] == {} and result["providers"]["Liger"]["error"] < 1e-5
    assert result["over_best"]["step"]["peer"] in ("torch", "Liger")


def test_long_sequences_are_checked_at_some_queries(modules, monkeypatch):
    """The sampled check and the whole one agree on what is right."""
    run, case_of = modules["rows"], modules["cases"].RowCase
    monkeypatch.setattr(run, "CHECKED_IN_FULL", 256)
    for options in ({"causal": True}, {"window": 100}, {"mask": "random"}, {"bias": "per head"}):
        case = case_of("attention", {"B": 1, "H": 2, "L": 640, "E": 16}, options, torch.float32)
        assert len(run.Truth(case).rows) == 512
        entry = run.measure(case, "cpu", 0, 1)["providers"]["flash_online"]
        assert entry["error"] < 1e-5


def test_every_kind_that_the_issue_names_is_there(modules):
    cpu = modules["cases"].CPU
    for dtype in (torch.float32, torch.bfloat16):
        attention = [c for c in cpu if c.family == "attention" and c.dtype == dtype]
        assert {c.sizes["L"] for c in attention} == {512, 1024, 2048, 4096, 8192, 16384}
        assert {c.sizes["E"] for c in attention} == {64, 128}
        assert {"full", "causal", "mask random", "bias per head", "bias shared", "window 512"} <= {c.kind for c in attention}
        for function in ("softmax", "log_softmax", "cross_entropy", "topk_softmax"):
            classes = {c.sizes["classes"] for c in cpu if c.family == function and c.dtype == dtype}
            assert {1024, 32768, 262144} <= classes
    assert len({(c.family, c.label, c.dtype) for c in cpu}) == len(cpu)


def test_a_quick_run_records_everything(quick_record):
    facts = {
        "schema",
        "device",
        "commit",
        "package",
        "threads",
        "instruction_set",
        "memory",
        "load_at_start",
        "load_at_end",
        "noise",
    }
    assert facts <= quick_record.keys() and quick_record["wrong"] == 0
    assert {r["family"] for r in quick_record["results"]} >= {"attention", "softmax", "cross_entropy", "topk_softmax"}
    for result in quick_record["results"]:
        assert {"kind", "sizes", "options", "ratio", "unavailable"} <= result.keys()
        attention = result["family"] == "attention"
        baseline, unit = ("matmul", "gflop_per_s") if attention else ("copy", "gb_per_s")
        assert result[baseline][unit] > 0 and (attention or result["copy"]["new_gb_per_s"] > 0)
        assert len(result["providers"]) >= 2
        for entry in result["providers"].values():
            for direction in ("forward", "backward"):
                share = entry[f"{direction}_{unit}"] / result[baseline][unit]
                assert entry[f"{direction}_share"] == pytest.approx(share) and entry[f"{direction}_ms"] > 0
            assert 0 <= entry["error"] < 0.1 and entry["beyond_results_bytes"] < entry["step_extra_bytes"]
        theirs = result["providers"][result["ratio"]["against"]]
        expected = theirs["forward_ms"] / result["providers"]["flash_online"]["forward_ms"]
        assert result["ratio"]["forward"] == pytest.approx(expected)
    learned = [r for r in quick_record["results"] if r["options"].get("bias") in ("shared", "per head")]
    assert learned and all(
        r["ratio"]["against"] == "torch math" and "requires grad" in r["unavailable"]["torch flash"] for r in learned
    )
    assert {rate > 0 for rates in quick_record["matmul"].values() for rate in rates.values()} == {True}
    assert sum(e["cases"] for e in quick_record["summary"]) == len(quick_record["results"])
    assert quick_record["targets"] and all(math.isfinite(m.get("mean", 0)) for m in quick_record["targets"])


def test_report_makes_tables_of_it(modules, quick_record):
    report = modules["row_pages"]
    lines = report.case_page(quick_record)
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) > 10 and not any("None" in line or "nan" in line for line in rows)
    widths, previous = set(), ""
    for line in lines:
        if line.startswith("|"):
            columns = line.count(" | ")
            if not previous.startswith("|"):
                widths = {columns}
            assert columns in widths, line
        previous = line
    assert any("attention, bias shared | torch math | 1" in line for line in lines)


def paper_record(modules):
    """Of a chip on which a pass over a row takes 1 ns an element, and rows of 2000 do not fit beside ten others."""
    results = []
    for rows in (4000, 10):
        for classes in (63, 1000, 25000):
            pass_us = 1e-3 * rows * classes
            top = {"unfused": 5 * pass_us, "safe, fused": 2 * pass_us, "online, fused": pass_us, "flash_online": pass_us / 2}
            us = {"softmax": {"safe": 4 * pass_us, "naive": 3 * pass_us, "online": 3 * pass_us, "flash_online": 2 * pass_us}}
            us |= {f"top {k}": top for k in modules["paper.build"].KS}
            results.append({"sizes": {"rows": rows, "classes": classes}, "us": us, "error": {}, "copy_us": 2 * pass_us})
    results[2] = {"sizes": results[2]["sizes"], "us": {}, "error": {}, "too_large": "3 tensors of its size take 99 GiB"}
    return {"device": "a chip", "torch": "2", "commit": "c", "date": "d", "results": results}


def test_the_papers_tables_count_passes(modules):
    lines = modules["row_pages"].paper_page(paper_record(modules))
    assert (
        "| softmax, online over safe | up to 1.3 | 1.33 (V 1000) to 1.33 (V 1000) | 1.33 (V 1000) to 1.33 (V 1000) |" in lines
    )
    assert "| 1000 | 16000 | 1.33 | 1.33 | 2.00 | 40 | 1.33 | 1.33 | 2.00 |" in lines
    assert "| 1000 | 20000 | 2.50 | 5.00 | 10 | 0.50 | 50 | 2.50 | 5.00 | 10 | 0.50 |" in lines
    assert "| 25000 | 30 | - | - | - | - | - | 1250 | 2.50 | 5.00 | 10 | 0.50 |" in lines
    assert lines[-1] == "Too large for this GPU: V 25000 at batch 4000 (3 tensors of its size take 99 GiB)."


def test_the_papers_curves_are_drawn(modules, tmp_path):
    pytest.importorskip("matplotlib")
    importlib.import_module("benchmarks.figures").draw("paper", paper_record(modules), tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {"paper_softmax.png", "paper_top.png"}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_papers_kernels_are_built_once_for_their_sources(modules, monkeypatch, tmp_path):
    nvcc, sources = modules["nvcc"], modules["paper.build"].SOURCES
    includes = nvcc.ROOT / "csrc"
    monkeypatch.setattr(nvcc, "ROOT", tmp_path)
    (tmp_path / "csrc").symlink_to(includes)
    library = nvcc.build("paper", sources, "sm_90")
    written = library.stat().st_mtime_ns
    assert nvcc.build("paper", sources, "sm_90") == library and library.stat().st_mtime_ns == written
    (tmp_path / "other.h").write_text("")
    monkeypatch.setattr(nvcc, "FLAGS", ["--no-such-flag"])
    with pytest.raises(nvcc.Missing, match="no-such-flag"):
        nvcc.build("paper", [*sources, tmp_path / "other.h"], "sm_90")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_paper_says_so(modules, tmp_path, capsys):
    assert modules["paper.measure"].run(True, {}, tmp_path / "paper.json") == 2
    assert "need a CUDA GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.skipif(not torch.cuda.is_available() or shutil.which("nvcc") is None, reason="needs a GPU and nvcc")
@pytest.mark.parametrize("rows, classes", [(3, 63), (70, 1025), (5, 4099), (2, 300001)])
def test_the_papers_kernels_are_right(modules, rows, classes):
    measure = modules["paper.measure"]
    result = measure.measure(measure.case_of(rows, classes), measure.Kernels(), 0, 1)  # raises where one is wrong
    assert {name for names in result["us"].values() for name in names} >= {
        "naive",
        "safe",
        "online",
        "unfused",
        "online, fused",
    }
    assert all(t > 0 for names in result["us"].values() for t in names.values())


def test_a_wrong_result_of_the_papers_kernels_is_caught(modules):
    rows = modules["paper.measure"].Rows(4, 100, "cpu")
    values, indices = rows.expected.topk(5)
    assert rows.error("right", values.float(), indices) < 1e-6
    with pytest.raises(AssertionError, match="indices"):
        rows.error("wrong", values.float(), indices.roll(1, -1))
    with pytest.raises(AssertionError, match="off by"):
        rows.error("wrong", values.float() * 1.001, indices)
    softmax = torch.softmax(rows.x, -1)
    assert rows.error("right", softmax, None) < 1e-6
    with pytest.raises(AssertionError, match="sums to"):
        rows.error("unwritten", softmax.index_fill(1, torch.tensor([7]), torch.nan), None)


def test_the_bytes_that_an_organisation_asks_for(modules):
    """Counted out: what each tile and each block of a head of 256 queries and keys loads and stores."""
    family = modules["family.summary"]
    sizes, row = {"B": 2, "H": 3, "L": 256, "E": 64}, 2 * 64
    kept = 4 * (64 + 2) * 64  # O, m and l of a tile
    tile, block = 64 * row, 2 * 128 * row  # queries; keys and values
    tensor = 256 * row
    cases = {
        ("v1", False, 1): (8 * tile + 2 * block + 4 * kept, 4 * kept + tensor),
        # The tiles see 1, 1, 2 and 2 blocks; of two stripes each loads both blocks, of four the first two load one.
        ("v1", True, 1): (6 * tile + 2 * block + 2 * kept, 2 * kept + tensor),
        ("v1, striped", True, 2): (6 * tile + 4 * block + 2 * kept, 2 * kept + tensor),
        ("v1, striped", True, 4): (6 * tile + 6 * block + 2 * kept, 2 * kept + tensor),
        ("v2", False, 4): (4 * tile + 8 * block, tensor),
        ("v2, warps by keys", True, 4): (4 * tile + 5 * block, tensor),
        ("torch efficient", False, None): (16 * tile + 8 * block, tensor),
        ("flash_online", False, None): (4 * tile + 4 * block, tensor),
    }
    for (name, causal, ctas), (read, written) in cases.items():
        found = family.asked(name, sizes, causal, {"ctas_per_head": ctas})
        assert (found.read, found.written) == (6 * read, 6 * written), (name, causal)
    assert family.asked("Triton", sizes, False, {"tile": {"queries": 128}}).read == 6 * (4 * tile + 4 * block)
    assert family.asked("FlexAttention", sizes, False, {}) is None
    assert vars(family.least(sizes)) == {"read": 6 * 3 * tensor, "written": 6 * tensor}


def test_the_family_page_quotes_its_arithmetic(modules):
    family, number = modules["family.summary"], modules["tables"].number
    sizes = {"B": 4, "H": 16, "L": 4096, "E": 128}
    text = " ".join((REPOSITORY / "docs" / "design" / "family.md").read_text().split())
    v1, v2 = (family.asked(name, sizes, False, {"ctas_per_head": 1}) for name in ("v1", "v2"))
    assert f"version 1 reads {number(v1.read / 1e9)} GB and writes {number(v1.written / 1e9)} GB" in text
    assert f"version 2 reads {number(v2.read / 1e9)} GB and writes {number(v2.written / 1e9)} GB" in text
    assert f"DRAM delivers each tensor once: {number(family.least(sizes).read / 1e9)} GB" in text
    per_head = 4096 * (2 * 128 + 4 * (128 + 2))
    assert f"{per_head / 1e6:.1f} MB of $Q$, $O$, $m$ and $l$ per head, {64 * per_head / 1e6:.0f} MB in all" in text


def profile_lines(*kernels: str):
    """A profile as ncu writes it: two metrics of each kernel, 1000 bytes from DRAM and 10 sectors of L2."""
    head = '"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"'
    metrics = {"dram__bytes_read.sum": ("byte", "1,000"), "lts__t_sectors_srcunit_tex_op_read.sum": ("sector", "10")}
    rows = (
        f'"{n}","1","void {kernel}(int)","Command line profiler metrics","{metric}","{unit}","{value}"'
        for n, kernel in enumerate(kernels)
        for metric, (unit, value) in metrics.items()
    )
    return ["==PROF== Connected to process 1", head, *rows, "==PROF== Disconnected"]


def test_a_profile_is_cut_into_providers(modules):
    bytes_of, names = modules["family.traffic"].bytes_of, [["v1", "torch math"], ["v1"]]
    begins = "<unnamed>::provider_begins"
    found = bytes_of(profile_lines(begins, "a", begins, "b", "c", begins, "a"), names)
    one = {"kernels": 1, "dram_read": 1000, "dram_written": 0, "l2_read": 320, "l2_written": 0, "l2_all": 0}
    assert found == [{"v1": one, "torch math": {key: 2 * value for key, value in one.items()}}, {"v1": one}]
    with pytest.raises(ValueError, match="expected 3"):
        bytes_of(profile_lines(begins, "a", begins, "b"), names)
    with pytest.raises(ValueError, match="expected 3"):
        bytes_of(profile_lines(begins, "a", begins, begins, "a"), names)
    with pytest.raises(ValueError, match="no provider"):
        bytes_of(profile_lines("a", begins, "b"), names)


def family_record(modules, traffic: dict):
    measure, summary = modules["family.measure"], modules["family.summary"]
    results = []
    for cell in measure.CELLS:
        result = cell.head() | {"matmul": {"tflop_per_s": 800.0}, "least": vars(summary.least(cell.sizes))}
        for n, name in enumerate(("v1", "v2", "flash_online"), 1):
            asked = summary.asked(name, cell.sizes, cell.options["causal"], {"ctas_per_head": 1})
            result["providers"][name] = {"tflop_per_s": 100.0 * n, "ms": 1.0, "asked": vars(asked)}
        result["unavailable"]["FA3"] = "no binary"
        results.append(result)
    return {"device": "a chip", "torch": "2", "commit": "c", "date": "d", "results": results, "traffic": traffic}


def test_the_familys_tables(modules):
    counted = {"kernels": 1, "l2_read": 7 * 10**9, "l2_written": 10**9, "dram_read": 2 * 10**9, "dram_written": 10**8}
    profiled = [
        {"case": cell.label, "kind": cell.kind, "providers": {"v1": counted, "flash_online": counted}}
        for cell in modules["family.measure"].profiled_cells(False)
    ]
    lines = modules["attention_pages"].family_page(family_record(modules, {"command": "ncu", "results": profiled}))
    assert aligned(lines) and not any("None" in line or "nan" in line for line in lines)
    (head,) = (line for line in lines if line.startswith("| forward, TFLOP/s"))
    assert "at L 1024 / 4096 / 16384 | E 64, full | E 64, causal | E 128, full | E 128, causal |" in head
    assert "| v2 | 200 / 200 / 200 | 200 / 200 / 200 | 200 / 200 / 200 | 200 / 200 / 200 |" in lines
    assert "| v1 | 6.51 / 4.29 | 7 / 1 | 2 / 0.1 | 1 |" in lines and "| v2 | 8.66 / 0.0671 | - | - | - |" in lines
    assert sum(line.endswith("| kernels |") for line in lines) == 2
    assert any(line.startswith("FA3, ") and line.endswith(": no binary.") for line in lines)
    lines = modules["attention_pages"].family_page(family_record(modules, {"command": "ncu", "unavailable": "no counters"}))
    assert aligned(lines) and lines[-1] == "The profiler counted nothing: no counters."
    assert "| v1 | 6.51 / 4.29 |" in lines and not any("kernels" in line for line in lines)


def test_a_profiler_that_fails_is_named(modules, tmp_path):
    """In the record, beside the command; the times are kept."""
    traffic, cells = modules["family.traffic"], modules["family.measure"].QUICK
    program = tmp_path / "ncu"
    program.write_text("#!/bin/sh\necho '==ERROR== no permission'\nexit 1\n")
    program.chmod(0o755)
    found = traffic.profile(str(program), cells, True)
    assert found["unavailable"] == "==ERROR== no permission" and found["command"].startswith("ncu --clock-control none")
    assert "FileNotFoundError" in traffic.profile(str(tmp_path / "missing"), cells, True)["unavailable"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_family_says_so(modules, tmp_path, capsys):
    assert modules["family.measure"].run(True, {}, tmp_path / "family.json", None) == 2
    assert "need a CUDA GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.skipif(not torch.cuda.is_available() or shutil.which("nvcc") is None, reason="needs a GPU and nvcc")
def test_a_cell_of_the_family_on_a_gpu(modules):
    measure = modules["family.measure"]
    for cell in measure.QUICK:
        result = measure.measure(cell, measure.Kernels(), 0, 1)  # raises where one of ours is wrong
        assert set(result["providers"]) >= {"v1", "v1, striped", "v2, warps by keys", "v2", "flash_online", "torch math"}
        assert all(entry["ms"] > 0 for entry in result["providers"].values())


INTERPRETED = """
import torch
from benchmarks.family import triton_attention as ours
for causal in (False, True):
    query, key, value = (torch.randn(1, 2, 256, 64, generator=torch.Generator().manual_seed(n)).half() for n in range(3))
    truth = torch.nn.functional.scaled_dot_product_attention(query.double(), key.double(), value.double(), is_causal=causal)
    for queries, keys in ((128, 64), (64, 64), (128, 128)):
        out = ours.attention(query, key, value, causal, kernel=ours.forward, QUERIES=queries, KEYS=keys)
        torch.testing.assert_close(out.double(), truth, atol=2e-3, rtol=0)
"""


def test_fused_attention_in_triton():
    """By Triton's interpreter, in a process of its own, and in float16, since it multiplies no bfloat16."""
    pytest.importorskip("triton")
    numpy = pytest.importorskip("numpy")
    if tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip("Triton's interpreter takes arrays of one element for numbers, as numpy did before 2.4")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], cwd=REPOSITORY, env=environment, check=True)


def test_communication_beside_computation(modules):
    stage, seconds = modules["scaling"].Stage, modules["scaling"].seconds
    assert seconds([stage(2, 3, 1)]) == 6
    assert seconds([stage(2, 3), stage(1, 3), stage(4, 3)]) == 12  # arrivals end at 2, 3 and 9: the third after computation 0
    assert seconds([stage(1, 1, 5), stage(1, 1, 5)]) == 12  # departures bound it
    assert seconds([stage(0, 1)] * 7) == 7


def test_the_page_of_scaling_has_its_tables(modules):
    page = (REPOSITORY / "docs" / "distributed_scaling.md").read_text()
    assert modules["scaling"].tables() in page


@pytest.mark.parametrize("gpus", [1, 8, 64])
def test_shares_of_ideal(modules, gpus):
    scaling = modules["scaling"]
    model = scaling.Model(scaling.Cluster(), scaling.Problem(1 << 20, gpus))
    plans = {name: plan for name, plan in model.plans() if plan}
    assert ("Ulysses" in plans) == (gpus <= 32)
    for name, plan in plans.items():
        assert 0 < model.share(plan) <= 1 and plan.held >= 0, name
        work = sum(stage.computation for stage in plan.forward + plan.backward)
        assert work == pytest.approx(model.forward + model.backward), name


def test_the_cells_of_attention(modules):
    cells = modules["attention.cases"].CELLS
    plain = cells["plain"]
    assert len(plain) == 36 and {c.sizes["E"] for c in plain} == {64, 128, 256}
    assert all(c.sizes["B"] * c.sizes["L"] == 16384 and c.sizes["H"] * c.sizes["E"] == 2048 for c in plain)
    assert [sum(c.lengths) for c in cells["packed"]] == [c.sizes["T"] for c in cells["packed"]] and len(cells["packed"]) == 8
    for of_group in cells.values():
        assert len({(c.label, c.kind, c.dtype) for c in of_group}) == len(of_group)
    kinds = {c.kind for c in cells["features"]}
    assert kinds >= {
        "bool mask",
        "bias with gradient",
        "dropout",
        "float32",
        "GQA",
        "window",
        "softcap",
        "ALiBi",
        "deterministic",
    }
    for target in modules["attention.summary"].TARGETS:  # a target of no cell would never be judged
        chosen = [c for group in cells.values() for c in group]
        assert any(
            target.members({"family": c.family, "kind": c.kind, "sizes": c.sizes, "options": c.options}) for c in chosen
        ), target


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": True, "window": 5}, {"causal": True, "window": 500}]
    + [{"mask": kind} for kind in ("random", "padding", "blocks")]
    + [{"bias": "frozen"}],
    ids=str,
)
def test_flops_of_attentions_cells(modules, options):
    cases = modules["attention.cases"]
    problem = cases.Problem(cases.Cell("features", {"B": 2, "H": 2, "L": 128, "E": 8, "Ev": 4}, options), "cpu")
    visible = torch.ones(128, 128, dtype=torch.bool).tril(0 if "causal" in options else 127).triu(-options.get("window", 127))
    if "mask" in options:
        visible = problem.mask.expand(2, 2, 128, 128)
        assert 0.2 < visible.float().mean() < 0.9
    pairs = int(visible.expand(2, 2, 128, 128).sum())
    assert problem.visible_pairs() == pairs
    assert problem.flops("forward") == pairs * 2 * (8 + 4) and problem.flops("backward") == pairs * (6 * 8 + 4 * 4)


def fake_fa3():
    """Operators of its names, arguments and layouts, by the plain reference."""
    from flash_online import reference

    def attend(q, k, v, softmax_scale, is_causal, softcap, window_size_left=-1, window_size_right=-1, **packed):
        window = (window_size_left, window_size_right) if window_size_left >= 0 else None
        options = {"scale": softmax_scale, "causal": is_causal, "softcap": softcap, "window": window}
        if packed:
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            return reference.varlen_attention(q, k, v, *(packed[name] for name in names), **options)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return reference.attention(q, k, v, alignment="lower_right", **options).transpose(1, 2)

    def fwd(q, k, v, *, num_splits, **options):
        return attend(q, k, v, **options), None, None, None

    def bwd(dout, q, k, v, out, softmax_lse, *, dq, dk, dv, deterministic, **options):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad():
            grads = torch.autograd.grad(attend(*leaves, **options), leaves, dout)
        for into, grad in zip((dq, dk, dv), grads, strict=True):
            into.copy_(grad)

    return types.SimpleNamespace(fwd=fwd, bwd=bwd)


@pytest.mark.slow
def test_every_provider_solves_the_cells_problem(modules, monkeypatch):
    """The quick cells, with a stand-in for FlashAttention-3, whose layout is another."""
    measure, peers = modules["attention.measure"], modules["attention.peers"]
    monkeypatch.setattr(torch.ops, "flash_attn_3", fake_fa3(), raising=False)
    monkeypatch.setattr(peers, "_load_library", lambda path: None)
    monkeypatch.setenv(peers.FA3_VARIABLE, "fa3.so")
    measured = 0
    for cell in modules["attention.cases"].QUICK:
        result = measure.measure(cell, "cpu", 0, 1, ["FA3", "torch math"])
        assert not any("wrong" in reason for reason in result["unavailable"].values()), result["unavailable"]
        assert set(result["providers"]) >= {"flash_online"}
        if not cell.options.keys() & {"mask", "bias", "alibi", "dropout"}:
            assert result["providers"]["FA3"]["error"] < 0.02 and "backward_ms" in result["providers"]["FA3"]
            measured += 1
    assert measured == 6


@pytest.mark.parametrize("kind", ["block-sparse mask", "window", "ALiBi"])
def test_flex_attention_solves_the_cells_problem(modules, monkeypatch, kind):
    """Uncompiled, on the CPU, where it has no backward pass."""
    cases, measure = modules["attention.cases"], modules["attention.measure"]
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    problem = cases.Problem(next(cell for cell in cases.QUICK if cell.kind == kind), "cpu")
    expected = measure.expected(problem, torch.float64)
    for leaf in problem.leaves:
        leaf.requires_grad_(False)
    problem.device = "cuda"
    (out,) = problem.parts([modules["attention.peers"].flex(problem).run()])
    torch.testing.assert_close(out.double(), expected[0], atol=1e-4, rtol=1e-4)


def test_wrong_results_of_attention_are_caught(modules, monkeypatch):
    """Of a peer: it is unavailable. Of ours: the cell is not timed."""
    measure, peers, cases = modules["attention.measure"], modules["attention.peers"], modules["attention.cases"]
    cell = cases.Cell("features", {"B": 1, "H": 2, "L": 128, "E": 16}, {"mask": "random"}, torch.float32, "bool mask")
    right, flash = peers.PROVIDERS["flash_online"], peers.PROVIDERS["torch flash"]

    def unmasked(provider):
        def make(problem):
            other = problem.without()
            other.mask = torch.ones_like(problem.mask)
            call = provider(other)
            return peers.Call(problem, call.run, call.leaves, call.grad, call.setting)

        return make

    monkeypatch.setitem(peers.PROVIDERS, "torch flash", unmasked(flash))
    result = measure.measure(cell, "cpu", 0, 1)
    assert "wrong here" in result["unavailable"]["torch flash"] and "torch flash" not in result["providers"]
    monkeypatch.setitem(peers.PROVIDERS, "flash_online", unmasked(right))
    with pytest.raises(AssertionError, match="bool mask .*flash_online: output"):
        measure.measure(cell, "cpu", 0, 1)
    dropout = cases.Cell("features", {"B": 2, "H": 4, "L": 128, "E": 16}, {"dropout": 0.5}, torch.float32, "dropout")
    monkeypatch.setitem(peers.PROVIDERS, "flash_online", lambda problem: right(problem.without("dropout")))
    with pytest.raises(AssertionError, match="kept weights sum"):
        measure.measure(dropout, "cpu", 0, 1)


def attention_result(kind, case, providers, group="features", **sizes):
    """Providers: name -> (forward, backward) milliseconds."""
    entries = {
        name: {f"{d}_{key}": value for d, ms in zip(("forward", "backward"), both, strict=True) for key, value in values(ms)}
        for name, both in providers.items()
    }
    for entry in entries.values():
        entry |= {"error": 1e-3, "step_extra_bytes": 900 << 20, "beyond_results_bytes": 1 << 20}
    facts = {"family": group, "kind": kind, "case": case, "sizes": sizes, "options": {}, "dtype": "bfloat16"}
    return facts | {"providers": entries, "unavailable": {"torch math": "too large"}, "matmul": {"tflop_per_s": 800.0}}


def values(ms):
    return (("ms", ms), ("tflop_per_s", 100 / ms), ("share", 0.125 / ms))


def test_attentions_targets_and_means(modules):
    tables = modules["attention.summary"]
    peers = {"FA3": (1.0, 2.0), "cuDNN": (2.0, 1.0), "torch flash": (4.0, 4.0), "torch math": (0.1, 0.1)}
    results = [
        attention_result("E 64, full", "a", {"flash_online": (0.5, 2.0)} | peers, "plain", E=64, L=512),
        attention_result("E 64, full", "b", {"flash_online": (2.0, 0.5)} | peers, "plain", E=64, L=2048),
        attention_result("block-sparse mask", "c", {"flash_online": (1.0, 1.0), "flash_online, all visible": (3.0, 2.0)}),
        attention_result("bias with gradient", "d", {"flash_online": (1.0, 1.0), "torch efficient": (1.9, 3.5)}),
    ]
    targets = {target["target"]: target for target in tables.targets(results)}
    best = targets["plain, x FA3 and cuDNN, forward"]
    assert best["mean"] == pytest.approx(1.0) and best["worst"] == pytest.approx(0.5) and not best["met"]
    assert best["worst_case"] == "b, bfloat16" and best["cases"] == 2
    assert targets["plain, L <= 1024, x FA3 and cuDNN, backward"]["worst"] == pytest.approx(0.5)
    assert targets["plain, x torch flash, forward"]["met"] and targets["plain, x torch flash, backward"]["met"]
    assert targets["block-sparse mask, x flash_online, all visible, forward"]["met"]
    assert not targets["block-sparse mask, x flash_online, all visible, backward"]["met"]
    assert targets["bias with gradient, x torch efficient, backward"]["met"]
    assert targets["masks, biases, dropout, x torch efficient, forward"]["met"]
    assert targets["memory of a step, d"]["measured"] == pytest.approx(900) and targets["memory of a step, d"]["met"]
    plain, sparse, _ = tables.summarize(results)
    assert plain["forward"]["over"]["FA3"] | {"cases": 2, "peer": "FA3"} == plain["forward"]["over"]["FA3"]
    assert plain["forward"]["over_best"]["worst_case"] == "b" and plain["backward"]["over_best"]["peer"] == "cuDNN"
    assert plain["forward"]["tflop_per_s"] == pytest.approx(100) and sparse["forward"]["over_best"] is None


def aligned(lines):
    """Every table has as many cells in each row."""
    previous, columns = "", 0
    for line in lines:
        if line.startswith("|"):
            columns = columns if previous.startswith("|") else line.count(" | ")
            assert line.count(" | ") == columns, line
        previous = line
    return True


@pytest.mark.slow
def test_a_quick_run_of_attention_and_its_pages(modules, attention_record, tmp_path):
    record, cells = attention_record, modules["attention.cases"].QUICK
    assert record["wrong"] == 0 and len(record["results"]) == len(cells)
    for result in record["results"]:
        ours = result["providers"]["flash_online"]
        assert ours["forward_ms"] > 0 and ours["backward_tflop_per_s"] > 0 and ours["error"] < 0.02
        assert ours["forward_share"] == pytest.approx(ours["forward_tflop_per_s"] / result["matmul"]["tflop_per_s"])
        assert "error" not in result["providers"].get("FA3", ()) and result["unavailable"]["FA3"]
    report = modules["attention_pages"]
    lines = report.attention_page(record)
    assert aligned(lines) and not any("None" in line or "nan" in line for line in lines)
    assert any(line.startswith("- FA3 (2)") for line in lines)
    pytest.importorskip("matplotlib")
    importlib.import_module("benchmarks.figures").draw("attention", record, tmp_path)
    assert (tmp_path / "attention_plain.png").stat().st_size > 10000


def test_the_cells_of_cached_keys(modules):
    cells, summary, peers = (modules[f"decode.{name}"] for name in ("cases", "summary", "peers"))
    chosen = [cell for family in cells.CELLS.values() for cell in family]
    assert len({cell.title for cell in chosen}) == len(chosen) and cells.CELLS.keys() == summary.FAMILIES.keys()
    assert {cell.family for cell in cells.QUICK} == cells.CELLS.keys() == peers.IN_FAMILY.keys()
    for family, of_family in cells.CELLS.items():
        assert {cell.family for cell in of_family} == {family}
    results = [{"family": c.family, "kind": c.kind, "sizes": c.sizes, "options": c.options} for c in chosen]
    for target in (*summary.FASTER, *summary.BESIDE):  # a target of no cell would never be judged
        assert any(map(target.members, results)), target
    for target in summary.BESIDE:  # nor would one of a form that is not measured there
        members = [c for c, r in zip(chosen, results, strict=True) if target.members(r)]
        assert members and all(target.other in peers.providers(cell) for cell in members), target
    (drawn,) = (cell.lengths for cell in chosen if cell.lengths)
    assert len(drawn) == 64 and 64 <= min(drawn) < 128 and 16384 < max(drawn) <= 32768
    lone, gpt_oss, mla = (next(c for c in chosen if c.kind == kind) for kind in ("one query", "gpt-oss", "16 heads"))
    assert lone.bytes_read() == 2 * 4096 * 8 * 128 * 2 and lone.flops() == 4 * 32 * 4096 * 128
    assert gpt_oss.bytes_read() == 64 * 2 * 128 * 8 * 64 * 2
    assert mla.bytes_read() == 64 * 4096 * 576 * 2 and mla.flops() == 2 * 64 * 16 * 4096 * (576 + 512)
    shared = next(c for c in chosen if c.kind == "one prompt")
    assert shared.bytes_read() == 2 * (1024 + 8 * 512) * 8 * 128 * 2 and shared.flops() == 4 * 8 * 32 * 1536 * 128
    assert cells.Cell("prefill", {"B": 2, "H": 1, "Hkv": 1, "S": 7, "L": 3, "E": 1}).flops() == 2 * 4 * (5 + 6 + 7)


def test_sets_of_cached_keys_fill_more_than_a_cache(modules):
    """In other numbers each, and pools as engines keep them."""
    cases = modules["decode.cases"]
    cell = next(c for c in cases.QUICK if c.kind == "page 16")
    problem = cases.Problem(cell, "cpu", 3 * cell.bytes_read() - 1)
    first, *others = problem.sets
    assert len(others) == 2 and not any(torch.equal(first.key_cache, other.key_cache) for other in others)
    assert first.key_cache.shape == (15, 2, 16, 32) and first.key_cache.transpose(1, 2).is_contiguous()
    assert sorted(problem.table.flatten().tolist()) == list(range(15)) != problem.table.flatten().tolist()
    gathered = problem.gathered().sets[1]
    assert gathered.value_cache.shape == (3, 2, 80, 32) and gathered.value_cache.is_contiguous()
    assert torch.equal(gathered.key_cache[2, 1, 16:32], others[0].key_cache[problem.table[2, 1], 1])
    ragged = cases.Problem(next(c for c in cases.QUICK if c.kind == "lengths"), "cpu")
    prefixed = cases.Problem(next(c for c in cases.QUICK if c.kind == "one prompt"), "cpu")
    assert prefixed.blocks == 2 + 3 * 3 and len(prefixed.table.unique()) == 11
    assert (prefixed.table[:, :2] == prefixed.table[0, :2]).all()
    assert ragged.lengths.tolist() == [80, 1, 33] and ragged.blocks == 5 + 1 + 3 and ragged.table.shape == (3, 5)


def fake_cached_peers():
    """FlashAttention-3's operator and FlashInfer's wrapper, by their names, arguments and layouts and the plain reference."""
    from flash_online import reference

    def fwd(q, k, v, *, softmax_scale, is_causal, num_splits, window_size_left=-1, **options):
        names = {
            "seqused_k": "cache_seqlens",
            "page_table": "block_table",
            "k_descale": "key_scale",
            "v_descale": "value_scale",
        }
        known = {ours: options.pop(theirs) for theirs, ours in names.items() if theirs in options}
        new = {
            ours: options.pop(theirs).transpose(1, 2)
            for theirs, ours in (("k_new", "key"), ("v_new", "value"))
            if theirs in options
        }
        if "rotary_cos" in options:
            known["rotary"] = (options.pop("rotary_cos"), options.pop("rotary_sin"), options.pop("is_rotary_interleaved"))
        if "q_v" in options:
            q, k = torch.cat([options.pop("q_v"), q], -1), torch.cat([v, k], -1)
        window = (window_size_left, options.pop("window_size_right")) if window_size_left >= 0 else None
        assert not options and num_splits == 0 and is_causal
        if k.dtype == torch.float8_e4m3fn:
            assert q.dtype == k.dtype
            q = q.bfloat16()
        lengths = known.pop("cache_seqlens", None)
        out = reference.kvcache_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), lengths, scale=softmax_scale, window=window, **known, **new
        )
        return out.transpose(1, 2), None, None, None

    class Wrapper:
        def __init__(self, workspace, layout, **_):
            assert layout == "NHD"

        def plan(self, *arguments, window_left, **types):
            *self.queries, self.starts, self.pages, self.last, _, _, _, self.page = arguments
            self.window = None if window_left < 0 else (window_left, 0)

        def run(self, q, caches):
            counts = self.starts.diff().tolist()
            table = torch.nn.utils.rnn.pad_sequence(self.pages.split(counts), batch_first=True)
            lengths = (self.starts.diff() - 1) * self.page + self.last
            batch = len(counts)
            dense = q.unflatten(0, (batch, -1)).transpose(1, 2)
            pools = (t.transpose(1, 2) for t in caches)
            out = reference.kvcache_attention(dense, *pools, lengths.int(), block_table=table.int(), window=self.window)
            return out.transpose(1, 2).flatten(0, 1)

    class Prefill(Wrapper):
        def plan(self, *arguments, causal, **options):
            assert causal
            super().plan(*arguments, **options)

    flashinfer = types.ModuleType("flashinfer")
    flashinfer.BatchDecodeWithPagedKVCacheWrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper = Wrapper, Prefill
    return types.SimpleNamespace(fwd=fwd), flashinfer


@pytest.mark.slow
def test_every_provider_of_cached_keys_solves_the_cells_problem(modules, monkeypatch):
    """The quick cells, with stand-ins for the peers that are not installed."""
    measure, cases = modules["decode.measure"], modules["decode.cases"]
    fa3, flashinfer = fake_cached_peers()
    monkeypatch.setattr(torch.ops, "flash_attn_3", fa3, raising=False)
    monkeypatch.setattr(modules["attention.peers"], "_load_library", lambda path: None)
    monkeypatch.setenv(modules["attention.peers"].FA3_VARIABLE, "fa3.so")
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    solved = {}
    for cell in cases.QUICK:
        result = measure.measure(cell, "cpu", 0, 1)
        assert not any(
            "wrong" in reason or "Error" in reason for name, reason in result["unavailable"].items() if name != "cuDNN"
        )
        solved[cell.kind] = result["providers"].keys()
    ours = "flash_online"
    assert solved["one query"] - {"cuDNN"} == {ours, "FA3", "FA3, without lengths", "torch flash"}
    assert solved["page 16"] == solved["lengths"] == {ours, "FA3", "FlashInfer"} and solved["gpt-oss"] == {ours}
    assert solved["many sequences"] == {ours, f"{ours}, 16-bit caches", "FA3", "FA3, without lengths"}
    assert solved["16 heads"] == {ours, "FA3"} and solved["one row"] == {ours, f"{ours}, without append", "FA3"}
    assert solved["in chunks, paged"] == {ours, f"{ours}, contiguous", "FA3", "FlashInfer"}
    assert solved["a number given"] == {ours, f"{ours}, num_splits None"}
    assert solved["one prompt"] == {ours, f"{ours}, repeated pages", "FA3", "FlashInfer"}


def test_wrong_results_over_cached_keys_are_caught(modules, monkeypatch):
    """Of a peer: it is unavailable. Of ours: the cell is not timed."""
    measure, peers, cases = (modules[f"decode.{name}"] for name in ("measure", "peers", "cases"))
    cell = next(cell for cell in cases.QUICK if cell.kind == "one query")
    flash, ours = peers.PROVIDERS["torch flash"], peers.PROVIDERS["flash_online"]

    def shorter(provider):
        def make(problem):
            other = problem.without()
            other.sets = [cases.Tensors(one.query, one.key_cache[:, :, 1:], one.value_cache[:, :, 1:]) for one in problem.sets]
            return provider(other)

        return make

    monkeypatch.setitem(peers.PROVIDERS, "torch flash", shorter(flash))
    result = measure.measure(cell, "cpu", 0, 1)
    assert "wrong here" in result["unavailable"]["torch flash"] and "torch flash" not in result["providers"]
    monkeypatch.setitem(peers.PROVIDERS, "flash_online", shorter(ours))
    with pytest.raises(AssertionError, match="one query .*flash_online, sequence and key head"):
        measure.measure(cell, "cpu", 0, 1)


def decode_result(family, kind, us, *, wanted=None, **sizes):
    """A result of providers -> microseconds, of calls that read 100 MB beside reads of 4 TB/s."""
    providers = {
        name: {"us": taken, "gb_per_s": 1e5 / taken, "share": 25 / taken, "tflop_per_s": 1.0, "error": 1e-3}
        for name, taken in us.items()
    }
    facts = {"family": family, "kind": kind, "case": f"{kind} {sizes}", "sizes": sizes, "options": {}, "dtype": "bfloat16"}
    facts |= {"wanted_us": wanted, "known_us": None, "bytes": 10**8, "read": {"gb_per_s": 4000.0, "by": "a kernel"}}
    return facts | {"providers": providers, "unavailable": {"FlashInfer": "not there"}}


def test_the_targets_and_means_of_cached_keys(modules):
    summary = modules["decode.summary"]
    ours = "flash_online"
    results = [
        decode_result(
            "plain", "one query", {ours: 50.0, "FA3": 100.0, "cuDNN": 60.0}, wanted=49, B=1, H=32, Hkv=8, S=4096, E=128
        ),
        decode_result("plain", "one query", {ours: 50.0, "FA3": 25.0}, wanted=50, B=2, H=32, Hkv=8, S=4096, E=128),
        decode_result("options", "lengths", {ours: 10.0, "FA3": 11.0, "FlashInfer": 9.0}),
        decode_result("float8", "many sequences", {ours: 50.0, f"{ours}, 16-bit caches": 100.0}),
        decode_result("append", "one row", {ours: 12.0, f"{ours}, without append": 10.0}, B=1),
        decode_result("append", "one row", {ours: 12.0, f"{ours}, without append": 10.0}, B=64),
        decode_result("splits", "a number given", {"FA3": 1.0}),  # without ours nothing is judged
    ]
    plain, lengths, *_ = summary.summarize(results)
    assert plain["share"] == pytest.approx(0.5) and plain["over"]["FA3"]["mean"] == pytest.approx(1.0)
    assert plain["over_best"]["worst"] == pytest.approx(0.5) and plain["over"]["cuDNN"]["cases"] == 1
    assert lengths["over_best"]["peer"] == "FlashInfer"
    found = {target["target"]: target for target in summary.targets(results)}
    every = found["every cell, x the fastest peer"]
    assert every["cases"] == 3 and every["worst"] == pytest.approx(0.5) and not every["met"]
    assert found["lengths, x FA3"]["worst"] == pytest.approx(1.1) and not found["lengths, x FA3"]["met"]
    judged = {name.split(",")[0]: target["met"] for name, target in found.items()}
    assert judged["float8 beside 16 bits"] and len(found) == 7
    appends = [target for name, target in found.items() if name.startswith("an append")]
    assert [(target["measured"], target["met"]) for target in appends] == [(2.0, False), (2.0, True)]
    assert [found[r["case"]]["met"] for r in results[:2]] == [False, True]
    record = {"summary": summary.summarize(results), "targets": summary.targets(results), "results": results, "wrong": 0}
    record |= {"device": "a chip", "torch": "2", "commit": "c", "date": "d", "took_seconds": 1, "seconds": 1, "rounds": 1}
    lines = modules["attention_pages"].decode_page(record)
    assert aligned(lines) and "- FlashInfer (2): not there." in lines and not any("None" in line for line in lines)
    assert any(line.startswith("| Contiguous caches | 2 | 50 | 1.00 | 1.20 | - | 0.77 | 0.50 (") for line in lines)


@pytest.mark.slow
def test_a_quick_run_of_cached_keys_and_its_page(modules, decode_record, tmp_path):
    cells = modules["decode.cases"].QUICK
    assert decode_record["wrong"] == 0 and len(decode_record["results"]) == len(cells)
    assert {"commit", "torch", "cuda", "device"} <= decode_record.keys()
    for result, cell in zip(decode_record["results"], cells, strict=True):
        ours = result["providers"]["flash_online"]
        assert ours["us"] > 0 and ours["error"] < 0.02 and result["sets"] >= 1
        assert ours["share"] == pytest.approx(ours["gb_per_s"] / result["read"]["gb_per_s"])
        assert ours["gb_per_s"] == pytest.approx(1e-3 * cell.bytes_read() / ours["us"])
    lines = modules["attention_pages"].decode_page(decode_record)
    text = "\n".join(lines).replace("num_splits None", "")
    assert aligned(lines) and "None" not in text and "nan" not in text
    assert all(f"### {title}" in lines for title in modules["decode.summary"].FAMILIES.values())
    pytest.importorskip("matplotlib")
    for result in decode_record["results"]:
        if result["kind"] == "one query":
            result["sizes"] |= {"B": 1, "H": 32, "Hkv": 8}  # those of the curves
    importlib.import_module("benchmarks.figures").draw("decode", decode_record, tmp_path)
    assert (tmp_path / "decode.png").stat().st_size > 10000


@pytest.mark.slow
def test_arguments_are_checked():
    """Each command knows its own flags alone, and a part of the cases never overwrites a committed record."""

    def refused(*arguments):
        done = bench(*arguments)
        assert done.returncode == 2
        return done.stderr

    assert all(
        group in refused("attention", "--cases", "softmax") for group in ("plain", "features", "packed", "short", "host")
    )
    assert "invalid choice: 'packed'" in refused("rows", "--cases", "packed")
    assert "needs --out" in refused("rows", "--quick") and "needs --out" in refused("linear", "--quick")
    assert "unrecognized arguments: --match" in refused("training", "--match", "x")
    assert "unrecognized arguments: --device" in refused("paper", "--device", "cuda")
    assert "invalid choice: 'packed'" in refused("decode", "--cases", "packed")
    assert "needs --out" in refused("decode", "--providers", "FA3")
    assert "--without-traffic needs --out" in refused("family", "--without-traffic")
    assert "there is no nothing to count bytes with" in refused("family", "--ncu", "nothing")
    assert "no case is chosen" in refused("rows", "--match", "no such case", "--out", "x.json")
    assert "required: command" in refused()
    if not torch.cuda.is_available():
        assert "needs a CUDA GPU" in refused("attention") and "needs a CUDA GPU" in refused("decode")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("group, match", [("plain", "L 512, E 64"), ("packed", "512 of 64"), ("short", "L 1024"), ("host", "")])
def test_a_cell_of_attention_on_a_gpu(modules, group, match):
    measure = modules["attention.measure"]
    (cell, *_) = measure.chosen([group], match, False)
    ours = measure.measure(cell, "cuda", 0, 1)["providers"]["flash_online"]
    assert ours["forward_ms"] > 0 and ours["error"] < 0.02
    assert ("backward_ms" in ours) == (group in ("plain", "packed")) and ("step_ms" in ours) == (group == "host")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["one query", "page 16", "many sequences", "one row"])
def test_a_cell_of_cached_keys_on_a_gpu(modules, kind):
    """The quick cells in 16 bits, with as many sets as a benchmark has."""
    measure, cases = modules["decode.measure"], modules["decode.cases"]
    cell = next(c for c in cases.QUICK if c.kind == kind)
    cell = dataclasses.replace(cell, dtype=torch.bfloat16, sizes=cell.sizes | {"S": 1024, "E": 64})
    result = measure.measure(cell, "cuda", 0, 1)
    ours = result["providers"]["flash_online"]
    assert ours["us"] > 0 and ours["error"] < 0.02
    assert result["sets"] * result["bytes"] >= 3 * torch.cuda.get_device_properties().L2_cache_size


def test_the_tables_say_who_was_not_replayed(modules, quick_record):
    report, record = modules["row_pages"], json.loads(json.dumps(quick_record))
    assert not any("CUDA graph" in line for line in report.case_tables(record))
    for result in record["results"]:
        for name, entry in result["providers"].items():
            entry["in_graphs"] = (result["family"], name) == ("topk_softmax", "flash_online")
    (line,) = (line for line in report.case_tables(record) if "CUDA graph" in line)
    assert line.endswith(": torch softmax, topk.")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("function", ["softmax", "cross_entropy", "topk_softmax"])
def test_row_functions_on_a_gpu(modules, function):
    run, options = modules["rows"], {"k": 5} if function == "topk_softmax" else {}
    case = modules["cases"].RowCase(function, {"rows": 40, "classes": 1000}, options, torch.float32)
    result = run.measure(case, "cuda", 0, 1, ["torch", "torch softmax, topk"])
    assert len(result["providers"]) == 2
    for name, entry in result["providers"].items():
        assert entry["forward_ms"] > 0 and entry["backward_ms"] > 0
        assert entry["in_graphs"], name


def test_report_refuses_another_schema(modules, tmp_path):
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps({"schema": 1, "results": []}))
    with pytest.raises(SystemExit, match="expected schema .*, got 1"):
        modules["docs"].read(path)


def test_the_pages_show_the_committed_results():
    bench("docs", "--check", check=True)


@pytest.mark.slow
def test_training_step(tmp_path, modules):
    """One small step of each provider, beside torch's result; the table of measured ones."""
    pytest.importorskip("tqdm")
    path = tmp_path / "training.json"
    bench("training", "--quick", "--out", path, check=True)
    record = json.loads(path.read_text())
    lengths = modules["training"].LENGTHS if torch.cuda.is_available() else (32,)
    assert [result["sizes"]["L"] for result in record["results"]] == list(lengths)
    for result in record["results"]:
        assert list(result["providers"]) == ["torch's default", "flash_online"]
    if torch.cuda.is_available():
        return
    record["results"][0]["providers"] = {
        "torch's default": {"attention_ms": 9.0, "step_ms": 30.0},
        "flash_online": {"attention_ms": 6.0, "step_ms": 25.0},
    }
    assert modules["attention_pages"].training_page(record)[-1] == "| 32 | 9 / 30 | 6 / 25 | 1.50 / 1.20 |"


@pytest.mark.slow
def test_models_of_transformers(tmp_path, modules):
    """Tiny models by each implementation, compared with eager's result; the table of measured ones."""
    pytest.importorskip("tqdm"), pytest.importorskip("transformers")
    if torch.cuda.is_available():
        pytest.skip("minutes on a GPU: the benchmark itself is the run there")
    path = tmp_path / "models.json"
    bench("models", "--quick", "--rounds", 1, "--out", path, check=True)
    record = json.loads(path.read_text())
    by_model = {result["kind"]: result for result in record["results"]}
    assert record["wrong"] == 0 and list(by_model) == ["gpt-oss", "Gemma 3"]
    assert list(by_model["Gemma 3"]["providers"]) == ["eager", "sdpa", "flash_online"]
    assert by_model["gpt-oss"]["unavailable"] == {"sdpa": "refused by transformers"}
    gpt_oss = by_model["gpt-oss"]
    gpt_oss["unavailable"]["eager"] = "out of memory"  # in the step alone
    gpt_oss["providers"] = {
        "eager": {"prefill_ms": 9.0, "prefill_bytes": 3 << 30},
        "flash_online": {"prefill_ms": 6.0, "prefill_bytes": 1 << 30, "step_ms": 20.0, "step_bytes": 2 << 30},
    }
    lines = modules["attention_pages"].models_page(record)
    assert "| gpt-oss | 64 | prefill | 9 / 3 | refused by transformers | 6 / 1 | 1.50 | - |" in lines
    assert "| gpt-oss | 64 | step | out of memory | refused by transformers | 20 / 2 | - | - |" in lines


def test_models_that_disagree_are_not_timed(modules, monkeypatch):
    pytest.importorskip("transformers")
    models = modules["models"]
    monkeypatch.setattr(models, "MAX_FLOAT32_DISTANCE", -1.0)
    monkeypatch.setattr(models, "MAX_DISTANCE", -1.0)
    case = models.ModelCase("models", {"B": 1, "L": 8}, {"model": "gpt-oss"}, torch.float32)
    with pytest.raises(AssertionError, match="from float32, eager attention"):
        models.measure(case, 1, "cpu")


def test_a_page_behind_the_records_is_noticed(modules, monkeypatch, tmp_path, capsys):
    docs = modules["docs"]
    page = tmp_path / "page.md"
    page.write_text(f"before {docs.BEGIN}\nof another run\n{docs.END} after")
    monkeypatch.setattr(docs, "PAGES", {page: {"paper": lambda record: [f"a table of {record['device']}"]}})
    assert docs.run(True, tmp_path) == 1 and "page.md is out of date" in capsys.readouterr().err
    page.write_text(docs.updated(page))
    assert docs.run(True, tmp_path) == 0
    device = docs.read(docs.RESULTS / "paper.json")["device"]
    assert page.read_text() == f"before {docs.BEGIN}\na table of {device}\n\n{docs.END} after"


def test_the_readme_shows_every_chosen_number(modules):
    """One row per chosen kind, from the committed records; a peer that is not in a record leaves its cell empty."""
    docs, readme = modules["docs"], modules["readme"]
    names = ("attention", "decode", "cuda", "cpu", "training")
    lines = readme.readme_page(*(docs.read(docs.RESULTS / f"{name}.json") for name in names))
    chosen = len(readme.OF_ATTENTION) + len(readme.OF_DECODE) + len(readme.OF_ROWS) + len(readme.OF_CPU) + 1
    assert aligned(lines) and sum(line.startswith("|") for line in lines) == 2 + chosen
    assert max(map(len, lines)) <= 128 and {names: readme.readme_page} in docs.PAGES.values()


def test_one_command_draws_every_figure(modules, tmp_path):
    """Each figure that the docs show, under its name."""
    pytest.importorskip("matplotlib")
    modules["docs"].draw_figures(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (REPOSITORY / "docs" / "figures").iterdir()}


def test_the_linear_loss_is_checked_and_measured(modules, tmp_path, monkeypatch):
    path = tmp_path / "linear.json"
    bench(
        "linear", "--device", "cpu", "--quick", "--seconds", 0, "--rounds", 1, "--providers", "torch", "--out", path, check=True
    )
    record = json.loads(path.read_text())
    (result,) = record["results"]
    assert record["wrong"] == 0 and list(result["providers"]) == ["flash_online", "torch"]
    assert all(e["forward_ms"] > 0 and e["step_ms"] > 0 and e["error"] < 0.1 for e in result["providers"].values())
    assert result["parts"]["logits"]["ms"] > 0 and aligned(modules["row_pages"].linear_table(result))
    linear = modules["linear"]
    (case,) = linear.cases([], 0, 0, "float32", True)
    monkeypatch.setattr(linear, "plain", lambda x, w, t: 1.01 * torch.nn.functional.cross_entropy(x @ w.t(), t))
    with pytest.raises(AssertionError, match="torch: loss"):
        linear.measure(case, "cpu", 0, 1, ["torch"], [])


def test_a_wrong_case_is_reported_and_the_others_are_measured(modules, tmp_path, capsys):
    case = modules["case"].Case
    cases = [case("rows", {"rows": n}) for n in (1, 2, 3)]

    def measure(of_one):
        assert of_one.sizes["rows"] != 2, "off by one"
        return of_one.head()

    path = tmp_path / "record.json"
    assert modules["harness"].run("name", cases, measure, lambda result: result["case"], {"device": "d"}, path) == 1
    record = json.loads(path.read_text())
    assert record["wrong"] == 1 and [r["sizes"]["rows"] for r in record["results"]] == [1, 3] and record["device"] == "d"
    assert "1 cases were WRONG" in capsys.readouterr().out
