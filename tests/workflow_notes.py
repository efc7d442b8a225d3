"""What the workflows say to a person: the prompts of the real graphs and the text of every note."""

PROMPTS = {
    "t2va": (
        "A lighthouse on a rocky coast at dusk, wide shot, slow push in. Waves break against the rocks, gulls circle, "
        "the lamp begins to turn. Sound: surf, wind, gulls, a low foghorn in the distance."
    ),
    "fl2va": (
        "The scene opens exactly on the first picture and ends exactly on the last one; one continuous slow camera "
        "move joins the two. Sound: quiet room tone that swells into soft strings."
    ),
    "ref2va": (
        "The person of <Picture 1> walks through the place of <Video 1> and turns to the camera at the end. Keep the "
        "ambience of <Audio 1>; <Audio 2> plays as music from a radio nearby."
    ),
}

SELFTEST_NOTE = """# Self-test: {task}, no weights needed

Press **Run**. The graph samples a tiny MiniMax H3 (3 blocks, NVFP4, real key format, {adaln} AdaLN, 64x64, 22 frames) \
four times from the same noise, in seconds and on any machine, and stops with an error if anything differs.

| | blocks | linears | attention |
|---|---|---|---|
| **A** | ComfyUI's own | as this machine runs them | ComfyUI's own |
| **B** | fused by this pack | as this machine runs them | ComfyUI's own |
| **C** | ComfyUI's own | 4-bit weights times 4-bit activations, emulated | this pack's `auto` |
| **D** | fused by this pack | 4-bit weights times 4-bit activations, emulated | this pack's `auto` |

**B must equal A and D must equal C, bit for bit**, video and audio. The two reports show it, with the number of fused \
blocks and the attention backend that ran, and write JSON to `output/h3bw/{name}_*.json`.

Then D's latent becomes a clip without a VAE: flat colour cells and a chord, made from the latent itself. **H3 Media \
Check** saves it as `output/video/{name}_*.mp4`, opens the file again and compares size, codec, frame count, durations \
and sound with the latent's own numbers.

The pictures mean nothing; the bits do. `emulate` is for this kind of check only: in real use it stays `off`, and the \
linears run on the GPU's own FP4 units.

Without a browser: `comfy run --workflow workflows/api/{name}.json --wait`.
"""

REAL_NOTE = """# MiniMax H3 with NVFP4 and fused blocks

**Weights are not part of this pack.** Get them yourself (on Hugging Face: `Comfy-Org/MiniMax-H3`) and **read their \
licence first: it excludes some regions**, and keeping it is up to you. The file names below are examples; choose \
yours in the loaders.

| folder | file |
|---|---|
| `models/diffusion_models` | `{model}` |
| `models/text_encoders` | `qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors` |
| `models/vae` | `minimax_h3_video_vae_fp16.safetensors` |
| `models/vae` | `minimax_h3_audio_vae_fp32.safetensors` |

- **Load MiniMax H3** reads NVFP4 files in ComfyUI's and in ModelOpt's layout, and every other H3 file that ComfyUI \
reads. On unified memory switch `direct_read` on.
- **LoRAs**: put **H3 LoRA Side Branch** between the loader and the sigma shift, one for each. ComfyUI's own LoRA \
nodes work too, but folded into four bits a small LoRA drowns in rounding noise; the report says so.
- **Fuse H3 Blocks**, mode `exact`: the same bytes as ComfyUI's own chain on the same device. Bypass it to compare.
- **H3 Attention Backend**, `auto`: an exact backend. A name picks one; the run stops with the reason if it cannot run.
- **H3 Runtime Report** says what really ran: fused blocks, fallbacks with their reasons, seconds per step, peak memory.

1344x768, 124 frames at 24 fps (lengths are 17k + 5), {steps} steps, no CFG, no negative prompt. Before the first real \
run, try the workflow `selftest_t2va`: it needs no weights.
"""

TASK_NOTES = {
    "t2va": "\n**T2VA**: video and stereo sound from text alone. Describe the sound too.\n",
    "fl2va": (
        "\n**FL2VA**: the first frame is stretched to the canvas, the last one is cropped to it around its centre. "
        "Either may be left out.\n"
    ),
    "ref2va": (
        "\n**Ref2VA**: name the references in the prompt as `<Picture 1>`, `<Video 1>`, `<Audio 1>`. A video's own "
        "sound comes before the separate sounds: here `<Audio 1>` is the video's and `<Audio 2>` the file's. Reference "
        "videos are read at 24 fps, 2 to 15 s; every reference makes each step slower.\n"
    ),
}

TURBO_NOTE = """
**Turbo**: 8 steps with a distillation LoRA in `models/loras`, for example `{lora}` (on Hugging Face: \
`lightx2v/Minimax-h3-Turbo`; read its licence too). It runs in bf16 beside the four-bit linears, at its full strength, \
and the file stays on disk as it is: switch it off with strength 0 and set 20 steps again. Each Turbo LoRA has its own \
number of steps and its own shifts; this one was made for 8 steps, video shift 12 and audio shift 3, at 544p.
"""

