"""Context parallelism on paper: communication simulated against computation, on 8 to 1,024 GPUs and 1 to 100 million tokens.

python -m flash_online bench scaling prints the tables of docs/distributed_scaling.md; a test compares the two. Nothing is
measured here but the rates below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

MILLION = 10**6
BYTES, SUM_BYTES = 2, 4  # bytes of an element of keys and values; of their summed gradients


@dataclass(frozen=True)
class Cluster:
    """Nodes of eight GPUs. Rates are bytes per second that a GPU receives, or floating-point operations per second."""

    node: int = 8
    attention: float = 600e12  # causal, forward and backward together: an H200 at 131,072 tokens, measured
    nvlink: float = 350e9  # inside a node
    network: float = 45e9  # a GPU's own port of 400 Gb/s
    latency: float = 20e-6  # of a collective, and again for every doubling of the nodes
    room: float = 60e9  # bytes of a GPU left by weights, optimizer states and activations


@dataclass(frozen=True)
class Problem:
    """A layer's causal attention over one sequence."""

    tokens: int
    gpus: int
    heads: int = 32
    key_heads: int = 8
    head_dim: int = 128

    @property
    def rows(self) -> float:
        return self.tokens / self.gpus

    @property
    def forward_flops(self) -> float:
        """Per rank: two products, over half of all pairs."""
        return 2 * self.tokens**2 * self.heads * self.head_dim / self.gpus

    def cached_bytes(self, rows: float, key_heads: float, size: int = BYTES) -> float:
        """Bytes of keys and values."""
        return 2 * rows * key_heads * self.head_dim * size


@dataclass(frozen=True)
class Stage:
    """Seconds of receiving, of computing with the received data, of sending the result. Two stages have buffers."""

    arrival: float
    computation: float
    departure: float = 0


@dataclass(frozen=True)
class Plan:
    """A method: the stages of its forward and backward passes, and the bytes that it holds in addition to a rank's own rows."""

    forward: list[Stage]
    backward: list[Stage]
    held: float


def seconds(stages: list[Stage]) -> float:
    """One stream communicates and one computes: arrivals 0 and 1, departure 0, arrival 2, departure 1, and so on."""
    link, ends = 0.0, []  # when the link is free; when computations end

    def depart(n: int) -> float:
        return max(link, ends[n]) + stages[n].departure

    for n, stage in enumerate(stages):
        if n >= 2:
            link = depart(n - 2)
        link += stage.arrival
        ends.append(max(link, ends[-1] if ends else 0) + stage.computation)
    for n in range(max(len(stages) - 2, 0), len(stages)):
        link = depart(n)
    return max(link, ends[-1])


