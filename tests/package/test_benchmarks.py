"""The benchmarks: a wrong result is caught before it is timed, ratios and shares are what they say, a record has its schema.
`bench docs --check` compares the text of all tables with the committed pages."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
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
QUICK = ("--quick", "--seconds", 0, "--rounds", 1)

if not (REPOSITORY / "benchmarks" / "run.py").is_file():
    pytest.skip("the benchmarks are part of a checkout", allow_module_level=True)
pytest.importorskip("tqdm")

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
WITH_NVCC = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


class Modules(dict):
    """The modules of the package benchmarks by name, imported when they are asked for."""

    def __missing__(self, name):
        return importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY))
    return Modules()


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


def record_of(folder, command, *arguments):
    """The record of a run."""
    bench(command, *arguments, "--out", folder / "record.json", check=True)
    return json.loads((folder / "record.json").read_text())


# --- Ratios, shares and targets -----------------------------------------------------------------------------------------------


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


def test_above_one_means_that_ours_is_faster(modules):
    summary = modules["summary"]
    found = summary.ratio(result_of(3.0, 0.5)["providers"])
    assert found == {"against": "torch", "forward": 3.0, "backward": 0.5, "forward_best": 3.0, "backward_best": 0.5}
    assert summary.ratio({"torch": {}}) is None and summary.ratio({"flash_online": {}}) is None


def test_summary_has_geometric_means_worst_cases_and_shares(modules):
    summary = modules["summary"]
    results = [result_of(2.0, 1.0, case="a"), result_of(8.0, 0.25, case="b")]
    (entry,) = summary.summarize([result | {"ratio": summary.ratio(result["providers"])} for result in results])
    assert entry["cases"] == 2 and entry["against"] == "torch" and entry["share_of"] == "copy"
    assert entry["forward"] == {"mean": pytest.approx(4.0), "worst": 2.0, "worst_case": "a", "share": pytest.approx(0.5)}
    assert entry["backward"] == {"mean": pytest.approx(0.5), "worst": 0.25, "worst_case": "b", "share": pytest.approx(0.25)}


def test_the_fastest_peer_may_be_another_in_each_direction(modules):
    summary, providers = modules["summary"], result_of(2.0, 2.0)["providers"]  # ours takes 2 and 4 ms
    assert summary.over_best(providers | {"torch math": providers["torch"]}) is None
    for name, (forward, backward) in {"quack": (2.5, 3.0), "torch math": (0.1, 0.1), "Liger": (9.0, 0.1)}.items():
        providers[name] = {"forward_ms": forward, "backward_ms": backward}
    best = summary.over_best(providers)
    assert best["forward"] == {"times": pytest.approx(1.25), "peer": "quack"}
    assert best["backward"] == {"times": pytest.approx(0.025), "peer": "Liger"}
    assert best["step"] == {"times": pytest.approx(5.5 / 6), "peer": "quack"}


def test_noise_is_the_baselines_median_over_its_least(modules):
    noise = modules["summary"].noise
    assert noise([]) is None and noise([result_of(1.0, 1.0)]) == pytest.approx(1.5)
    loud = {"dtype": "float32", "matmul": {"gflop_per_s": 100.0, "best_gflop_per_s": 100.0}}
    calm = {"dtype": "float32", "matmul": {"gflop_per_s": 400.0, "best_gflop_per_s": 400.0}}
    assert noise([loud, calm, result_of(1.0, 1.0)]) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "least, least_each, met",
    [(2.0, None, True), (2.1, None, False), (None, 1.0, True), (None, 1.1, False), (2.0, 1.0, True), (2.0, 1.1, False)],
)
def test_targets_are_judged_by_the_mean_and_by_the_worst(modules, least, least_each, met):
    members = [{"case": name, "dtype": "float32", "value": value} for name, value in (("a", 4.0), ("b", 1.0))]
    bounds = {"least": least, "least_each": least_each}
    (entry,) = modules["summary"].judge("name", members, lambda member, _: member["value"], **bounds, directions=("forward",))
    assert entry["met"] == met and entry["cases"] == 2 and entry["target"] == "name, forward"
    assert (entry["mean"], entry["worst"], entry["worst_case"]) == (pytest.approx(2.0), 1.0, "b, float32")
    assert modules["summary"].judge("name", [], lambda *_: 1.0) == []


def attention_result(kind, case, providers, group="features", **sizes):
    """Providers: name -> (forward, backward) milliseconds."""
    entries = {}
    for name, both in providers.items():
        entries[name] = {"error": 1e-3, "step_extra_bytes": 900 << 20, "beyond_results_bytes": 1 << 20}
        for direction, ms in zip(("forward", "backward"), both, strict=True):
            entries[name] |= {f"{direction}_ms": ms, f"{direction}_tflop_per_s": 100 / ms, f"{direction}_share": 0.125 / ms}
    facts = {"family": group, "kind": kind, "case": case, "sizes": sizes, "options": {}, "dtype": "bfloat16"}
    return facts | {"providers": entries}


def test_small_calls_are_judged_by_their_least_times(modules):
    summary, cases = modules["summary"], modules["cases"].CPU
    small = [case for case in cases if case.kind == summary.SMALL_CALLS]
    assert {case.family for case in small} == {"attention", "softmax", "log_softmax", "cross_entropy"}
    results = [result_of(1.0, 1.0, kind=summary.SMALL_CALLS, case="a"), result_of(0.4, 1.0, kind=summary.SMALL_CALLS, case="b")]
    results[0]["providers"]["torch"] |= {"forward_ms": 1e9, "backward_ms": 1e9}  # waits: only the least times count
    targets = summary.targets([result | {"ratio": summary.ratio(result["providers"])} for result in results])
    found = [target for target in targets if target["target"].startswith("calls of 64 elements")]
    assert [(target["target"].split()[-1], target["met"]) for target in found] == [("forward", False), ("step", True)]
    assert [target["worst"] for target in found] == [pytest.approx(0.4), pytest.approx((0.4 * 1 + 2) / 3)]


def test_attentions_targets_and_means(modules):
    tables = modules["attention.summary"]
    peers = {"FA3": (1.0, 2.0), "cuDNN": (2.0, 1.0), "torch flash": (4.0, 4.0), "torch math": (0.1, 0.1)}
    results = [
        attention_result("E 64, full", "a", {"flash_online": (0.5, 2.0)} | peers, "plain", E=64, L=512),
        attention_result("E 64, full", "b", {"flash_online": (2.0, 0.5)} | peers, "plain", E=64, L=2048),
        attention_result("block-sparse mask", "c", {"flash_online": (1.0, 1.0), "flash_online, all visible": (3.0, 2.0)}),
    ]
    targets = {target["target"]: target for target in tables.targets(results)}
    best = targets["plain, x FA3 and cuDNN, forward"]  # of two peers the faster one counts in each cell
    assert (best["mean"], best["worst"], best["worst_case"]) == (pytest.approx(1.0), pytest.approx(0.5), "b, bfloat16")
    assert best["cases"] == 2 and not best["met"] and targets["plain, x torch flash, forward"]["met"]
    assert targets["block-sparse mask, x flash_online, all visible, forward"]["met"]
    assert not targets["block-sparse mask, x flash_online, all visible, backward"]["met"]
    plain, sparse = tables.summarize(results)
    assert plain["forward"]["over"]["FA3"] | {"cases": 2, "peer": "FA3"} == plain["forward"]["over"]["FA3"]
    assert plain["forward"]["over_best"]["worst_case"] == "b" and plain["backward"]["over_best"]["peer"] == "cuDNN"
    assert plain["forward"]["tflop_per_s"] == pytest.approx(100) and sparse["forward"]["over_best"] is None


def decode_result(family, kind, us, *, wanted=None, **sizes):
    """A result of providers -> microseconds, of calls that read 100 MB where reads take 25 us."""
    providers = {name: {"us": taken, "share": 25 / taken} for name, taken in us.items()}
    facts = {"family": family, "kind": kind, "case": f"{kind} {sizes}", "sizes": sizes, "options": {}, "dtype": "bfloat16"}
    return facts | {"wanted_us": wanted, "providers": providers}


def test_the_targets_and_means_of_cached_keys(modules):
    summary, ours = modules["decode.summary"], "flash_online"
    results = [
        decode_result("plain", "one query", {ours: 50.0, "FA3": 100.0, "cuDNN": 60.0}, wanted=49, B=1),
        decode_result("plain", "one query", {ours: 50.0, "FA3": 25.0}, wanted=50, B=2),
        decode_result("float8", "many sequences", {ours: 50.0, f"{ours}, 16-bit caches": 100.0}),
        decode_result("append", "one row", {ours: 12.0, f"{ours}, without append": 10.0}, B=1),
        decode_result("append", "one row", {ours: 12.0, f"{ours}, without append": 10.0}, B=64),
        decode_result("splits", "a number given", {"FA3": 1.0}),  # without ours nothing is judged
    ]
    plain, *_ = summary.summarize(results)
    assert plain["share"] == pytest.approx(0.5) and plain["over"]["FA3"]["mean"] == pytest.approx(1.0)
    assert plain["over_best"]["worst"] == pytest.approx(0.5) and plain["over"]["cuDNN"]["cases"] == 1
    found = {target["target"]: target for target in summary.targets(results)}
    every = found["every cell, x the fastest peer"]
    assert (every["cases"], every["worst"], every["met"]) == (2, pytest.approx(0.5), False) and len(found) == 6
    appends = [target for name, target in found.items() if name.startswith("an append")]
    assert [(target["measured"], target["met"]) for target in appends] == [(2.0, False), (2.0, True)]
    assert [found[r["case"]]["met"] for r in results[:2]] == [False, True]
    assert next(t["met"] for name, t in found.items() if name.startswith("float8 compared with 16 bits"))


@pytest.mark.parametrize("name", ["attention", "decode"])
def test_every_target_has_a_cell(modules, name):
    """A target of no cell would never be judged; nor would a comparison with a form that is not measured there."""
    cases, summary = modules[f"{name}.cases"], modules[f"{name}.summary"]
    groups = cases.CELLS | getattr(cases, "SPARSE", {}) | getattr(cases, "IN_FLOAT8", {})
    cells = [cell for group in groups.values() for cell in group]
    assert len({(cell.family, cell.kind, cell.label, cell.dtype) for cell in cells}) == len(cells)
    targets = summary.TARGETS if name == "attention" else (*summary.FASTER, *summary.COMPARED)
    for target in targets:
        members = [c for c in cells if target.members(vars(c))]
        assert members, target
        if hasattr(target, "other"):
            assert all(target.other in modules["decode.peers"].providers(cell) for cell in members), target
    for name, is_member, _ in getattr(summary, "MIN_RATES", ()):
        assert any(is_member(vars(c)) for c in cells), name


@pytest.mark.parametrize("name", ["cpu", "cuda", "odd", "attention", "decode"])
def test_the_targets_of_a_whole_record(modules, name):
    judges = {"cuda": modules["summary"].cuda_targets, "odd": modules["summary"].odd_targets}
    judges |= {"cpu": modules["summary"].targets} | {n: modules[f"{n}.summary"].targets for n in ("attention", "decode")}
    found = judges[name](modules["docs"].read(modules["docs"].RESULTS / f"{name}.json")["results"])
    assert found and all(math.isfinite(target.get("worst", target.get("measured"))) for target in found)
    assert len({target["target"] for target in found}) == len(found)


# --- Flops and bytes, which shares are made of --------------------------------------------------------------------------------


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


def test_bytes_and_flops_of_cached_keys(modules):
    cases = modules["decode.cases"]
    cells = [cell for family in cases.CELLS.values() for cell in family]
    kinds = ("one query", "gpt-oss", "16 heads", "one prompt")
    lone, gpt_oss, mla, shared = (next(c for c in cells if c.kind == kind) for kind in kinds)
    assert lone.bytes_read() == 2 * 4096 * 8 * 128 * 2 and lone.flops() == 4 * 32 * 4096 * 128
    assert gpt_oss.bytes_read() == 64 * 2 * 128 * 8 * 64 * 2
    assert mla.bytes_read() == 64 * 4096 * 576 * 2 and mla.flops() == 2 * 64 * 16 * 4096 * (576 + 512)
    assert shared.bytes_read() == 2 * (1024 + 8 * 512) * 8 * 128 * 2 and shared.flops() == 4 * 8 * 32 * 1536 * 128
    assert cases.Cell("prefill", {"B": 2, "H": 1, "Hkv": 1, "S": 7, "L": 3, "E": 1}).flops() == 2 * 4 * (5 + 6 + 7)


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


def test_a_profiler_that_fails_is_named(modules, tmp_path):
    """The record has its last line and the command; the times are kept."""
    traffic, cells = modules["family.traffic"], modules["family.measure"].QUICK
    program = tmp_path / "ncu"
    program.write_text("#!/bin/sh\necho '==ERROR== no permission'\nexit 1\n")
    program.chmod(0o755)
    found = traffic.profile(str(program), cells, True)
    assert found["unavailable"] == "==ERROR== no permission" and found["command"].startswith("ncu --clock-control none")
    assert "FileNotFoundError" in traffic.profile(str(tmp_path / "missing"), cells, True)["unavailable"]


def test_communication_overlaps_computation(modules):
    stage, seconds = modules["scaling"].Stage, modules["scaling"].seconds
    assert seconds([stage(2, 3, 1)]) == 6
    assert seconds([stage(2, 3), stage(1, 3), stage(4, 3)]) == 12  # arrivals end at 2, 3 and 9: the third after computation 0
    assert seconds([stage(1, 1, 5), stage(1, 1, 5)]) == 12  # departures bound it
    assert seconds([stage(0, 1)] * 7) == 7


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


# --- A wrong result is caught -------------------------------------------------------------------------------------------------


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


def test_long_sequences_are_checked_at_some_queries(modules, monkeypatch):
    """The sampled check and the whole one agree on what is right."""
    run, case_of = modules["rows"], modules["cases"].RowCase
    monkeypatch.setattr(run, "CHECKED_IN_FULL", 256)
    for options in ({"causal": True}, {"window": 100}, {"mask": "random"}, {"bias": "per head"}):
        case = case_of("attention", {"B": 1, "H": 2, "L": 640, "E": 16}, options, torch.float32)
        assert len(run.Truth(case).rows) == 512
        entry = run.measure(case, "cpu", 0, 1)["providers"]["flash_online"]
        assert entry["error"] < 1e-5


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


def test_a_wrong_linear_loss_is_caught(modules, monkeypatch):
    linear = modules["linear"]
    (case,) = linear.cases([], 0, 0, "float32", True)
    result = linear.measure(case, "cpu", 0, 1, ["torch"], [])
    assert list(result["providers"]) == ["flash_online", "torch"] and result["parts"]["logits"]["ms"] > 0
    assert all(e["forward_ms"] > 0 and e["step_ms"] > 0 and e["error"] < 0.1 for e in result["providers"].values())
    monkeypatch.setattr(linear, "plain", lambda x, w, t: 1.01 * torch.nn.functional.cross_entropy(x @ w.t(), t))
    with pytest.raises(AssertionError, match="torch: loss"):
        linear.measure(case, "cpu", 0, 1, ["torch"], [])


def test_models_that_disagree_are_not_timed(modules, monkeypatch):
    pytest.importorskip("transformers")
    models = modules["models"]
    monkeypatch.setattr(models, "MAX_FLOAT32_DISTANCE", -1.0)
    monkeypatch.setattr(models, "MAX_DISTANCE", -1.0)
    case = models.ModelCase("models", {"B": 1, "L": 8}, {"model": "gpt-oss"}, torch.float32)
    with pytest.raises(AssertionError, match="from float32, eager attention"):
        models.measure(case, 1, "cpu")


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


# --- Records ------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_quick_run_of_row_functions_and_its_record(tmp_path):
    record = record_of(tmp_path, "rows", "--device", "cpu", *QUICK)
    facts = "schema device commit package threads instruction_set memory load_at_start load_at_end noise".split()
    assert record.keys() >= set(facts) and record["wrong"] == 0
    assert {r["family"] for r in record["results"]} >= {"attention", "softmax", "cross_entropy", "topk_softmax"}
    for result in record["results"]:
        assert {"kind", "sizes", "options", "ratio", "unavailable"} <= result.keys() and len(result["providers"]) >= 2
        attention = result["family"] == "attention"
        baseline, unit = ("matmul", "gflop_per_s") if attention else ("copy", "gb_per_s")
        assert result[baseline][unit] > 0 and (attention or result["copy"]["new_gb_per_s"] > 0)
        for entry in result["providers"].values():
            for direction in ("forward", "backward"):
                share = entry[f"{direction}_{unit}"] / result[baseline][unit]
                assert entry[f"{direction}_share"] == pytest.approx(share) and entry[f"{direction}_ms"] > 0
            assert 0 <= entry["error"] < 0.1 and entry["beyond_results_bytes"] < entry["step_extra_bytes"]
        theirs = result["providers"][result["ratio"]["against"]]
        expected = theirs["forward_ms"] / result["providers"]["flash_online"]["forward_ms"]
        assert result["ratio"]["forward"] == pytest.approx(expected)
    learned = [r for r in record["results"] if r["options"].get("bias") in ("shared", "per head")]
    assert learned and all(
        r["ratio"]["against"] == "torch math" and "requires grad" in r["unavailable"]["torch flash"] for r in learned
    )
    assert sum(e["cases"] for e in record["summary"]) == len(record["results"])
    assert record["targets"] and all(math.isfinite(m.get("mean", 0)) for m in record["targets"])


@pytest.mark.slow
@pytest.mark.parametrize("command", ["attention", "decode"])
def test_a_quick_run_of_attention_and_its_record(modules, tmp_path, command):
    record, cells = record_of(tmp_path, command, *QUICK), modules[f"{command}.cases"].QUICK
    assert record["wrong"] == 0 and len(record["results"]) == len(cells)
    assert {"schema", "commit", "torch", "device"} <= record.keys()
    for result, cell in zip(record["results"], cells, strict=True):
        ours = result["providers"]["flash_online"]
        assert ours["error"] < (0.04 if cell.family == "float8" and command == "attention" else 0.02)
        if command == "attention":
            assert ours["forward_share"] == pytest.approx(ours["forward_tflop_per_s"] / result["matmul"]["tflop_per_s"])
            assert ours["forward_ms"] > 0 and ("backward_tflop_per_s" in ours) == (cell.family != "float8")
            if cell.family != "blocks":  # the others have FlashAttention-3 as a peer, and no binary of it here
                assert result["unavailable"]["FA3 float8" if cell.family == "float8" else "FA3"]
        else:
            assert ours["share"] == pytest.approx(ours["gb_per_s"] / result["read"]["gb_per_s"]) and result["sets"] >= 1
            assert ours["gb_per_s"] == pytest.approx(1e-3 * cell.bytes_read() / ours["us"])


@pytest.mark.slow
def test_a_quick_run_of_accuracy_and_its_record(modules, tmp_path):
    record, cases = record_of(tmp_path, "accuracy", "--quick"), modules["float8_accuracy"].cases(True)
    assert record["wrong"] == 0 and len(record["results"]) == len(cases) and record.keys() >= {"schema", "commit", "device"}
    assert [target["unit"] for target in record["targets"]] == ["%", "%"]
    assert modules["float8_accuracy"].accuracy_page(record)


@pytest.mark.slow
def test_a_quick_run_of_training_has_a_step_of_each_provider(modules, tmp_path):
    lengths = modules["training"].LENGTHS if torch.cuda.is_available() else (32,)
    results = record_of(tmp_path, "training", "--quick")["results"]
    assert [result["sizes"]["L"] for result in results] == list(lengths)
    assert all(list(result["providers"]) == ["torch's default", "flash_online"] for result in results)


@WITHOUT_GPU  # where it takes minutes: the benchmark itself is the run there
@pytest.mark.nightly
def test_a_quick_run_of_models_compares_them_with_eager(tmp_path):
    pytest.importorskip("transformers")
    record = record_of(tmp_path, "models", "--quick", "--rounds", 1)
    by_model = {result["kind"]: result for result in record["results"]}
    assert record["wrong"] == 0 and list(by_model) == ["gpt-oss", "Gemma 3", "Llama 3"]
    assert [r["options"]["cache"] for r in record["results"] if r["family"] == "generation"] == ["dynamic", "static"]
    assert {"sdpa", "flash_online by override", "flash_online"} <= set(by_model["Llama 3"]["providers"])
    assert list(by_model["Gemma 3"]["providers"]) == ["eager", "sdpa", "flash_online"]
    assert by_model["gpt-oss"]["unavailable"] == {"sdpa": "refused by transformers"}


@WITHOUT_GPU
@pytest.mark.nightly
def test_prompts_that_take_too_long_are_random_keys(modules, monkeypatch):
    pytest.importorskip("transformers")
    models = modules["models"]
    monkeypatch.setattr(models, "MOST_PROMPT_TOKENS", 0)
    case = next(case for case in models.cases_of("cpu") if case.family == "generation")
    found = models.measure_generation(case, 1, "cpu")["providers"]
    assert {"sdpa", "flash_online"} <= set(found) and all(list(entry) == ["token_ms"] for entry in found.values())


# --- Commands -----------------------------------------------------------------------------------------------------------------


def command_line(monkeypatch, arguments):
    """Arguments for main(), and the variables that it would set for the tests after this one."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    monkeypatch.setenv("FLASH_ONLINE_KERNEL", "")
    monkeypatch.setattr(sys, "argv", ["bench", *arguments.split()])


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("", "required: command"),
        ("attention --cases softmax", "choose from 'plain'"),
        ("rows --cases packed", "invalid choice: 'packed'"),
        ("decode --cases packed", "invalid choice: 'packed'"),
        ("training --match x", "unrecognized arguments: --match"),
        ("paper --device cuda", "unrecognized arguments: --device"),
        ("rows --quick", "needs --out"),  # a part of the cases never overwrites a committed record
        ("linear --quick", "needs --out"),
        ("decode --providers FA3", "needs --out"),
        ("accuracy --cases error", "needs --out"),
        ("family --without-traffic", "--without-traffic needs --out"),
        ("family --ncu nothing", "there is no nothing to count bytes with"),
        ("rows --match nothing --out x.json", "no case is chosen"),
        ("attention --kernel sm90", "choose from 'sm80'"),
        ("attention --kernel sm80 --quick", "needs --out"),
        pytest.param("attention --kernel sm80 --sparse", "needs a CUDA GPU", marks=WITHOUT_GPU),
        ("attention --cases calls --quick --out x.json", "no case is chosen"),  # they are cells of --kernel
        pytest.param("attention --kernel sm80", "needs a CUDA GPU", marks=WITHOUT_GPU),
        pytest.param("attention", "needs a CUDA GPU", marks=WITHOUT_GPU),
        pytest.param("decode", "needs a CUDA GPU", marks=WITHOUT_GPU),
        pytest.param("accuracy", "needs a CUDA GPU", marks=WITHOUT_GPU),
        pytest.param("paper --quick --out x.json", "need a CUDA GPU", marks=WITHOUT_GPU),
        pytest.param("family --quick --without-traffic --out x.json", "need a CUDA GPU", marks=WITHOUT_GPU),
    ],
)
def test_a_command_line_that_does_not_fit_is_refused(modules, monkeypatch, capsys, tmp_path, arguments, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLASH_ATTENTION_3", raising=False)
    command_line(monkeypatch, arguments)
    with pytest.raises(SystemExit) as ended:  # argparse exits by itself
        sys.exit(modules["run"].main())
    assert ended.value.code == 2 and says in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.slow
@WITH_NVCC
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


@ON_GPU
@pytest.mark.parametrize("group, match", [("plain", "L 512, E 64"), ("packed", "512 of 64"), ("short", "L 1024"), ("host", "")])
def test_a_cell_of_attention_on_a_gpu(modules, group, match):
    measure = modules["attention.measure"]
    (cell, *_) = measure.chosen([group], match, False)
    ours = measure.measure(cell, "cuda", 0, 1)["providers"]["flash_online"]
    assert ours["forward_ms"] > 0 and ours["error"] < 0.02
    assert ("backward_ms" in ours) == (group in ("plain", "packed")) and ("step_ms" in ours) == (group == "host")


@ON_GPU
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


@ON_GPU
@pytest.mark.parametrize("function", ["softmax", "cross_entropy", "topk_softmax"])
def test_row_functions_on_a_gpu(modules, function):
    run, options = modules["rows"], {"k": 5} if function == "topk_softmax" else {}
    case = modules["cases"].RowCase(function, {"rows": 40, "classes": 1000}, options, torch.float32)
    result = run.measure(case, "cuda", 0, 1, ["torch", "torch softmax, topk"])
    assert len(result["providers"]) == 2
    for name, entry in result["providers"].items():
        assert entry["forward_ms"] > 0 and entry["backward_ms"] > 0
        assert entry["in_graphs"], name


@ON_GPU
@WITH_NVCC
@pytest.mark.parametrize("name", ["paper", "family"])
def test_the_benchmarks_own_kernels_are_right(modules, name):
    """Each raises where a result is wrong."""
    measure = modules[f"{name}.measure"]
    shapes = [(3, 63), (70, 1025), (5, 4099), (2, 300001)]
    for case in [measure.case_of(*shape) for shape in shapes] if name == "paper" else measure.QUICK:
        result = measure.measure(case, measure.Kernels(), 0, 1)
        if name == "paper":
            assert result["us"]["softmax"].keys() >= {"naive", "safe", "online"}
        else:
            assert result["providers"].keys() >= {"v1", "v1, striped", "v2, warps by keys", "v2"}


# --- FlashAttention-4 ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def stand_in(monkeypatch):
    """`flash_attn.cute` with ours under its arguments' names: its calls, and whether it returns the log-sum-exp too."""
    compat = importlib.import_module("flash_online.compat.flash_attn_cute")
    found = types.SimpleNamespace(calls=[], with_lse=True)

    def recorded(name):
        def function(*tensors, **options):
            found.calls.append((name, tensors, options))
            both = getattr(compat, name)(*tensors, **options)
            return both if found.with_lse else both[0]

        return function

    module = types.ModuleType("flash_attn.cute")
    module.flash_attn_func, module.flash_attn_varlen_func = recorded("flash_attn_func"), recorded("flash_attn_varlen_func")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


@pytest.mark.parametrize("with_lse", [True, False])
@pytest.mark.parametrize(
    "kind, options",
    [
        ("E 64, full", {}),
        ("E 64, causal", {"causal": True}),
        ("window", {"causal": True, "window_size": (17, 0)}),
        ("band", {"window_size": (17, 17)}),
        ("deterministic", {"deterministic": True}),
    ],
)
def test_flash_attention_4_gets_rows_before_heads(modules, stand_in, kind, options, with_lse):
    """[B, L, H, E], by arguments that every version has; its results are checked in the cell's layout."""
    cell = next(c for c in modules["attention.cases"].QUICK if c.kind == kind)
    stand_in.with_lse = with_lse
    result = modules["attention.measure"].measure(cell, "cpu", 0, 1, ["FA4"])
    entry, sizes = result["providers"]["FA4"], cell.sizes
    assert entry["forward_ms"] > 0 and entry["backward_ms"] > 0 and entry["error"] < 0.02 and not result["unavailable"]
    shapes = [(sizes["B"], sizes["L"], heads, sizes["E"]) for heads in (sizes["H"], *[sizes.get("Hkv", sizes["H"])] * 2)]
    for name, tensors, given in stand_in.calls:
        assert name == "flash_attn_func" and given == options
        assert [t.shape for t in tensors] == shapes and all(t.is_contiguous() for t in tensors)


def test_flash_attention_4_gets_softcap_and_packed_sequences(modules, stand_in):
    cases, peers = modules["attention.cases"], modules["attention.peers"]
    capped = cases.Cell("features", {"B": 1, "H": 2, "L": 16, "E": 32}, {"causal": True, "softcap": 5.0}, kind="softcap")
    peers.fa4(cases.Problem(capped, "cpu")).run()
    assert stand_in.calls.pop()[2] == {"causal": True, "softcap": 5.0}
    packed = cases.Problem(next(c for c in cases.QUICK if c.family == "packed"), "cpu")
    call = peers.PROVIDERS["FA4"](packed)
    assert call.view(call.run()).shape == packed.query.shape
    name, tensors, options = stand_in.calls.pop()
    assert name == "flash_attn_varlen_func" and [t.shape for t in tensors] == [(100, 4, 32), (100, 2, 32), (100, 2, 32)]
    assert options.pop("cu_seqlens_q") is options.pop("cu_seqlens_k") is packed.starts
    assert options == {"causal": True, "max_seqlen_q": 79, "max_seqlen_k": 79}
    documents = next(c for c in cases.QUICK if c.options.get("spans") == "documents")
    result = modules["attention.measure"].measure(documents, "cpu", 0, 1, ["FA4"])
    assert result["providers"]["FA4"]["error"] < 0.02 and stand_in.calls[0][0] == "flash_attn_varlen_func"


def test_cells_that_flash_attention_4_refuses_say_why(modules, monkeypatch):
    """Its own reason where it has one; a word where its arguments cannot say the cell, or where it is not there."""
    cases, measure = modules["attention.cases"], modules["attention.measure"]
    plain, masked = (next(c for c in cases.QUICK if c.kind == kind) for kind in ("E 64, full", "bool mask"))

    def refuses(*tensors, **options):
        raise AssertionError("inputs must be on CUDA device\nand so on")

    module = types.ModuleType("flash_attn.cute")
    module.flash_attn_func = refuses
    for found, cell, reason in (
        (module, plain, "AssertionError: inputs must be on CUDA device"),
        (module, masked, "it has no masks, biases, slopes or dropout"),
        (None, plain, "the package flash-attn-4 does not load: ModuleNotFoundError: import of flash_attn.cute halted"),
    ):
        monkeypatch.setitem(sys.modules, "flash_attn.cute", found)
        result = measure.measure(cell, "cpu", 0, 1, ["FA4"])
        assert list(result["providers"]) == ["flash_online"] and result["unavailable"]["FA4"].startswith(reason)


def test_flash_attention_4_is_tried_where_flash_attention_3_is(modules):
    peers, cases = modules["attention.peers"], modules["attention.cases"]
    for cell in [cell for group in (cases.CELLS | cases.SPARSE).values() for cell in group]:
        names = list(peers.providers(cell))
        assert ("FA4" in names) == ("FA3" in names) and "FA4" not in peers.providers(cell, ["cuDNN"])


def attention_record(modules, with_fa4):
    """The committed record without FlashAttention-4, or with it, in half the time of FlashAttention-3."""
    record = modules["docs"].read(modules["docs"].RESULTS / "attention.json")
    for result in record["results"]:
        for found in (result["providers"], result["unavailable"]):
            found.pop("FA4", None)
        if with_fa4 and (theirs := result["providers"].get("FA3")):
            times = {"_ms": 0.5, "_tflop_per_s": 2}
            factors = {key: next((x for end, x in times.items() if key.endswith(end)), 1) for key in theirs}
            result["providers"]["FA4"] = {key: value and value * factors[key] for key, value in theirs.items()}
    version = "4.0" if with_fa4 else None
    return record | {"fa4": version, "summary": modules["attention.summary"].summarize(record["results"])}


def test_a_record_with_flash_attention_4_shows_it(modules):
    """As a peer of each cell, of the means and of the README; a record without it has no column of it."""
    docs, (without, record) = modules["docs"], (attention_record(modules, with_fa4) for with_fa4 in (False, True))
    others = [docs.read(docs.RESULTS / f"{name}.json") for name in ("decode", "cuda", "cpu", "training")]
    plain = next(e for e in record["summary"] if e["family"] == "plain")
    assert plain["forward"]["over_best"]["peer"] == "FA4"
    assert plain["forward"]["over"]["FA4"]["mean"] == pytest.approx(plain["forward"]["over"]["FA3"]["mean"] / 2)
    page = modules["attention_pages"].attention_page(record)
    assert "FA4 is flash-attn-4 4.0." in page and any("| x FA4 |" in line for line in page)
    assert "FA4" not in "\n".join(modules["attention_pages"].attention_page(without))
    for of_attention, head in ((record, "| than FA3 | than FA4 |"), (without, "| than FA3 | than the fastest peer |")):
        table = [line for line in modules["readme"].readme_page(of_attention, *others) if line.startswith("|")]
        assert head in table[0] and len({line.count("|") for line in table}) == 1


def test_the_record_says_which_flash_attention_4(modules, stand_in, monkeypatch, tmp_path):
    """Where it was timed."""
    measure = modules["attention.measure"]
    cells = [next(c for c in modules["attention.cases"].QUICK if c.kind == kind) for kind in ("bool mask", "E 64, full")]
    monkeypatch.setattr(measure, "fa4_version", lambda: "4.0")
    facts = {"device": "d", "torch": "t", "commit": "c", "date": "d", "seconds": 0, "rounds": 1}
    for count in (1, 2):
        path = tmp_path / f"{count}.json"
        assert measure.run(cells[:count], "cpu", facts, path, ["FA4"]) == 0
        assert json.loads(path.read_text()).get("fa4") == ("4.0" if count == 2 else None)


@pytest.mark.parametrize("with_fa4", [False, True])
def test_the_bars_of_the_peers_do_not_overlap(modules, with_fa4):
    pytest.importorskip("matplotlib")
    figures = modules["figures"]
    figure = figures.speed(attention_record(modules, with_fa4))
    bars = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in figure.axes[0].patches)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    figures.plt.close(figure)
    assert len(labels) == 4 + with_fa4 and ("FlashAttention-4" in labels) == with_fa4
    assert all(end <= begin + 1e-9 for (_, end), (begin, _) in itertools.pairwise(bars))


