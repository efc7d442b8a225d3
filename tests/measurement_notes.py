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
