"""The workflows that measure or prove something: what is in each; ``make_workflows`` makes files of them.

A function here fills a ``Graph`` and lays it out with ``Group`` (both of ``make_workflows``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from measurement_notes import BLOCK_NOTE, FIRST_PROOF_NOTE, LADDER_NOTE, ROOFLINE_NOTE, STEP_NOTE
from workflow_notes import BENCH_ATTENTION_NOTE, BENCH_NOTE
from workflow_parts import fuse, sample, schedule

GREY, GREEN, PURPLE = "#999999", "#88aa88", "#a1309b"
# Width of a node, and room for the table and the picture that it shows, in pixels.
SIZES = {
    "H3BW_BenchKernels": (900, 900),
    "H3BW_BenchAttention": (1100, 700),
    "H3BW_ParityLadder": (1100, 1300),
    "H3BW_BenchStep": (1100, 900),
    "H3BW_BenchBlock": (1000, 700),
    "H3BW_Roofline": (900, 900),
    "H3BW_Environment": (800, 700),
}


def alone(class_type: str, note: str, **inputs: Any) -> Callable:
    """A workflow of one node that needs nothing connected."""

    def fill(graph, group):
        node = graph.add(class_type, filename_prefix=f"h3bw/{graph.name}", **inputs)
        text = graph.explain(note)
        graph.lay_out([group("Read me", [[text]], GREY)], [group("This machine", [[node]], PURPLE)])
        return graph

    return fill


def on_the_selftest(class_type: str, note: str, **inputs: Any) -> Callable:
    """A workflow of one node behind the self-test's model, whose place a user's own loader takes."""

    def fill(graph, group):
        tiny = graph.add("H3BW_SelfTestModel", adaln="pruned", width=64, height=64, length=22, seed=0, reference="none")
        node = graph.add(class_type, model=tiny["MODEL"], filename_prefix=f"h3bw/{graph.name}", **inputs)
        text = graph.explain(note)
        graph.lay_out(
            [group("Read me", [[text]], GREY)],
            [group("The model: put your own loader here", [[tiny]])],
            [group("This machine", [[node]], PURPLE)],
        )
        return graph

    return fill


def first_proof(graph, group):
    """From nothing to a proof in one queue: what there is, the self-test, kernels, attention, parity."""
    environment = graph.add("H3BW_Environment")
    tiny = graph.add("H3BW_SelfTestModel", adaln="pruned", width=64, height=64, length=22, seed=0, reference="none")
    fused = fuse(graph, None, tiny["MODEL"])
    scheduled = schedule(graph, tiny["MODEL"], 4)

    def sampled(title, model):
        return sample(graph, scheduled, model, tiny["positive"], tiny["LATENT"], title)

    stock, ours = sampled("stock", tiny["MODEL"]), sampled("fused", fused["MODEL"])
    prefix = f"h3bw/{graph.name}"
    report = graph.add(
        "H3BW_RuntimeReport", "2. Certified, fused, equal?", model=fused["MODEL"], latent=ours[1]["output"],
        reference=stock[1]["output"], on_difference="report", filename_prefix=f"{prefix}_selftest",
    )  # fmt: skip
    kernels = graph.add(
        "H3BW_BenchKernels", "3. Kernels", rows=4096, ops="all", rounds=10, filename_prefix=f"{prefix}_kernels"
    )
    attention = graph.add(
        "H3BW_BenchAttention", "4. Attention", rows=4096, backend="all", rounds=10,
        filename_prefix=f"{prefix}_attention",
    )  # fmt: skip
    ladder = graph.add(
        "H3BW_ParityLadder", "5. Parity", model=tiny["MODEL"], width=64, height=64, length=22,
        filename_prefix=f"{prefix}_parity",
    )  # fmt: skip
    environment.title = "1. What is here"
    note = graph.explain(FIRST_PROOF_NOTE)
    graph.lay_out(
        [group("Read me", [[note]], GREY), group("1. Environment", [[environment]], PURPLE)],
        [
            group(
                "2. Self-test: the tiny H3, stock and fused",
                [[tiny, fused], [*scheduled], [*stock, *ours]],
                GREEN,
            ),
            group("2. Certified, fused, equal?", [[report]], PURPLE),
        ],
        [group("3. Kernels", [[kernels]], PURPLE), group("4. Attention", [[attention]], PURPLE)],
        [group("5. Parity, rung by rung", [[ladder]], PURPLE)],
    )
    return graph


MEASUREMENTS = {
    "first_proof": first_proof,
    "bench_kernels": alone("H3BW_BenchKernels", BENCH_NOTE, ops="all"),
    "bench_attention": alone("H3BW_BenchAttention", BENCH_ATTENTION_NOTE, backend="all"),
    "bench_block": alone("H3BW_BenchBlock", BLOCK_NOTE),
    "bench_step": alone("H3BW_BenchStep", STEP_NOTE, also_attention="none"),
    "bench_roofline": alone("H3BW_Roofline", ROOFLINE_NOTE),
    "parity_ladder": on_the_selftest("H3BW_ParityLadder", LADDER_NOTE),
}