# --- The general kernels ------------------------------------------------------------------------------------------------------


def test_the_cells_of_the_general_kernels(modules):
    """Each is compared with FlashAttention-2 alone, or as calls of torch's function."""
    cells, peers = modules["attention.measure"].chosen(None, None, False, "sm80"), modules["attention.peers"]
    assert len({(cell.family, cell.kind, cell.label, cell.dtype) for cell in cells}) == len(cells)
    plain = [cell for cell in cells if cell.family == "plain"]
    found = {(c.sizes["E"], c.sizes["L"], c.options.get("causal", False)) for c in plain}
    wanted = {(e, n, causal) for e in (64, 96, 128, 256) for n in (512, 2048, 4096, 8192) for causal in (False, True)}
    assert found == wanted and len(plain) == 32
    assert all(c.sizes["B"] * c.sizes["L"] == 16384 and c.sizes["H"] == 2048 // c.sizes["E"] for c in plain)
    of_family = {"plain": ["flash_online", "torch flash"], "between": ["flash_online", "torch flash"]}
    of_family["packed"] = ["flash_online", "torch varlen_attn"]
    of_family["calls"] = ["torch's default", "flash_online by override", "flash_online by torch_sdpa"]
    assert {cell.family for cell in cells} == set(of_family)
    for cell in cells:
        assert list(peers.providers(cell, peers.KERNEL_PEERS)) == of_family[cell.family], cell.title
    few = modules["attention.measure"].chosen(["calls"], "L 197", False, "sm80")
    assert [cell.label for cell in few] == ["B 8, H 16, L 197, E 64"]
    sparse = modules["attention.measure"].chosen(None, None, False, "sm80", True)
    assert sparse == modules["attention.measure"].chosen(None, None, False, None, True)
    names = list(peers.providers(sparse[0], peers.SPARSE_PEERS))
    assert names == ["flash_online", "flash_online, bool mask", "flash_online, packed", "FlexAttention"]


def test_pairs_of_cross_attention_and_of_packed_windows(modules):
    cases = modules["attention.cases"]
    cross = cases.Problem(cases.Cell("between", {"B": 2, "H": 3, "L": 16, "S": 5, "E": 8}), "cpu")
    assert cross.key.shape == cross.value.shape == (2, 3, 5, 8) and cross.visible_pairs() == 2 * 3 * 16 * 5
    sizes = {"sequences": 3, "T": 30, "H": 2, "E": 8}
    packed = cases.Cell("packed", sizes, {"causal": True, "window": 4}, kind="window", lengths=(20, 1, 9))
    pairs = sum(int(torch.ones(n, n).tril().triu(-4).sum()) for n in packed.lengths)
    assert cases.Problem(packed, "cpu").visible_pairs() == 2 * pairs


def test_cross_attention_is_checked_and_timed(modules):
    measure = modules["attention.measure"]
    (cell,) = measure.chosen(["between"], "cross", True, "sm80")
    result = measure.measure(cell, "cpu", 0, 1, modules["attention.peers"].KERNEL_PEERS)
    assert list(result["providers"]) == ["flash_online", "torch flash"] and not result["unavailable"]
    assert all(e["forward_ms"] > 0 and e["backward_ms"] > 0 and e["error"] < 0.02 for e in result["providers"].values())


def test_calls_of_torchs_function_are_ours_where_they_say_so(modules, monkeypatch):
    measure, peers = modules["attention.measure"], modules["attention.peers"]
    (cell,) = measure.chosen(["calls"], None, True, "sm80")
    default, override = "torch's default", "flash_online by override"
    result = measure.measure(cell, "cpu", 0, 1)
    assert (
        list(result["providers"]) == [default, override] and "CUDA alone" in result["unavailable"]["flash_online by torch_sdpa"]
    )
    for entry in result["providers"].values():
        assert entry["forward_ms"] > 0 and entry["step_ms"] > 0 and "forward_share" not in entry
    problem, torchs = modules["attention.cases"].Problem(cell, "cpu"), torch.nn.functional.scaled_dot_product_attention
    seen = {}
    for name in (default, override):
        with (call := peers.PROVIDERS[name](problem)).setting():
            seen[name] = torch.nn.functional.scaled_dot_product_attention
            with monkeypatch.context() as patch:
                patch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *args, **kwargs: "looked up")
                assert call.run() == "looked up", name
    assert seen == {default: torchs, override: peers.our_functional.scaled_dot_product_attention}


