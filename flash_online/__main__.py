"""python -m flash_online info | check [NAME ...] | demo | trace 1 3 2 [--plot FILE] | bench

info    prints versions, devices, and which kernels this build has and this machine can run
check   compares every function with float64, on the CPU and the GPU, in seconds; exit code 1 if one is wrong.
        With NAMEs of integrations (transformers, ...): checks each with its installed host, using tiny random models
demo    compares error, time and memory of attention, softmax and cross-entropy with torch's; trains a transformer with both
trace   prints the steps of online softmax over the given numbers (float32; --float64: double; --plot FILE draws them too)
bench   runs a checkout's benchmarks: rows | attention | decode | accuracy | training | models | paper | family | linear |
        distributed | scaling | docs, each with its --help
"""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from array import array
from pathlib import Path


def trace(arguments: list[str]) -> int:
    """python -m flash_online trace NUMBER ... [--float64] [--plot FILE]

    Prints the steps of online softmax over a row, one line per number, computed with the header that the kernels include: the
    running maximum m, the running sum d, and the factor that rescales d. Numbers are decimal, inf, -inf or nan, rounded to
    float32, or with --float64 to double. --plot FILE also draws them, in the format of the file's ending (needs matplotlib)."""
    if any(word in ("-h", "--help") for word in arguments):
        print(inspect.getdoc(trace))
        return 0
    words, double, picture = list(arguments), "--float64" in arguments, None
    # argparse would read -1 and -inf as options.
    if double:
        words.remove("--float64")
    if "--plot" in words:
        at = words.index("--plot")
        if at + 1 == len(words) or _is_number(words[at + 1]):
            print("trace: --plot: no file given, as in: trace 1 3 2 --plot walk.png", file=sys.stderr)
            return 2
        picture = Path(words[at + 1])
        del words[at : at + 2]
    bad = next((word for word in words if not _is_number(word)), None)
    if bad is not None:
        print(f"trace: expected numbers, inf, -inf or nan, as in: trace 1 3 2, got {bad!r}", file=sys.stderr)
        return 2
    if not words:
        print("trace: no numbers given, as in: python -m flash_online trace 1 3 2", file=sys.stderr)
        return 2
    try:
        from . import _introspect
    except ImportError as error:
        print(f"trace: the introspection module is not built for this Python ({error})", file=sys.stderr)
        return 1

    kind, code, digits = (_introspect.Float64, "d", 16) if double else (_introspect.Float32, "f", 8)
    row = array(code, map(float, words)).tolist()  # rounded to the dtype of the walk
    walk = kind.walk(row)
    _print_walk(kind, row, walk, code, digits)
    return 0 if picture is None else _plot_walk(walk, "float64" if double else "float32", picture)


def _print_walk(kind, row: list[float], walk: list[tuple], code: str, digits: int) -> None:
    width, double = digits + 8, code == "d"

    def line(*cells) -> str:
        return " ".join(f"{cell:>{width}}" if isinstance(cell, str) else f"{cell:>{width}.{digits}g}" for cell in cells)

    print(f"online softmax, {'float64' if double else 'float32'}: d = d * factor + exp(x - m), factor = exp(m_before - m)\n")
    print(line("x", "m", "factor", "d"))
    for x, m, d, factor in walk:
        print(line(x, m, factor, d))

    online, two_pass = kind(row), kind()
    two_pass.absorb_block(row)  # the maximum first, then the sum
    print("\n" + line("", "m", "d", "lse = m + ln d"))
    print(line("online", online.max, online.sum, online.lse()))
    print(line("two passes", two_pass.max, two_pass.sum, two_pass.lse()))

    results = {}
    for name in ("online", "safe", "naive"):
        results[name] = array(code, row)
        getattr(kind, f"{name}_softmax")(row, results[name])
    print("\n" + line("x", "online softmax", "two-pass (safe)", "naive"))
    for cells in zip(row, results["online"], results["safe"], results["naive"], strict=True):
        print(line(*cells))
    print("\n" + _verdict(row, results, double))


def _plot_walk(walk: list[tuple], dtype: str, path: Path) -> int:
    """Draws the walk into a file of any format that matplotlib knows by its suffix; returns the exit code."""
    largest = 1e300  # the limits of matplotlib's axes must be finite, with a margin around the scores
    bad = next((x for x, *_ in walk if not (abs(x) <= largest or x == -math.inf)), None)
    if bad is not None:
        print(f"trace: --plot draws -inf and numbers up to {largest:g}; this row has {bad:g} in {dtype}", file=sys.stderr)
        return 2
    try:
        import matplotlib
    except ImportError as missing:
        print(f"trace: --plot needs matplotlib ({missing}): pip install matplotlib", file=sys.stderr)
        return 1
    from . import _trace_plot

    figure = _trace_plot.draw(walk, dtype)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        print(f"trace: --plot: {path} cannot be written by matplotlib {matplotlib.__version__}: {error}", file=sys.stderr)
        return 1
    print(f"wrote {path.resolve()}")
    return 0


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _verdict(row: list[float], results: dict[str, array], double: bool) -> str:
    """One or two sentences that interpret the results."""
    online, safe = results["online"], results["safe"]
    if any(map(math.isnan, row)):
        return "A NaN in the row reaches every probability."
    if math.inf in row:
        return "A score of +inf has no softmax: inf - inf is NaN."
    if all(x == -math.inf for x in row):
        return "Every score is -inf: an empty row. Its softmax is 0 / 0, NaN; as a row of attention it gives 0."
    mantissa_bits = 53 if double else 24

    def ulps(a: float, b: float) -> int:
        scale = max(math.frexp(max(a, b))[1] - mantissa_bits, -1074 if double else -149)
        return round(abs(a - b) / 2.0**scale)

    worst = max(map(ulps, online, safe))
    sentence = (
        "Online and two-pass agree to the last bit here; rounding does not promise it."
        if worst == 0
        else f"Online and two-pass differ by {worst} unit{'s' if worst > 1 else ''} in the last place: rounding, not method."
    )
    if any(map(math.isnan, results["naive"])):
        sentence += " The naive softmax over- or underflows."
    return sentence


def bench(arguments: list[str]) -> int:
    """Runs benchmarks/run.py of the checkout that contains this package, with these arguments."""
    script = Path(__file__).resolve().parents[1] / "benchmarks" / "run.py"
    if not script.is_file():
        print(
            "bench: the benchmarks are part of a checkout, not of the installed package. Clone the repository and run "
            "`python benchmarks/run.py` there: a checkout that is not built measures the installed package.",
            file=sys.stderr,
        )
        return 1
    return subprocess.call([sys.executable, str(script), *arguments])


def info(arguments: list[str]) -> int:
    from . import _info

    print(_info.report())
    return 0


def check(arguments: list[str]) -> int:
    from . import _self_check

    return _self_check.main(arguments)


def demo(arguments: list[str]) -> int:
    from . import _demo

    return _demo.main(arguments)


def main(arguments: list[str]) -> int:
    commands = {"info": info, "check": check, "demo": demo, "trace": trace, "bench": bench}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if arguments else 2
    if arguments[0] not in commands:
        print(f"flash_online: {arguments[0]!r} is not one of {', '.join(commands)}\n\n{__doc__.strip()}", file=sys.stderr)
        return 2
    return commands[arguments[0]](arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
