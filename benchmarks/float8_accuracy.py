"""python -m flash_online bench accuracy: how far the results of float8_attention are from exact ones.

Three families of cases, each comparing float8_attention, with and without smoothed keys, and attention in bfloat16:

error: the relative error of a forward pass, as in attention/float8.py: of random queries of each head, compared with float64
    attention of the quantised inputs, and of the bfloat16 inputs before quantising. In both the rows are the same. `inputs`:
    the difference of these two float64 results, which quantising alone makes.
needle: one key among L matches a query so that its weight is the share that is given; what of its value comes back.
diffusion: a small transformer with random weights denoises in N steps; only its attention differs, or is left out, which says
    how much depends on it.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn

import flash_online

from . import harness
from .attention.float8 import checked_rows, exact_rows, quantised, relative_error, widened, without_mean
from .case import Case
from .tables import heading, table, targets_table

FLOAT8, ROUGH, BFLOAT16 = "float8", "float8, smooth_keys=False", "bfloat16"
EXACT = "float64"  # of the same inputs, as a provider of needles
WITHOUT = "without attention"
HEADS = 4
OUTLIERS, OUTLIER_SIZE = 0.01, 20.0  # the share of channels that are outliers, at least one; their standard deviation
OFFSET = 20.0  # the standard deviation of the part that all keys of a head share
NEEDLES = 64  # queries per head
SHARPNESS = 2.0  # root mean square of the diffusion transformer's queries and keys
INPUTS = ("normal", "outliers", "outliers, same channels", "key offset")
MOST_ERROR, MOST_GROWTH = 3.5, 10.0  # percent, of normal inputs: of a cell; from the shortest to the longest length
ATTENTIONS: dict[str, Callable[..., Tensor]] = {
    FLOAT8: flash_online.float8_attention,
    ROUGH: functools.partial(flash_online.float8_attention, smooth_keys=False),
    BFLOAT16: flash_online.attention,
}


def cases(quick: bool) -> list[Case]:
    head_dims, lengths = ((64,), (128, 512)) if quick else ((64, 128, 256), (4096, 16384, 65536, 131072))
    errors = [
        Case("error", {"H": HEADS, "L": length, "E": head_dim}, {"inputs": inputs} | ({"causal": True} if causal else {}))
        for inputs in INPUTS
        for causal in (False, True)
        for head_dim in head_dims
        for length in lengths
    ]
    needles = [
        Case("needle", {"H": HEADS, "L": length, "E": head_dim}, {"share": share})
        for head_dim in head_dims
        for share in (0.5, 0.05, 0.005)
        for length in lengths
    ]
    shape = {"layers": 2, "width": 128, "H": 2, "L": 64} if quick else {"layers": 12, "width": 1024, "H": 8, "L": 4096}
    return [*errors, *needles, Case("diffusion", shape | {"steps": 4 if quick else 50})]


# --- The relative error ----------------------------------------------------------------------------------------------------


def error_inputs(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [1, H, L, E] in bfloat16, normal but for what the option `inputs` says. Outliers are channels of a
    head, of query and of key, of their own or the same ones."""
    generator = torch.Generator(device).manual_seed(0)
    heads, length, head_dim = (case.sizes[name] for name in "HLE")

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    query, key, value = (normal(1, heads, length, head_dim) for _ in range(3))
    kind = case.options["inputs"]
    if kind.startswith("outliers"):
        count = max(1, round(OUTLIERS * head_dim))
        for head in range(heads):
            order = torch.randperm(head_dim, generator=generator, device=device)
            query[:, head, :, order[:count]] *= OUTLIER_SIZE
            key[:, head, :, order[:count] if kind.endswith("same channels") else order[count : 2 * count]] *= OUTLIER_SIZE
    elif kind == "key offset":
        key += OFFSET * normal(1, heads, 1, head_dim)
    return query.bfloat16(), key.bfloat16(), value.bfloat16()