def failing_backward(text):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            return out.view_as(out)

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError(text)

    return Failing.apply


def test_a_refused_backward_pass_of_ours_leaves_the_forward_pass(modules, monkeypatch):
    """A GPU may have no room for a tile; another error is ours."""
    measure, peers = modules["attention.measure"], modules["attention.peers"]
    (cell,), right = measure.chosen(["plain"], None, True, "sm80"), peers.PROVIDERS["flash_online"]

    def refusing(text):
        fail = failing_backward(text)

        def make(problem):
            call = right(problem)
            return dataclasses.replace(call, run=lambda: fail(call.run()))

        return make

    text = "attention on CUDA: no kernel takes this call (sm80: its tile takes more shared memory than this GPU has)"
    monkeypatch.setitem(peers.PROVIDERS, "flash_online", refusing(text))
    result = measure.measure(cell, "cpu", 0, 1, peers.KERNEL_PEERS)
    ours, theirs = (result["providers"][name] for name in ("flash_online", "torch flash"))
    assert ours["forward_ms"] > 0 and "backward_ms" not in ours and "backward_ms" in theirs
    assert text in result["unavailable"]["flash_online, backward"]
    monkeypatch.setitem(peers.PROVIDERS, "flash_online", refusing("another"))
    with pytest.raises(AssertionError, match="flash_online, backward: RuntimeError: another"):
        measure.measure(cell, "cpu", 0, 1, peers.KERNEL_PEERS)


