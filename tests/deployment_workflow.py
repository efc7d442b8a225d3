"""The smoke test of a deployment as a workflow; ``make_workflows`` makes files of it."""

from __future__ import annotations

from collections.abc import Callable

from workflow_parts import fuse, sample, schedule

GREY, GREEN, PURPLE = "#999999", "#88aa88", "#a1309b"
WIDTH, HEIGHT, LENGTH = 320, 192, 22

NOTE = """# Deployment smoke test

Press **Run**, or queue it once when a container has started. It needs no weights: a tiny MiniMax H3 goes the whole \
way of a generation, on any machine.

1. **H3 Warm-up** samples two steps at 320x192, 22 frames: kernels are certified and compiled, attention is chosen, \
the model is loaded. From then on `GET /h3bw/ready` answers 200, until that model is unloaded.
2. The same model samples four steps, and the latent becomes an H.264 file.
3. **H3 Media Check** decodes that file to its end and stops the run with an error unless it is 320x192, H.264, 22 \
frames, 0.917 s at 24 fps, with AAC sound of 32 kHz, two channels and the same length.
4. **H3 Runtime Report** says what ran.

## With your own H3

The tiny model proves the installation, not your checkpoint. For that, open `h3_t2va_nvfp4` and

- put **H3 Warm-up** between *H3 Attention Backend* and what takes its model,
- set 320x192 and length 22 in *MiniMax H3 Image To Video*, and a few steps,
- put **H3 Media Check** in place of *Save Video*, with the sampled latent.

Queue it at the start of the container. Do not keep the warm-up in graphs of daily work on a GPU that cannot hold H3, \
the text encoder and the VAEs at once: each decode pushes H3 out, and the next run would warm up again. `/h3bw/ready` \
says 503 as long as H3 is out.

Without a browser: `comfy run --workflow workflows/api/deployment_smoke.json --wait`; it ends with an error if \
anything is wrong.
"""


def smoke(graph, group: Callable):
    """Fill the graph: the tiny H3, fused and with attention auto, warmed up, sampled, made a clip and checked.

    Args:
        graph: an empty ``Graph`` of ``make_workflows``.
        group: its ``Group``.
    """
    tiny = graph.add(
        "H3BW_SelfTestModel", adaln="pruned", width=WIDTH, height=HEIGHT, length=LENGTH, seed=0, reference="none"
    )
    shifted = graph.add("MiniMaxH3SigmaShift", model=tiny["MODEL"], shift_video=12.0, shift_audio=3.0)
    blocks = fuse(graph, None, shifted["MODEL"])
    attention = graph.add("H3BW_AttentionBackend", model=blocks["MODEL"], backend="auto")
    warm = graph.add("H3BW_Warmup", model=attention["MODEL"], width=WIDTH, height=HEIGHT, frames=LENGTH, steps=2)
    scheduled = schedule(graph, warm["MODEL"], 4)
    guider, latent = sample(graph, scheduled, warm["MODEL"], tiny["positive"], tiny["LATENT"])
    decode = graph.add("H3BW_SelfTestDecode", latent=latent["output"])
    clip = graph.add("CreateVideo", images=decode["IMAGE"], fps=24.0, audio=decode["AUDIO"], bit_depth=8)
    check = graph.add(
        "H3BW_MediaCheck", video=clip["VIDEO"], latent=latent["output"], filename_prefix=f"video/{graph.name}"
    )
    report = graph.add(
        "H3BW_RuntimeReport",
        model=warm["MODEL"],
        latent=latent["output"],
        on_difference="fail",
        filename_prefix=f"h3bw/{graph.name}",
    )
    note = graph.explain(NOTE)
    graph.lay_out(
        [group("Read me", [[note]], GREY)],
        [group("The model: put your own loader here", [[tiny, shifted], [blocks, attention]], GREEN)],
        [group("Ready?", [[warm]], PURPLE), group("Sampling", [[*scheduled], [guider, latent]])],
        [group("A clip, checked on disk", [[decode, clip], [check]], PURPLE), group("What ran", [[report]], PURPLE)],
    )
    return graph