class Model:
    """The methods of context parallelism on a cluster."""

    def __init__(self, cluster: Cluster, problem: Problem):
        self.cluster, self.problem = cluster, problem
        self.nodes = max(1, problem.gpus // cluster.node)
        self.inside = min(problem.gpus, cluster.node)  # participating GPUs of a node
        self.forward = problem.forward_flops / cluster.attention
        self.backward = 2.5 * self.forward
        self.latency = cluster.latency * (1 + math.log2(self.nodes))

    def gather(self, size: float) -> float:
        """All ranks get all of `size` bytes, or their sum is scattered. NCCL's rings use all ports of a node, so each byte
        enters a node once."""
        nvlink = size * (1 - 1 / self.problem.gpus) / self.cluster.nvlink
        network = size * (1 - 1 / self.nodes) / (self.inside * self.cluster.network)
        return self.latency + max(nvlink, network)

    def gather_across(self, size: float) -> float:
        """`gather` among the GPUs with the same index in each node: each uses its own port."""
        return self.latency + size * (1 - 1 / self.nodes) / self.cluster.network

    def exchange(self, size: float, ranks: int) -> float:
        """All-to-all among `ranks`: a rank has `size` bytes and sends every other rank its share."""
        inside = min(ranks, self.cluster.node)
        nvlink, network = size * (inside - 1) / ranks, size * (ranks - inside) / ranks
        return self.latency + max(nvlink / self.cluster.nvlink, network / self.cluster.network)

    def rows_of_heads(self, heads: float, key_heads: float) -> float:
        """Bytes of a rank's rows of queries and results, keys and values."""
        return self.problem.cached_bytes(self.problem.rows, heads + key_heads)

    # --- the methods

    def gathered(self) -> Plan:
        """Keys and values in groups of one key head; the next group arrives while one is computed."""
        p = self.problem
        group = p.cached_bytes(p.tokens, 1)
        arrival, departure = self.gather(group), self.gather(group * SUM_BYTES / BYTES)
        forward = [Stage(arrival, self.forward / p.key_heads)] * p.key_heads
        backward = [Stage(arrival, self.backward / p.key_heads, departure)] * p.key_heads
        return Plan(forward, backward, 2 * group * (1 + SUM_BYTES / BYTES))

    def ulysses(self) -> Plan | None:
        """All-to-all over heads; nothing else runs meanwhile."""
        p = self.problem
        if p.heads % p.gpus:
            return None
        key_heads = max(p.key_heads, p.gpus)  # replicated if there are fewer than ranks
        size = self.rows_of_heads(p.heads, key_heads)
        move = self.exchange(size, p.gpus)
        return Plan([Stage(move, self.forward)], [Stage(move, self.backward)], size)

    def ring(self) -> Plan:
        """Keys pass from rank to rank, over one port between two nodes; their gradients follow them, in float32."""
        p = self.problem
        rate = self.cluster.network if self.nodes > 1 else self.cluster.nvlink
        own = p.cached_bytes(p.rows, p.key_heads)
        step = self.cluster.latency + own / rate
        back = self.cluster.latency + own * (1 + SUM_BYTES / BYTES) / rate
        forward = [Stage(step if n else 0, self.forward / p.gpus) for n in range(p.gpus)]
        backward = [Stage(back if n else 0, self.backward / p.gpus) for n in range(p.gpus)]
        return Plan(forward, backward, 2 * own * (1 + SUM_BYTES / BYTES))

    def across_nodes(self, pieces: bool) -> Plan:
        """Ulysses inside a node, which gives each GPU its share of the heads over the rows of the whole node; then the keys of
        these heads from all nodes, at once or one piece per node, with results merged."""
        p, nodes = self.problem, self.nodes
        own_heads = max(p.key_heads / self.inside, 1)
        moved = self.rows_of_heads(p.heads, own_heads * self.inside)
        move = self.exchange(moved, self.inside)
        keys = p.cached_bytes(p.tokens, own_heads)
        count = nodes if pieces else 1
        arrival = self.gather_across(keys) if nodes > 1 else 0
        departure = self.gather_across(keys * SUM_BYTES / BYTES) if nodes > 1 else 0
        forward = [Stage(move, 0), *[Stage(arrival / count, self.forward / count)] * count]
        backward = [Stage(move, 0), *[Stage(arrival / count, self.backward / count, departure / count)] * count]
        held = (2 if pieces and nodes > 1 else 1) * keys / count * (1 + SUM_BYTES / BYTES)
        return Plan(forward, backward, moved + held)

    def plans(self) -> Iterator[tuple[str, Plan | None]]:
        yield "gathered keys", self.gathered()
        yield "Ulysses", self.ulysses()
        yield "ring", self.ring()
        yield "Ulysses in a node, gathered across", self.across_nodes(pieces=False)
        yield "the same, a piece per node", self.across_nodes(pieces=True)

    def share(self, plan: Plan) -> float:
        """The ideal time, without communication, as a share of the plan's time."""
        return (self.forward + self.backward) / (seconds(plan.forward) + seconds(plan.backward))


# --- tables


def cell(model: Model, plan: Plan | None) -> str:
    if plan is None:
        return "-"
    share = f"{model.share(plan):.2f}"
    return f"{share}, {plan.held / 1e9:.0f} GB" if plan.held > model.cluster.room else share


def duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{1e3 * seconds:.3g} ms"


def tables() -> str:
    """The tables of docs/distributed_scaling.md, as Markdown."""
    cluster, lines = Cluster(), []
    gpus, tokens = (8, 32, 128, 256, 1024), (1, 16, 100)
    for heads, key_heads in ((32, 8), (32, 32)):
        lines += [f"**{heads} query heads on {key_heads} key heads**", ""]
        lines += ["| tokens | method | " + " | ".join(f"{w} GPUs" for w in gpus) + " |", "|---|---|" + "---|" * len(gpus)]
        for millions in tokens:
            models = [Model(cluster, Problem(millions * MILLION, w, heads, key_heads)) for w in gpus]
            rows = zip(*(list(model.plans()) for model in models), strict=True)
            for n, row in enumerate(rows):
                cells = " | ".join(cell(model, plan) for model, (_, plan) in zip(models, row, strict=True))
                lines.append(f"| {f'{millions} M' if not n else ''} | {row[0][0]} | {cells} |")
        lines.append("")
    lines += ["**Attention of 32 layers, forward and backward, per sequence, if nothing had to move**", ""]
    lines += ["| tokens | " + " | ".join(f"{w} GPUs" for w in gpus) + " |", "|---|" + "---|" * len(gpus)]
    for millions in (1, 4, 16, 64, 100):
        models = [Model(cluster, Problem(millions * MILLION, w)) for w in gpus]
        lines.append(f"| {millions} M | " + " | ".join(duration(32 * (m.forward + m.backward)) for m in models) + " |")
    return "\n".join(lines)


def run() -> int:
    print(tables())
    return 0