def test_a_peer_that_refuses_gradients_is_timed_forward(modules, monkeypatch):
    """torch's flash backend refuses the forward pass too where it has no backward pass."""
    measure, peers = modules["attention.measure"], modules["attention.peers"]
    (cell,), right = measure.chosen(["plain"], None, True, "sm80"), peers.PROVIDERS["torch flash"]

    def make(problem):
        call = right(problem)

        def run():
            if torch.is_grad_enabled():
                raise RuntimeError("No available kernel")
            return call.run()

        return dataclasses.replace(call, run=run)

    monkeypatch.setitem(peers.PROVIDERS, "torch flash", make)
    result = measure.measure(cell, "cpu", 0, 1, peers.KERNEL_PEERS)
    theirs = result["providers"]["torch flash"]
    assert theirs["forward_ms"] > 0 and "backward_ms" not in theirs
    assert "No available kernel" in result["unavailable"]["torch flash, backward"]


def test_the_window_that_torchs_packed_function_gets(modules, monkeypatch):
    """torch has `window_size` instead of `is_causal` since 2.11."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    cases, peers, got = modules["attention.cases"], modules["attention.peers"], {}
    cell = next(c for c in cases.GENERAL_QUICK if c.kind == "window")
    windowed = cases.Problem(cell, "cpu")
    without = windowed.without("window")

    def newer(*tensors, window_size=(-1, -1)):
        got["window_size"] = window_size

    def older(*tensors, is_causal=False):
        got["is_causal"] = is_causal

    monkeypatch.setattr(varlen, "varlen_attn", newer)
    peers.torch_varlen(windowed).run()
    assert got["window_size"] == (5, 0)
    peers.torch_varlen(without).run()
    assert got["window_size"] == (-1, 0)
    monkeypatch.setattr(varlen, "varlen_attn", older)
    peers.torch_varlen(without).run()
    assert got["is_causal"] is True
    with pytest.raises(peers.Unavailable, match="no window"):
        peers.torch_varlen(windowed)


def test_the_command_forces_the_kernels_and_names_the_record_after_the_gpu(modules, monkeypatch):
    run, given = modules["run"], {}

    def measured(cells, device, facts, path, peers):
        given.update(count=len(cells), kernel=facts["kernel"], path=path, forced=os.environ["FLASH_ONLINE_KERNEL"])
        return 0

    command_line(monkeypatch, "attention --kernel sm80")
    monkeypatch.setattr(run, "gpu_unless_quick", lambda parser, options: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(run.attention, "run", measured)
    assert run.main() == 0
    path = modules["machine"].RESULTS / "attention_sm80_nvidia_a100_sxm4_80gb.json"
    assert given == {"count": 44, "kernel": "sm80", "path": path, "forced": "sm80"}


def test_another_kernel_than_the_forced_one_is_not_measured(modules, monkeypatch):
    measure = modules["attention.measure"]
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device, **options: zeros(*sizes, **options))
    for kernel, fits in {"CUDA kernel (sm90)": False, "CUDA kernel (sm80)": True, "CUDA kernel": True}.items():
        plan = types.SimpleNamespace(kernel=kernel)
        monkeypatch.setattr(measure.flash_online, "explain", lambda *_, plan=plan: plan)
        if fits:
            measure.require_kernel("sm80", "cuda")
        else:
            with pytest.raises(SystemExit, match=r"kernel: expected sm80, got CUDA kernel \(sm90\)"):
                measure.require_kernel("sm80", "cuda")


def general_record(device, *ratios):
    """A record of plain cells of FlashAttention-2's time over ours, forward and backward, and of one cell of calls."""
    results = [
        attention_result("E 64, full", f"L {n}", {"flash_online": (1.0, 2.0), "torch flash": (f, 2.0 * b)}, "plain", E=64, L=n)
        | {"unavailable": {}, "matmul": {"tflop_per_s": 800.0}}
        for n, (f, b) in enumerate(ratios)
    ]
    took = {"torch's default": 3.0, "flash_online by override": 2.0, "flash_online by torch_sdpa": 1.5}
    calls = {"family": "calls", "kind": "calls", "case": "L 197", "sizes": {}, "options": {}, "dtype": "bfloat16"}
    calls |= {"unavailable": {}, "matmul": {"tflop_per_s": 800.0}}
    calls["providers"] = {name: {"forward_ms": ms, "step_ms": 12 / ms} for name, ms in took.items()}
    facts = {"device": device, "torch": "2.11", "commit": "abc", "date": "2026-11-29", "kernel": "sm80"}
    facts |= {"took_seconds": 60, "seconds": 0.3, "rounds": 5, "wrong": 0, "targets": []}
    return facts | {"results": [*results, calls]}


