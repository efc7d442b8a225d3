"""What the notes of the measuring workflows say to a person."""

LADDER_NOTE = """# Is the patched model the same as stock, here?

Press **Run**. Without weights it climbs with the self-test's tiny model; **put your own loader in its place** (and, \
if you like, Fuse H3 Blocks with your settings, your conditioning and your latent) and it climbs with those. Without \
conditioning it makes two small prompts of noise: text alone (T2VA), and a first and a last frame (FL2VA).

| rung | |
|---|---|
| **0** | stock repeats itself; if not, no comparison means anything |
| **1** | every kernel on awkward values and on random ones, against comfy-kitchen's own quantiser |
| **2** | the four linears of three blocks of your model: our codes against ComfyUI's own, and the products |
| **3** | three complete blocks, each on the stream that stock hands to it |
| **4** | all blocks, each side on its own stream |
| **5** | two sampling steps: what the sampler holds and what the model predicts |
| **6** | twelve steps: SHA-256 of the final latent |
| **7** | peak memory, and a profile of one step |

Stock is the same model without Fuse H3 Blocks; the attention backend and LoRA branches are the same on both sides. \
**passed** is bit equality. **failed** names the first block that differs, with the largest and the relative \
difference, the signal-to-noise ratio and the number of elements. **skipped** has a reason and never counts as passed.

On a GPU without FP4 the ladder is climbed twice: with the linears as they run there, and with four bits emulated, \
which is what shows the NVFP4 producers. The emulation is slow: leave the canvas small with real weights.

The record, `output/h3bw/parity_ladder_*.json`, can be shared: it holds no path, no host name and no serial number.

Without a browser: `comfy run --workflow workflows/api/parity_ladder.json --wait`.
"""

STEP_NOTE = """# Seconds per step: stock ComfyUI against this pack

Press **Run**. No weights are needed: a MiniMax H3 of full size (50 blocks, NVFP4, random, 12.6 GB) is drawn on the \
GPU. Or connect your own model. Close other programs that use the GPU; at 1344x768 it takes some minutes.

| variant | |
|---|---|
| **stock** | ComfyUI as it is, with its default attention; a second copy of it, (A/A), is the control |
| **pack** | Fuse H3 Blocks and H3 Attention Backend, both with their defaults: exact |
| **attention**, **fuse** | one of the two alone |
| a backend's name | the fused blocks with that attention backend; approximate ones say nothing of quality here |

Same model, prompt, seed, sampler and loader, in one run and in rotation. The first step of every pass is left out. \
**peak** is the most memory that torch held during a pass, the weights included. The verdict wants 0.5 % and 5 ms. \
**fuse** has to give stock's latent bit for bit, and **pack** that of **attention**; choose *each half alone* to see it.

Below stand predictions for GPUs that were not measured, from the roofline. They are no measurements; your record \
takes the place of the one for your GPU.

The record, with every sample, is `output/h3bw/bench_step_*.json`; the plot lies beside it if matplotlib is installed.

**On a CPU** the tiny model runs one pass, and the table says that it is no measurement.

Without a browser: `comfy run --workflow workflows/api/bench_step.json --wait`.
"""

BLOCK_NOTE = """# How much does one block gain?

Press **Run**. No weights are needed: one MiniMax H3 block of real width is drawn on the GPU. Or connect your own \
model and choose a block. At 38,016 rows it wants about 10 GiB.

| variant | |
|---|---|
| **stock** | ComfyUI's own block, with its default attention |
| **attention** | the same with H3 Attention Backend on auto |
| **fuse** | Fuse H3 Blocks, with ComfyUI's default attention: has to equal **stock** bit for bit |
| **pack** | both: has to equal **attention** bit for bit |

Each variant runs once a round, in balanced orders, and stock runs twice a round under two names: if the two differ, \
nothing is concluded. Equality is checked before and after the timing. `accept` means faster by at least 1 % and 50 us.

The record, with every sample, is `output/h3bw/bench_block_*.json`.

**On a CPU** the tiny model's block runs on a few rows, and the table says that it is no measurement.

Without a browser: `comfy run --workflow workflows/api/bench_block.json --wait`.
"""

ROOFLINE_NOTE = """# How near to the limits of this machine?

Press **Run**. No model and no weights are needed, but about 8 GiB of GPU memory.

| column | |
|---|---|
| **bf16** | the GEMM with the weights in bf16 |
| **dequantised** | the same with four-bit weights dequantised in the call: what ComfyUI runs without FP4 |
| **fp4** | comfy-kitchen's FP4 GEMM, where the GPU has it |
| **auto** | a producer as this pack runs it here |
| floor ms | the larger of bytes / copy bandwidth and flops / peak |
| share | floor / measured: 100 % is the limit |

The copy is measured in the same run; the peak is the data sheet's where this pack knows it, else that of a square \
GEMM in the same run.

The record, with every sample, is `output/h3bw/bench_roofline_*.json`; the plot lies beside it if matplotlib is \
installed.

**On a CPU** small sizes run, and the table says that it is no measurement.

Without a browser: `comfy run --workflow workflows/api/bench_roofline.json --wait`.
"""

FIRST_PROOF_NOTE = """# From nothing to a proof on your GPU

Press **Run** once. No weights, no download; a minute or two on a GPU that this pack has not seen yet, because its \
kernels are compiled and certified first.

| | what you see |
|---|---|
| **1. Environment** | your GPU, versions, which kernels and attention backends run here, and why others do not |
| **2. Self-test** | a tiny MiniMax H3 sampled by stock ComfyUI and by this pack, same noise: equal, bit for bit? |
| **3. Kernels** | every fused op against ComfyUI's own chain, on 4,096 rows |
| **4. Attention** | every backend that runs here: time, error, memory, and what `auto` takes |
| **5. Parity** | from single kernels to whole sampling runs: passed, failed or skipped, with the reason |

**How to read it.** `passed` and `PASSED` are what you want; a *skipped* rung says what is missing here and proves \
nothing; a *failed* one names the first difference: please report it with the JSON. Numbers of 4,096 rows are a first \
look; the workflows *bench_kernels* and *bench_attention* measure H3's real size.

The panel **H3 Blackwell** in the sidebar shows what runs while it runs. All records are JSON files in \
`output/h3bw/first_proof_*`; they hold no path, no host name and no serial number.

**On a CPU** the references run on a few rows, nothing is fused, and the tables say that they are no measurement.

Without a browser: `comfy run --workflow workflows/api/first_proof.json --wait`.
"""
