#!/usr/bin/env python3
"""Holds the registers that CUDA kernels spill to limits, each with its reason.

    .ci/spills.py LOG ...        what builds printed: ptxas warns about each kernel that spills

Exit code 1: a kernel spills more bytes than its line of KNOWN allows, or has no line. The limits are what nvcc 13.0 needs for
sm_90a.
"""

import re
import subprocess
import sys
from pathlib import Path

SPILL = re.compile(r"Registers are spilled to local memory in function '(\w+)', (\d+) bytes spill stores")

# The first pattern that a kernel's name begins with counts: (pattern, bytes, reason).
HALF = r"<(__half|__nv_bfloat16), "
FORWARD_SM90 = r"attention_forward_sm90<\w+, ForwardSm90Variant<"
KNOWN = [
    (r"float64::key_gradient<true>", 1564, "float64: two products of doubles per score, with sparsity among the options"),
    (r"float64::", 1220, "float64: a warp holds 16 x 128 doubles of output, which is all registers"),
    (FORWARD_SM90 + r"7, \(ForwardSm90Features\)3, ", 260, "sparsity at head dim 256: scheduling"),
    (FORWARD_SM90 + r"\d, \(ForwardSm90Features\)[34], ", 158, "sparsity: scheduling, docs/lab/spans.md"),
    (FORWARD_SM90 + r"7, ", 216, "head dim 256 with options: 128 registers hold the output"),
    (FORWARD_SM90 + r"6, ", 60, "head dim 192 with options: 96 registers hold the output"),
    (FORWARD_SM90 + r"4, ", 20, "head dim 128, packed or with options"),
    (r"attention_backward_sm90<\w+, \d+, \d+, \(BackwardSm90Features\)3>", 716, "sparsity: not in the loop"),
    (r"attention_backward_sm90<", 4, "masks at head dim 64 and 128: docs/design/backward_sm90.md"),
    (r"attention_backward_bf16x2_sm90<", 164, "float32 as two bf16 digits: twice the operands"),
    (r"attention_float8_sm90<\w+, Float8Variant<\d+, \(Float8Features\)2>", 392, "spans and a softcap: 160 or 240 registers"),
    (r"attention_float8_sm90<", 40, "three warpgroups of 160 registers, or half of 240 for the output: docs/lab/float8.md"),
    (r"attention_latent_sm90<", 60, "not in the loop over tiles: docs/design/decode_latent.md"),
    (r"attention_(forward|backward|backward_dq)_sm80<(float|Bf16x2Float), ", 928, "float32: two or three digits per operand"),
    (r"attention_forward_sm80" + HALF + r"(32|64), ", 56, "not in the loop over blocks that all queries see whole"),
    (r"attention_forward_sm80" + HALF + r"96, ", 72, "not in the loop over blocks that all queries see whole"),
    (r"attention_forward_sm80" + HALF + r"128, ", 130, "not in the loop over blocks that all queries see whole"),
    (r"attention_forward_sm80" + HALF + r"(192|256|512|576), ", 382, "a warp holds 16 rows of the whole output"),
    (r"attention_backward(_dq)?_sm80" + HALF + r"\d+, \(Variant\)[45]", 764, "all options, sparsity among them"),
    (r"attention_backward(_dq)?_sm80" + HALF, 344, "general kernels: a Hopper GPU has better ones up to head dim 256"),
    (r"large_rows_kernel<", 12, "doubles of every option: docs/design/large_scores.md"),
    (r"mask_grad_sm80<float>", 656, "float32: three bf16 digits per operand, and lists of blocks"),
    (r"mask_grad_sm80<", 60, "a tile of the mask's gradient and the scores"),
    (r"attention_decode" + HALF + r"(64|96), ", 20, "two tiles of 16 rows per warp"),
    (r"attention_decode" + HALF + r"128, ", 308, "two tiles of 16 rows per warp (docs/lab/decode.md)"),
    (r"attention_decode" + HALF, 264, "head dims of 192 and 256: 16 rows of the whole output per warp"),
    (r"draw_weights<", 12, "a function that is not inlined"),
    (r"merge(_shares|_dense_rows)?<", 108, "64 registers per thread, up to 16 rows of partials at once"),
    (r"multi_cta_kernel<IndexLossBackward<true, true>, ", 112, "48 registers per thread, and the gradient of an entropy"),
    (r"multi_cta_kernel<|partial_kernel<", 88, "48 registers per thread, so that five CTAs are resident"),
    (r"register_kernel<IndexLossBackward<false, true>, ", 100, "64 registers per thread, and the gradient of an entropy"),
    (r"register_kernel<ProbabilityLossBackward<", 116, "two tensors of four vectors in 64 registers per thread"),
    (r"register_kernel<", 44, "64 registers per thread: docs/design/rows.md"),
    (r"(block|shared)_kernel<ProbabilityLossBackward<true>, ", 140, "two tensors, and the gradient of an entropy"),
    (r"__cuda_sm3x_div_rn_noftz_f32_slowpath", 4, "the division of subnormal numbers"),
    (r"__cuda_sm20_rcp_rn_f32_slowpath", 8, "the reciprocal of a subnormal number, which no row's sum is"),
    (r"(block|shared)_kernel<ProbabilityLossBackward<", 124, "two tensors in 64 registers per thread"),
    (r"(block|shared)_kernel<IndexLossBackward<false, true>, ", 108, "as below, and the gradient of an entropy"),
    (r"(block|shared)_kernel<IndexLoss", 56, "16-bit logits with a target per row in 64 registers per thread"),
    (r"finish_kernel<IndexLoss<true, false>, ", 4, "32 registers per thread"),
    (r"strided_kernel<IndexLossBackward<true, true>, ", 4, "not in the loop over classes"),
]  # fmt: skip


def main(paths: list[str]) -> int:
    spilled = {}
    for path in paths:
        for name, count in SPILL.findall(Path(path).read_text(errors="replace")):
            spilled[name] = max(spilled.get(name, 0), int(count))
    names = subprocess.run(["c++filt"], input="\n".join(spilled), check=True, capture_output=True, text=True).stdout.split("\n")
    wrong = 0
    for full, count in zip(names, spilled.values(), strict=False):
        name = (
            re.sub(r"flash_online::cuda::|\(anonymous namespace\)::", "", full)
            .removeprefix("void ")
            .removeprefix("unsigned int ")
        )
        limit = next((most for pattern, most, _ in KNOWN if re.match(pattern, name)), 0)
        if count > limit:
            wrong += 1
            print(f"{name[:110]}: {count} bytes, {limit} are allowed")
    print(f"{len(spilled)} kernels spill; {wrong} of them more than .ci/spills.py allows")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