def test_the_page_of_the_general_kernels(modules, monkeypatch, tmp_path):
    """A part per GPU that sent a record; means, ratios below 1 and calls are those of the record."""
    docs, tables = modules["docs"], modules["attention.summary"]
    page = REPOSITORY / "docs" / "performance" / "attention_sm80.md"
    monkeypatch.setattr(docs, "RESULTS", tmp_path)
    assert f"{docs.BEGIN}\nNone committed yet.\n\n{docs.END}" in docs.updated(page)
    for device, ratios in {"B": [(2.0, 0.5), (8.0, 2.0)], "A": [(1.5, 1.25)]}.items():
        record = general_record(f"GPU {device}", *ratios)
        record |= {"schema": modules["summary"].SCHEMA, "summary": tables.summarize(record["results"])}
        (tmp_path / f"attention_sm80_gpu_{device.lower()}.json").write_text(json.dumps(record))
    written = docs.updated(page).partition(docs.BEGIN)[2]
    first, second = written.split("## GPU B\n")
    assert "## GPU A\n" in first and "0 of 2 ratios are below 1." in first and "1 of 4 ratios are below 1:" in second
    assert "| plain | 1 / 1 | 1.50 | 1.25 |" in first and "| plain | 2 / 2 | 4.00 | 1.00 |" in second
    assert "| E 64, full: L 0, bfloat16 | backward | 0.500 |" in second and "below 1 |" not in first
    assert "| L 0 | 100 / 50 | 50 / 100 | 12 / 6 | 2.00 / 0.50 |" in second
    assert "| L 197 | 3000 / 4000 | 2000 / 6000 | 1500 / 8000 | 1.50 / 0.67 | 2.00 / 0.50 |" in second