BENCH_NOTE = """# How fast are the kernels here?

Press **Run**. No model and no weights are needed, but about 6 GiB of GPU memory; models that are loaded make room. \
Every fused op of this pack is timed on this GPU at H3's real sizes (38,016 rows: 1344x768, 124 frames).

| column | |
|---|---|
| **stock** | what ComfyUI runs: norm, modulation, SiLU and so on one by one, then comfy-kitchen's quantiser |
| **reference** | the op's definition in PyTorch, slow and on any device |
| **triton** | this pack's kernel; `norm aten` keeps ComfyUI's own norm, `norm fused` computes it inside |
| dynamic, static | the activation scale is taken from the data, or given |
| floor ms | the bytes that the op has to move, at the speed of a plain copy measured in the same run |
| parity | checked before and after the timing: equal bytes, or how many codes differ from stock |
| verdict | `accept`: faster than stock by at least 5 % and 10 us, whatever the noise. `inconclusive` is not a yes |

Every variant runs once a round, in balanced orders, and stock runs twice a round under two names: if the two differ, \
nothing is concluded. Close other programs that use the GPU.

The record, with every sample, the orders and the versions, is `output/h3bw/bench_kernels_*.json`; the plot lies \
beside it if matplotlib is installed. The record holds no paths, no host name and no serial number: it can be shared.

**On a CPU** only the references run, on a few rows, and the table says that it is no measurement.

Without a browser: `comfy run --workflow workflows/api/bench_kernels.json --wait`.
"""

BENCH_ATTENTION_NOTE = """# Which attention is fastest here?

Press **Run**. No model and no weights are needed, but about 6 GiB of GPU memory at 38,016 rows (1344x768, 124 frames) \
and 17 GiB at 108,800; models that are loaded make room.

| column | |
|---|---|
| **stock** | the kernel that ComfyUI picks among PyTorch's, called directly |
| **auto** | what **H3 Attention Backend** runs when it is set to auto, copies included |
| exact, approximate | full softmax attention with fp32 accumulation, or 8 bits, or sparse |
| TFLOP/s | of full attention, also where a sparse kernel computes less |
| relative, cosine, worst channel | against double precision, on 128 rows of 4 heads, before and after the timing |
| MiB above | the most memory that one call held beside q, k, v and its result |
| verdict | `accept`: faster than stock by at least 5 % and 10 us, whatever the noise. `inconclusive` is not a yes |

Every variant runs once a round, in balanced orders, and stock runs twice a round under two names: if the two differ, \
nothing is concluded. What does not run here stands below the table with the reason. The inputs are noise: a sparse \
kernel's error on them says nothing about a video.

The record, with every sample and what auto measured, is `output/h3bw/bench_attention_*.json`; the plot lies beside it \
if matplotlib is installed.

**On a CPU** one small call runs, and the table says that it is no measurement.

Without a browser: `comfy run --workflow workflows/api/bench_attention.json --wait`.
"""

QUANTIZE_NOTE = """# A bf16 or fp8 MiniMax H3 to NVFP4

Choose your file and press **Run**. The result lands in `output/diffusion_models`, where every loader looks too \
(refresh the list with **R**), under the source's name with `_nvfp4` unless `output_name` says otherwise. ComfyUI's \
own *Load Diffusion Model* reads it as well.

| | |
|---|---|
| **sources** | bf16, fp16, fp32 or fp8 (with its scales), pruned or full, with a prefix or without |
| **quantised** | `attn.qkv_proj`, `attn.out_proj`, `mlp.fc1` and `mlp.fc2` of every block |
| **left as it is** | AdaLN and its table, patch projections, embedders, norms, text refiner, output heads |
| **`scale`** | `adaptive` tries six scales for every 16 weights and leaves 8 to 14 % less error than `amax`, \
ComfyUI's way; same format, same speed of the model, several times slower to make |
| **`keep_layers`** | what stays in the source's precision, for a mixed file: `blocks.0, blocks.49.mlp.fc2, mlp.fc2` |

It reads and writes tensor by tensor: a few GB of memory do. The file is written under a hidden name and renamed when \
it is whole and on the disk; a cancel leaves nothing, and an existing file is never replaced.

The node shows the relative weight error of every layer; the report (JSON) and the picture are \
`output/h3bw/quantize_checkpoint_*`. About 0.08 to 0.095 is usual for NVFP4. A layer far above the others is a \
candidate for `keep_layers`.

Without a browser: `comfy run --workflow workflows/api/quantize_checkpoint.json --wait`, or, without ComfyUI, in the \
pack's folder: `python -m kernels.checkpoint source.safetensors target.safetensors`.
"""
