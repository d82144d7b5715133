"""What `make sanitize` makes of compute-sanitizer's output."""

from __future__ import annotations

import re

import pytest
import sanitize
import sanitizer_calls

CLEAN = """========= COMPUTE-SANITIZER
call: a
done: a
call: b
done: b
========= ERROR SUMMARY: 0 errors
"""
FOUND = """========= COMPUTE-SANITIZER
call: a
========= Invalid __global__ read of size 4 bytes
=========     at void flash_online::cuda::register_kernel<...>
done: a
call: b
done: b
========= ERROR SUMMARY: 1 error
"""
RACE = """call: a
========= Error: Race reported between Write access at kernel+0x1 and Read access at kernel+0x2 [32 hazards]
done: a
call: b
done: b
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_clean_output():
    report = sanitize.Report.of(CLEAN)
    assert report.clean(["a", "b"]) and report.of_call("a") == "ok"
    assert not report.clean(["a", "b", "c"]) and report.of_call("c") == "did not end"


@pytest.mark.parametrize("output", [FOUND, RACE], ids=["memcheck", "racecheck"])
def test_findings_are_of_their_call(output):
    report = sanitize.Report.of(output)
    assert not report.clean(["a", "b"]) and report.summary == 1
    assert (report.of_call("a"), report.of_call("b")) == ("1 found", "ok")


def test_what_did_not_end_or_is_not_finite_is_not_clean():
    cut, bad = CLEAN.partition("=========  ERROR")[0].replace("done: b\n========= ERROR SUMMARY: 0 errors\n", ""), CLEAN
    assert not sanitize.Report.of(cut).clean(["a"]) and sanitize.Report.of(cut).summary is None
    report = sanitize.Report.of(bad.replace("done: b", "not finite: b"))
    assert not report.clean(["a", "b"]) and report.of_call("b") == "not finite"


def test_one_filter_for_every_tool():
    for help_text, option in (("  --kernel-name arg", "--kernel-name"), ("  --kernel-regex arg", "--kernel-regex")):
        for tool in sanitize.TOOLS:
            command = sanitize.command_of("sanitizer", tool, "sm80", "softmax", help_text)
            assert command[command.index(option) + 1] == "kns=flash_online"
            assert command[-4:] == ["--family", "sm80", "--calls", "softmax"]


def test_the_table_covers_every_function_and_option():
    names = sanitizer_calls.chosen("")
    words = ["causal", "window", "grouped", "sinks", "softcap", "alibi", "bool mask", "float mask", "gradient of", "dropout"]
    words += ["packed", "deterministic", "merge", "softmax", "logsumexp", "top 5", "cross_entropy", "linear_cross_entropy"]
    words += [f"head dim {n}" for n in (40, 96, 128, 160, 192, 256, 512)]
    assert [word for word in words if not any(word in name for name in names)] == []
    assert len(sanitizer_calls.chosen("^sm80")) == len(sanitizer_calls.chosen("^attention"))
    assert all(re.search("split", name) for name in sanitizer_calls.chosen("split"))