@pytest.mark.slow
def test_a_quick_run_of_the_general_kernels_and_its_record(tmp_path):
    record = record_of(tmp_path, "attention", "--kernel", "sm80", *QUICK)
    assert record["kernel"] == "sm80" and record["wrong"] == 0 and record["targets"] == []
    assert [result["family"] for result in record["results"]] == ["plain", "between", "packed", "calls"]
    on_gpu = torch.cuda.is_available()
    assert ("flash_online by torch_sdpa" in record["results"][-1]["providers"]) == on_gpu
    assert ("torch varlen_attn" in record["results"][2]["providers"]) == on_gpu


# --- float8 -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def float8_device():
    """The device of float8's benchmarks, on which float8_attention has kernels."""
    from float8_cases import skip_without_kernel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    skip_without_kernel(device)
    return device


@pytest.mark.parametrize("match", ["full", "causal"])
def test_a_cell_of_float8(modules, monkeypatch, float8_device, match):
    """Forward alone; ours on e4m3 tensors, with quantising and in bfloat16. Peers that are not there are named."""
    monkeypatch.delenv("FLASH_ATTENTION_3", raising=False)
    measure, summary = modules["attention.measure"], modules["attention.summary"]
    (cell,) = measure.chosen(["float8"], match, True)
    result = measure.measure(cell, float8_device, 0, 1)
    ours = {name: entry for name, entry in result["providers"].items() if name.startswith("flash_online")}
    assert list(ours) == ["flash_online", summary.QUANTISING, summary.IN_BFLOAT16]
    for name, entry in ours.items():
        assert entry["forward_ms"] > 0 and "backward_ms" not in entry and entry["beyond_results_bytes"] >= 0
        assert (entry["error"] < 0.005) == (name == summary.IN_BFLOAT16) and entry["error"] < 0.035
    assert result["providers"].keys() | result["unavailable"].keys() >= {summary.CUDNN_FLOAT8, summary.FA3_FLOAT8}
    table = modules["attention_pages"].float8_table([result])
    assert len(table) == 3 and f"x {summary.IN_BFLOAT16}" in table[0] and len({line.count("|") for line in table}) == 1
    assert modules["attention_pages"].unavailable_in([result]) or not result["unavailable"]