def measure_error(case: Case, device: str) -> dict:
    result, tensors = case.head(), error_inputs(case, device)
    query, key, value = tensors
    rows, causal = checked_rows(case.sizes["L"]), case.options.get("causal", False)
    truth = exact_rows(*tensors, rows, causal)
    for name, attention in ATTENTIONS.items():
        with flash_online.strict():
            got = attention(*tensors, causal=causal)[:, :, rows.to(device)]
        entry = {"exact": relative_error(got, truth)}
        if name != BFLOAT16:
            keys = without_mean(key) if name == FLOAT8 else key
            narrow = exact_rows(*(widened(*quantised(t)) for t in (query, keys, value)), rows, causal)
            entry |= {"quantised": relative_error(got, narrow), "inputs": relative_error(narrow, truth)}
        result["providers"][name] = entry
    return result


# --- Needles ---------------------------------------------------------------------------------------------------------------


def needle_inputs(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query [1, H, NEEDLES, E], key, value [1, H, L, E] in bfloat16, and the needles' places [H, NEEDLES]. A needle is a key in
    its query's direction, as long as gives it the share of the query's weights that is wanted, were the other scores normal."""
    generator = torch.Generator(device).manual_seed(0)
    heads, length, head_dim = (case.sizes[name] for name in "HLE")
    count, share = min(NEEDLES, length // 2), case.options["share"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    query, key, value = (
        normal(1, heads, count, head_dim),
        normal(1, heads, length, head_dim),
        normal(1, heads, length, head_dim),
    )
    places = torch.stack([torch.randperm(length, generator=generator, device=device)[:count] for _ in range(heads)])
    size = query.square().sum(-1, keepdim=True)
    # The sum of exp of n normal scores of variance v is n exp(v / 2) on average.
    score = math.log(length) + size / head_dim / 2 + math.log(share / (1 - share))
    needles = query * score * math.sqrt(head_dim) / size
    key.scatter_(2, places[None, :, :, None].expand_as(needles), needles)
    return query.bfloat16(), key.bfloat16(), value.bfloat16(), places


def measure_needle(case: Case, device: str) -> dict:
    """Per provider: how often the needle's value is the one most parallel to the output, the mean and least cosine of the two,
    and the error of the needle's part in the output, its root mean square over the queries relative to float64's."""
    result = case.head()
    query, key, value, places = needle_inputs(case, device)
    wanted = value[0].gather(1, places[..., None].expand(-1, -1, value.shape[-1])).double()
    outs = {EXACT: exact_rows(query, key, value, torch.arange(query.shape[-2]), False)}
    with flash_online.strict():
        outs |= {name: attention(query, key, value) for name, attention in ATTENTIONS.items()}
    directions = torch_functional.normalize(value[0].float(), dim=-1)
    part_of = lambda out: (out[0].double() * wanted).sum(-1) / wanted.square().sum(-1)  # noqa: E731
    exact = part_of(outs[EXACT])
    for name, out in outs.items():
        cosine = torch_functional.cosine_similarity(out[0].double(), wanted, dim=-1)
        found = torch.stack([(out[0, h].float() @ directions[h].T).argmax(-1) for h in range(out.shape[1])])
        result["providers"][name] = {
            "hits": (found == places).double().mean().item(),
            "cosine": cosine.mean().item(),
            "least_cosine": cosine.min().item(),
            "part_error": relative_error(part_of(out), exact),
        }
    return result


# --- A diffusion transformer -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention with normalised queries and keys, and a perceptron, each scaled, shifted and gated by the time's embedding."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, time: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        scale, shift, gate, mlp_scale, mlp_shift, mlp_gate = self.modulation(time).chunk(6, -1)
        qkv = self.qkv(self.norm(x) * (1 + scale) + shift)
        query, key, value = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = (SHARPNESS * torch_functional.rms_norm(t, t.shape[-1:]) for t in (query, key))
        x = x + gate * self.out(attention(query, key, value).transpose(1, 2).flatten(-2))
        return x + mlp_gate * self.mlp(self.norm(x) * (1 + mlp_scale) + mlp_shift)


class DiffusionTransformer(nn.Module):
    """The velocity of noise that becomes an image: tokens [B, L, channels] at a time from 1 to 0."""

    def __init__(self, layers: int, width: int, heads: int, length: int, channels: int = 16):
        super().__init__()
        self.position = nn.Parameter(torch.randn(length, width))
        self.embed, self.head = nn.Linear(channels, width), nn.Linear(width, channels)
        self.time = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):  # keeps the variance
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, time: float, attention: Callable[..., Tensor]) -> Tensor:
        angles = 1000 * time * torch.exp2(-torch.arange(32, device=x.device) / 2)
        embedded = self.time(torch.cat([angles.sin(), angles.cos()]))
        embedded = torch_functional.rms_norm(embedded, embedded.shape)  # so that the gates are neither small nor large
        hidden = self.embed(x) + self.position
        for block in self.blocks:
            hidden = block(hidden, embedded, attention)
        return self.head(self.norm(hidden))


def denoised(model: DiffusionTransformer, noise: Tensor, steps: int, attention: Callable[..., Tensor]) -> list[Tensor]:
    """The tokens after each of Euler's steps."""
    found = [noise]
    for step in range(steps):
        found.append(found[-1] - model(found[-1], 1 - step / steps, attention) / steps)
    return found[1:]


def measure_diffusion(case: Case, device: str) -> dict:
    """Relative differences, after the first and the last step, from the same model with attention in float32 and with ours in
    bfloat16. The model computes in float32."""
    result, sizes = case.head(), case.sizes
    torch.manual_seed(0)
    model = DiffusionTransformer(sizes["layers"], sizes["width"], sizes["H"], sizes["L"]).to(device)
    noise = torch.randn(1, sizes["L"], 16).to(device)

    def in_bfloat16(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *tensors: attention(*(t.bfloat16() for t in tensors)).float()

    with torch.no_grad():
        wide = denoised(model, noise, sizes["steps"], torch_functional.scaled_dot_product_attention)
        with flash_online.strict():
            steps = {name: denoised(model, noise, sizes["steps"], in_bfloat16(call)) for name, call in ATTENTIONS.items()}
        steps[WITHOUT] = denoised(model, noise, sizes["steps"], lambda query, key, value: torch.zeros_like(query))
    for name, own in steps.items():
        entry = {f"{when}_float32": relative_error(own[n], wide[n].double()) for when, n in (("first", 0), ("last", -1))}
        if name != BFLOAT16:
            theirs = steps[BFLOAT16]
            entry |= {
                f"{when}_bfloat16": relative_error(own[n], theirs[n].double()) for when, n in (("first", 0), ("last", -1))
            }
        result["providers"][name] = entry
    return result


MEASURES = {"error": measure_error, "needle": measure_needle, "diffusion": measure_diffusion}


# --- Tables ----------------------------------------------------------------------------------------------------------------


def percent(value: float) -> str:
    return f"{100 * value:.2f}"


def by_length(results: list[dict], row_of: Callable[[dict], list[str]], cell: Callable[[dict], str], head: list[str]):
    """A table with a column per length."""
    rows, lengths = defaultdict(dict), sorted({r["sizes"]["L"] for r in results})
    for r in results:
        rows[tuple(row_of(r))][r["sizes"]["L"]] = cell(r)
    body = [[*row, *(cells.get(length, "-") for length in lengths)] for row, cells in rows.items()]
    return table([*head, *(f"L {length}" for length in lengths)], body)


def error_tables(results: list[dict]) -> list[str]:
    def row_of(r: dict) -> list[str]:
        return [r["options"]["inputs"], "causal" if r["options"].get("causal") else "full", str(r["sizes"]["E"])]

    def cell_of(*wanted: tuple[str, str]) -> Callable[[dict], str]:
        return lambda r: " / ".join(percent(r["providers"][name][key]) for name, key in wanted)

    head = ["inputs", "mask", "E"]
    lines = ["Relative error on the quantised inputs, %: smoothed keys / not", ""]
    lines += by_length(results, row_of, cell_of((FLOAT8, "quantised"), (ROUGH, "quantised")), head)
    lines += [
        "",
        "Relative error against exact attention of the bfloat16 inputs, %: smoothed keys / not / attention in bfloat16",
        "",
    ]
    return lines + by_length(results, row_of, cell_of((FLOAT8, "exact"), (ROUGH, "exact"), (BFLOAT16, "exact")), head)


def needle_tables(results: list[dict]) -> list[str]:
    names = (FLOAT8, ROUGH, BFLOAT16, EXACT)

    def cell(r: dict) -> str:
        entries = [r["providers"][name] for name in names]
        hits, cosines = (
            " / ".join(f"{f * e[key]:.{d}f}" for e in entries) for key, f, d in (("hits", 100, 0), ("cosine", 1, 3))
        )
        return f"{hits}; {cosines}"

    def part(r: dict) -> str:
        return " / ".join(percent(r["providers"][name]["part_error"]) for name in names[:-1])

    def row_of(r: dict) -> list[str]:
        return [f"{r['options']['share']:g}", str(r["sizes"]["E"])]

    lines = [f"Needles found, %; mean cosine of output and value: {' / '.join(names)}", ""]
    lines += by_length(results, row_of, cell, ["share", "E"])
    lines += ["", f"Relative error of the needle's part of the output, %: {' / '.join(names[:-1])}", ""]
    return lines + by_length(results, row_of, part, ["share", "E"])


def diffusion_table(result: dict) -> list[str]:
    columns = [f"{when}_{against}" for against in ("bfloat16", "float32") for when in ("first", "last")]
    rows = [
        [name, *(percent(entry[column]) if column in entry else "-" for column in columns)]
        for name, entry in result["providers"].items()
    ]
    head = [f"from {against}, {when} step" for against in ("bfloat16", "float32") for when in ("first", "last")]
    return [f"Diffusion transformer, relative difference, %: {result['case']}", "", *table(["attention", *head], rows)]


def targets(results: list[dict]) -> list[dict]:
    """The bounds of normal inputs with smoothed keys, on the quantised inputs."""
    members = [r for r in results if r["family"] == "error" and r["options"]["inputs"] == "normal"]
    if not members:
        return []
    of = lambda r: r["providers"][FLOAT8]["quantised"]  # noqa: E731
    worst = max(members, key=of)
    found = [("relative error, normal inputs", worst["case"], MOST_ERROR, 100 * of(worst))]
    kinds = defaultdict(dict)
    for r in members:
        kinds[r["sizes"]["E"], r["options"].get("causal", False)][r["sizes"]["L"]] = of(r)
    growth = {kind: 100 * (e[max(e)] / e[min(e)] - 1) for kind, e in kinds.items() if len(e) > 1}
    if growth:
        (head_dim, causal), most = max(growth.items(), key=lambda item: item[1])
        found.append(("its growth with the length", f"E {head_dim}, {'causal' if causal else 'full'}", MOST_GROWTH, most))
    return [
        {"target": f"{what}: {where}", "most": most, "unit": "%", "measured": measured, "met": measured <= most}
        for what, where, most, measured in found
    ]


def accuracy_page(record: dict) -> list[str]:
    """The record's tables in Markdown."""
    of = defaultdict(list)
    for result in record["results"]:
        of[result["family"]].append(result)
    lines = [*heading(record), "", *targets_table(record)]
    lines += ["", *error_tables(of["error"])] if of["error"] else []
    lines += ["", *needle_tables(of["needle"])] if of["needle"] else []
    for result in of["diffusion"]:
        lines += ["", *diffusion_table(result)]
    return lines


def line(result: dict) -> str:
    parts = [f"{name} {', '.join(f'{key} {v:.3g}' for key, v in e.items())}" for name, e in result["providers"].items()]
    return f"{result['family']:10} {result['case']:50} {'; '.join(parts)}"


def run(chosen: list[Case], device: str, facts: dict, path: Path) -> int:
    def measure(case: Case) -> dict:
        return MEASURES[case.family](case, device)

    def finish(record: dict, _: bool) -> dict:
        return record | {"targets": targets(record["results"])}

    return harness.run("accuracy", chosen, measure, line, facts, path, finish, lambda record: ["", *accuracy_page(record)])
