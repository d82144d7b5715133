"""A Llama with sequences sharded over ranks: context parallelism and FSDP2, on packed documents.

torchrun --nproc-per-node 2 examples/long_context.py                      # GPUs if there are N, else CPUs with gloo
torchrun --nproc-per-node 8 examples/long_context.py --length 1048576 --layers 16 --width 2048 --checkpointing --no-alone

Documents are this repository's pages, byte by byte, packed into rows of --length tokens; a rank has a shard of each row and of
the weights. Every rank first trains the same model alone on whole rows (not with --no-alone), so that the figure has two
curves, which should agree. It needs transformers; with matplotlib the curves become a PNG, without it only JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

from flash_online.distributed import context_parallel_varlen_attention, shard_batch
from flash_online.integrations import transformers as integration

VOCABULARY = 256  # bytes
LAYOUT = "contiguous"  # of packed documents: any boundaries are allowed


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row, over all ranks")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4, help="query heads; two share a key head")
    parser.add_argument("--rate", type=float, default=3e-3, help="AdamW's")
    parser.add_argument("--method", default="auto", help="of context_parallel_varlen_attention")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "docs", help="a folder of Markdown pages")
    parser.add_argument("--out", type=Path, default=Path("long_context"), help="the curves go to OUT.json and OUT.png")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again in the backward pass")
    parser.add_argument("--no-alone", dest="alone", action="store_false", help="no run on one rank to compare with")
    return parser.parse_args()


# --- Attention over the ranks, as a function for transformers ---------------------------------------------------------------


def register_over(mesh: DeviceMesh, method: str, name: str = "context_parallel") -> str:
    """Registers attention of packed documents over the ranks of a mesh: for `model.set_attn_implementation(name)`."""

    def attend(module, query, key, value, mask, scaling=None, cu_seq_lens_q=None, max_length_q=None, **others):
        packed = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # of one row, [heads, tokens, width]
        out = context_parallel_varlen_attention(
            *packed,
            cu_seq_lens_q,
            max_seqlen=max_length_q,
            causal=True,
            scale=scaling,
            group=mesh,
            layout=LAYOUT,
            method=method,
        )
        return out.unsqueeze(0), None

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, lambda *words, **others: None)  # no other mask than documents and the causal rule
    return name


# --- Data -------------------------------------------------------------------------------------------------------------------


def rows(folder: Path, length: int, device: str) -> Iterator[dict]:
    """Batches of one row of packed documents, the last one cut, in the form of transformers' DataCollatorWithFlattening. The
    first token of a document is not a label."""
    documents = [page.read_bytes() for page in sorted(folder.rglob("*.md"))]
    order = torch.Generator().manual_seed(2017)
    while True:
        tokens, starts = [], [0]
        while len(tokens) < length:
            tokens += documents[torch.randint(len(documents), (), generator=order)][: length - len(tokens)]
            starts.append(len(tokens))
        row = torch.tensor(tokens, device=device)
        labels = row.clone()
        labels[starts[:-1]] = -100
        lengths = [end - begin for begin, end in zip(starts, starts[1:], strict=False)]
        position_ids = torch.cat([torch.arange(n, device=device) for n in lengths])
        bounds = torch.tensor(starts, dtype=torch.int32, device=device)
        documents_of_row = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        documents_of_row |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
        yield {"input_ids": row[None], "labels": labels[None], "position_ids": position_ids[None], **documents_of_row}


# --- Training ---------------------------------------------------------------------------------------------------------------


def progress(steps: int, name: str):
    """A bar on the first rank, where tqdm is installed."""
    with contextlib.suppress(ImportError):
        from tqdm import tqdm

        return tqdm(range(steps), desc=name, disable=dist.get_rank() != 0)
    return range(steps)


def train(words: argparse.Namespace, device: str, mesh: DeviceMesh | None) -> dict:
    """Losses and seconds per step: over the ranks of `mesh`, or of one rank alone on whole rows."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=words.width,
        intermediate_size=3 * words.width,
        num_hidden_layers=words.layers,
        num_attention_heads=words.heads,
        num_key_value_heads=max(words.heads // 2, 1),
        max_position_embeddings=words.length,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device)
    model.set_attn_implementation(register_over(mesh, words.method) if mesh else integration.register())
    if words.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if mesh:
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=words.rate)
    mixed = torch.autocast(device, torch.bfloat16) if device == "cuda" else contextlib.nullcontext()
    ranks = mesh.size() if mesh else 1
    batches, losses, seconds = rows(words.text, words.length, device), [], []
    bar = progress(words.steps, f"{ranks} rank{'s' * (ranks > 1)}")
    for _ in bar:
        batch, start = next(batches), time.perf_counter()
        if mesh:
            batch = shard_batch(batch, mesh, LAYOUT)
        with mixed:
            loss = model(**batch).loss  # this rank's share of the whole row's loss
        (ranks * loss).backward()  # FSDP2 averages over the ranks, and we need the sum
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        if mesh:
            dist.all_reduce(total, group=mesh.get_group())
        losses.append(total.item())
        seconds.append(time.perf_counter() - start)
        if hasattr(bar, "set_postfix_str"):
            bar.set_postfix_str(f"loss {losses[-1]:.3f}")
    return {"ranks": ranks, "losses": losses, "seconds": sorted(seconds)[len(seconds) // 2]}


def draw(runs: list[dict], words: argparse.Namespace) -> None:
    words.out.with_suffix(".json").write_text(json.dumps({"length": words.length, "runs": runs}, indent=1) + "\n")
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for run, style in zip(runs, ("-", "--"), strict=False):
        label = f"{run['ranks']} rank{'s' * (run['ranks'] > 1)}, {run['seconds']:.2f} s a step"
        axes.plot(run["losses"], style, lw=2, label=label)
    axes.set(xlabel="step", ylabel="loss, nats a byte", title=f"rows of {words.length:,} tokens")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(words.out.with_suffix(".png"), dpi=130)


def main() -> None:
    words, local = options(), int(os.environ.get("LOCAL_RANK", "0"))
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = "cuda" if on_gpus else "cpu"
    if on_gpus:
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    try:
        mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))
        runs = [train(words, device, None)] if words.alone else []
        runs.append(train(words, device, mesh))
        if dist.get_rank() == 0:
            draw(runs, words)
            for run in runs:
                first, *_, last = run["losses"]
                print(f"{run['ranks']} ranks: loss {first:.4f} to {last:.4f}, {run['seconds']:.3f} s a step")
            if words.alone:
                apart = max(abs(a - b) for a, b in zip(runs[0]["losses"], runs[1]["losses"], strict=True))
                print(f"the curves are at most {apart:.2g} apart; wrote {words.out.with_suffix('.json')}")
        dist.barrier()  # gloo may abort a process that exits right after a collective
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