def test_a_wrong_result_in_float8_is_not_timed(modules, monkeypatch, float8_device):
    """Ours is an error, a peer is left out."""
    measure, float8, summary = modules["attention.measure"], modules["attention.float8"], modules["attention.summary"]
    (cell,) = measure.chosen(["float8"], "full", True)
    right = float8.ours

    def wrong(problem):
        call = right(problem)
        return dataclasses.replace(call, run=lambda: 1.2 * call.run())

    monkeypatch.setitem(float8.PROVIDERS, summary.CUDNN_FLOAT8, wrong)
    result = measure.measure(cell, float8_device, 0, 1)
    assert "relative error is 0.2" in result["unavailable"][summary.CUDNN_FLOAT8]
    monkeypatch.setitem(float8.PROVIDERS, "flash_online", wrong)
    with pytest.raises(AssertionError, match="flash_online: a relative error of 0.2"):
        measure.measure(cell, float8_device, 0, 1)


def float8_result(ours, quantising, bfloat16, cudnn, error=0.03, **sizes):
    """A result of milliseconds, of which 1 is a rate of 1,000 TFLOP/s."""
    times = {"flash_online": ours, "flash_online, quantising": quantising, "flash_online, bfloat16": bfloat16}
    entries = {
        name: {
            "error": error,
            "beyond_results_bytes": 0,
            "forward_ms": ms,
            "forward_tflop_per_s": 1000 / ms,
            "forward_share": 1,
        }
        for name, ms in (times | {"cuDNN float8": cudnn}).items()
    }
    facts = {"family": "float8", "kind": "E 128, full", "case": f"L {sizes['L']}", "sizes": sizes, "options": {}}
    return facts | {"dtype": "bfloat16", "providers": entries, "unavailable": {}, "matmul": {"tflop_per_s": 1000.0}}


def test_the_targets_of_float8(modules):
    results = [float8_result(1.0, 1.5, 2.0, 1.25, E=128, L=16384), float8_result(1.0, 1.0, 2.0, 1.1, 0.04, E=128, L=1024)]
    found = {target["target"]: target for target in modules["attention.summary"].targets(results)}
    assert len(found) == 6 and not found["float8, x cuDNN float8, forward"]["met"]
    assert found["float8, x flash_online, bfloat16, forward"]["worst"] == pytest.approx(2.0)
    quantising = found["float8, quantising included, x flash_online, bfloat16, forward"]
    assert quantising["cases"] == 1 and quantising["worst"] == pytest.approx(4 / 3)
    assert found["TFLOP/s of float8, E 128, full, L 1024, forward"]["met"]
    assert not found["TFLOP/s of float8, E 128, full, L 4096 and 16384, forward"]["met"]
    error = found["float8's relative error, the worst cell, L 1024"]
    assert error["measured"] == pytest.approx(4.0) and not error["met"]
    _, _, row, _ = modules["attention_pages"].float8_table(results)
    assert row == "| L 16384 | 1000 | 667 | 500 | 800 | 100 | 1.25 | 2.00 | 1.33 | 0 / 0 / 0 / 0 | 3.00 / 3.00 / 3.00 / 3.00 |"


@pytest.mark.parametrize("causal", [False, True])
def test_the_exact_rows_are_those_of_attention(modules, causal):
    float8 = modules["attention.float8"]
    tensors = [torch.randn(2, 3, 50, 16, dtype=torch.float64) for _ in range(3)]
    rows = float8.checked_rows(50, 20)
    assert len(rows) >= 19 and rows[-1] == 49 and rows.diff().min() > 0
    whole = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)
    assert float8.relative_error(float8.exact_rows(*tensors, rows, causal), whole[:, :, rows]) < 1e-12


@pytest.mark.parametrize("inputs", ["normal", "outliers", "outliers, same channels", "key offset"])
def test_the_error_of_float8_is_told_apart_by_its_cause(modules, float8_device, inputs):
    accuracy = modules["float8_accuracy"]
    case = next(c for c in accuracy.cases(True) if c.family == "error" and c.options == {"inputs": inputs})
    result = accuracy.measure_error(case, float8_device)
    smooth, rough, bfloat16 = result["providers"].values()
    assert smooth["quantised"] < 0.035 and rough["quantised"] < 0.035 and bfloat16["exact"] < 0.01
    for entry in (smooth, rough):  # the two causes are independent, as good as
        assert entry["exact"] == pytest.approx(math.hypot(entry["quantised"], entry["inputs"]), rel=0.1)
    assert (2 * smooth["exact"] < rough["exact"]) == (inputs == "key offset")
    assert len(accuracy.error_tables([result])) == 11


def test_a_needle_is_found(modules, float8_device):
    accuracy = modules["float8_accuracy"]
    case = next(c for c in accuracy.cases(True) if c.family == "needle" and c.options == {"share": 0.5})
    result = accuracy.measure_needle(case, float8_device)
    for name, entry in result["providers"].items():
        assert entry["hits"] == 1 and entry["cosine"] > 0.9
        assert (entry["part_error"] < 0.005) == (name in ("float64", "bfloat16")) and entry["part_error"] < 0.1
    assert "100 / 100 / 100 / 100" in accuracy.needle_tables([result])[4]


def test_a_diffusion_transformer_depends_on_its_attention(modules, float8_device):
    accuracy = modules["float8_accuracy"]
    (case,) = (c for c in accuracy.cases(True) if c.family == "diffusion")
    result = accuracy.measure_diffusion(case, float8_device)
    float8, bfloat16, without = (result["providers"][name] for name in ("float8", "bfloat16", "without attention"))
    assert bfloat16["last_float32"] < float8["last_float32"] < 0.1 * without["last_float32"]
    assert float8["first_bfloat16"] < float8["last_bfloat16"] and len(accuracy.diffusion_table(result)) == 8


# --- The docs -----------------------------------------------------------------------------------------------------------------


def test_report_refuses_another_schema(modules, tmp_path):
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps({"schema": 1, "results": []}))
    with pytest.raises(SystemExit, match="expected schema .*, got 1"):
        modules["docs"].read(path)


def test_the_pages_show_the_committed_results():
    bench("docs", "--check", check=True)


def test_a_page_older_than_the_records_is_noticed(modules, monkeypatch, tmp_path, capsys):
    docs = modules["docs"]
    page = tmp_path / "page.md"
    page.write_text(f"before {docs.BEGIN}\nof another run\n{docs.END} after")
    monkeypatch.setattr(docs, "PAGES", {page: {"paper": lambda record: [f"a table of {record['device']}"]}})
    assert docs.run(True, tmp_path) == 1 and "page.md is out of date" in capsys.readouterr().err
    page.write_text(docs.updated(page))
    assert docs.run(True, tmp_path) == 0
    device = docs.read(docs.RESULTS / "paper.json")["device"]
    assert page.read_text() == f"before {docs.BEGIN}\na table of {device}\n\n{docs.END} after"


def test_the_page_of_scaling_has_its_tables(modules):
    page = (REPOSITORY / "docs" / "distributed_scaling.md").read_text()
    assert modules["scaling"].tables() in page


@pytest.mark.slow
def test_one_command_draws_every_figure(modules, tmp_path):
    """Each figure that the docs show, under its name."""
    pytest.importorskip("matplotlib")
    modules["docs"].draw_figures(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (REPOSITORY / "docs" / "figures").iterdir()}
