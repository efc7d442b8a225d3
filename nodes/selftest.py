"""``H3BW_SelfTestModel`` and ``H3BW_SelfTestDecode``: the whole path of a generation, without any real weights.

The model is three blocks of 256 channels in the real key format, quantised by this pack's own writer, written to
ComfyUI's temp folder and loaded through the same function as a real file. Its pictures mean nothing; its bits do.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os

import comfy.latent_formats
import comfy.model_management
import comfy.nested_tensor
import comfy.utils
import folder_paths
import torch
from comfy_api.latest import io

from ..kernels.checkpoint import tiny, writer
from .load import load_h3

FPS = 24
AUDIO_LATENT_FPS = 40
SAMPLE_RATE = 32000
PATCH = 32  # pixels of one token's side: a 16-pixel latent cell, patched 2x2
FRAMES_PER_LATENT = (1, 4, 4, 4, 4)  # pixel frames that each latent frame stands for, repeating
TEXT_TOKENS = 20
REFERENCES = ["none", "image", "video_audio", "audio", "all"]

log = logging.getLogger("h3bw")


def snap_frames(length: int) -> int:
    """The next length on H3's grid of 17k + 5 frames: 1 -> 5, 120 -> 124, 124 -> 124."""
    return max(0, math.ceil((length - 5) / 17)) * 17 + 5


def latent_frames(frames: int) -> int:
    """Latent frames of a clip on the grid: 5 -> 2, 22 -> 7, 124 -> 37."""
    return (frames - 5) // 17 * 5 + 2


def pixel_frames(latents: int) -> int:
    """Pixel frames of a latent clip, the inverse of :func:`latent_frames`."""
    return sum(FRAMES_PER_LATENT[index % 5] for index in range(latents))


def audio_steps(frames: int) -> int:
    """Audio latent steps at 40 Hz of a clip of ``frames`` at 24 fps."""
    return round(frames / FPS * AUDIO_LATENT_FPS)


def rgb_factors() -> tuple[torch.Tensor, torch.Tensor]:
    """``([24, 3] factors, [3] bias)`` with which the latent format previews a latent as RGB in -1..1."""
    latent_format = comfy.latent_formats.MiniMaxH3Video
    return torch.tensor(latent_format.latent_rgb_factors), torch.tensor(latent_format.latent_rgb_factors_bias)


def image_to_latent(image: torch.Tensor, width: int, height: int) -> torch.Tensor:
    """A latent ``[1, 24, 1, height/16, width/16]`` whose RGB preview is the picture.

    Args:
        image: ``[B, H, W, C]`` in 0..1; the first picture is used, stretched to the canvas as H3's first frame is.
    """
    factors, bias = rgb_factors()
    pixels = image[:1, :, :, :3].movedim(-1, 1).float()
    small = comfy.utils.common_upscale(pixels, width // 16, height // 16, "area", "disabled")
    wanted = small.movedim(1, -1) * 2.0 - 1.0 - bias
    return (wanted @ torch.linalg.pinv(factors)).movedim(-1, 1).unsqueeze(2).contiguous()


def latent_to_frames(video: torch.Tensor) -> torch.Tensor:
    """Pixel frames ``[F, H, W, 3]`` in 0..1 of a video latent ``[1, 24, T, h, w]``: 16-pixel cells, held in time."""
    factors, bias = rgb_factors()
    rgb = (video[0].float().movedim(0, -1) @ factors + bias) * 0.5 + 0.5
    rgb = rgb.clamp(0.0, 1.0).repeat_interleave(16, dim=1).repeat_interleave(16, dim=2)
    held = torch.tensor([FRAMES_PER_LATENT[index % 5] for index in range(rgb.shape[0])])
    return rgb.repeat_interleave(held, dim=0)


def latent_to_audio(audio: torch.Tensor) -> torch.Tensor:
    """A stereo track ``[1, 2, samples]`` at 32 kHz in -1..1 of an audio latent ``[1, 32, 2, A]``.

    The 32 channels of each side are the strengths of 32 harmonics of 110 Hz, so different latents sound different.
    """
    channels, sides, steps = audio.shape[1:]
    samples = steps * SAMPLE_RATE // AUDIO_LATENT_FPS
    strength = audio[0].float().movedim(1, 0)  # [side, channel, step]
    strength = torch.nn.functional.interpolate(strength, size=samples, mode="linear")
    seconds = torch.arange(samples, dtype=torch.float64) / SAMPLE_RATE
    pitch = 110.0 * torch.arange(1, channels + 1, dtype=torch.float64)
    wave = torch.sin(2 * math.pi * pitch[:, None] * seconds[None]).float()
    return torch.tanh((strength * wave).sum(1) / math.sqrt(channels)).reshape(1, sides, samples)


def reference_blocks(kind: str, width: int, height: int, generator: torch.Generator) -> list[dict]:
    """Ref2VA blocks as core's node makes them: an image, a video with its sound, or sound alone."""

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    rows, columns = height // 16, width // 16
    blocks = []
    if kind in ("image", "all"):
        latent = random(1, 24, 1, rows, columns)
        blocks.append({"kind": "image", "latent_h": rows, "latent_w": columns, "latent": latent})
    if kind in ("video_audio", "all"):
        blocks.append(
            {
                "kind": "video_audio",
                "latent_t": 2,
                "latent_h": rows,
                "latent_w": columns,
                "ref_audio_t": 8,
                "latent": random(1, 24, 2, rows, columns),
                "audio_latent": random(1, 32, 2, 8),
            }
        )
    if kind in ("audio", "all"):
        blocks.append({"kind": "audio", "ref_audio_t": 6, "audio_latent": random(1, 32, 2, 6)})
    return blocks


def conditioning(width, height, frames, seed, first_frame=None, last_frame=None, reference="none", text_dim=64):
    """Conditioning as the H3 text encoder and ``MiniMaxH3ImageToVideo`` would hand it on, from seeded noise."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn(1, TEXT_TOKENS, text_dim, generator=generator)
    tags = torch.ones(1, TEXT_TOKENS, dtype=torch.long)
    keyframes = []
    for image, index in ((first_frame, 0), (last_frame, frames - 1)):
        if image is not None:
            keyframes.append({"resolved_frame_index": index, "latent": image_to_latent(image, width, height)})
    extra = {}
    if keyframes:
        tags[:, 4:9] = 0  # picture tokens inside the text carry the video modality
        extra.update(minimax_keyframes=keyframes, minimax_frame_count=frames)
    if reference != "none":
        extra["minimax_refs"] = reference_blocks(reference, width, height, generator)
    return [[text, {"minimax_token_tags": tags, **extra}]]


def check_canvas(width: int, height: int) -> None:
    """Refuse a canvas off the token grid before anything is sampled."""
    for name, value in (("width", width), ("height", height)):
        if value % PATCH or value < PATCH:
            raise ValueError(f"{name} must be a positive multiple of {PATCH}, have {value}")


def selftest_file(adaln: str, seed: int) -> str:
    """Write the tiny checkpoint to ComfyUI's temp folder unless it lies there already; returns its path."""
    version = hashlib.sha256()
    for module in (tiny, writer):
        with open(module.__file__, "rb") as source:
            version.update(source.read())
    folder = folder_paths.get_temp_directory()
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"h3bw_selftest_{adaln}_{seed}_{version.hexdigest()[:12]}.safetensors")
    if not os.path.exists(path):
        tensors, metadata = tiny.tiny_h3(adaln=adaln, seed=seed)
        writer.write(path, tensors, metadata)
    return path


class SelfTestModel(io.ComfyNode):
    """A tiny H3 with conditioning and an empty latent."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3BW_SelfTestModel",
            display_name="H3 Self-Test Model",
            category="H3 Blackwell/self-test",
            description=(
                "A deterministic tiny MiniMax H3 (3 blocks, NVFP4, real key format) with conditioning and an empty "
                "audio-video latent: the whole path of a generation in seconds, on any machine and without weights."
            ),
            search_aliases=["h3", "minimax", "nvfp4", "test", "tiny", "parity"],
            inputs=[
                io.Combo.Input(
                    "adaln",
                    options=["pruned", "full"],
                    default="pruned",
                    tooltip="Form of the AdaLN projections: pruned (curve table, fp32) or full (time embedder, bf16).",
                ),
                io.Int.Input("width", default=64, min=32, max=2048, step=32, tooltip="Pixels, a multiple of 32."),
                io.Int.Input("height", default=64, min=32, max=2048, step=32, tooltip="Pixels, a multiple of 32."),
                io.Int.Input(
                    "length",
                    default=22,
                    min=1,
                    max=362,
                    tooltip="Frames at 24 fps, raised to the next length that H3 knows (17k + 5).",
                ),
                io.Int.Input(
                    "seed", default=0, min=0, max=2**31 - 1, tooltip="Makes the weights and the conditioning."
                ),
                io.Combo.Input(
                    "reference",
                    options=REFERENCES,
                    default="none",
                    tooltip="Reference blocks as in Ref2VA: an image, a video with sound, sound, or all three.",
                ),
                io.Image.Input("first_frame", optional=True, tooltip="Keyframe at the start (FL2VA)."),
                io.Image.Input("last_frame", optional=True, tooltip="Keyframe at the end (FL2VA)."),
            ],
            outputs=[
                io.Model.Output(tooltip="The tiny H3; its stream is bfloat16 on every device, the CPU included."),
                io.Conditioning.Output(display_name="positive", tooltip="Seeded text states and the keyframes."),
                io.Latent.Output(tooltip="Empty audio-video latent of the length on H3's grid."),
            ],
        )

    @classmethod
    def execute(
        cls, adaln, width, height, length, seed, reference="none", first_frame=None, last_frame=None
    ) -> io.NodeOutput:
        check_canvas(width, height)
        if reference != "none" and (first_frame is not None or last_frame is not None):
            raise ValueError("H3 takes keyframes or references, not both; unplug the frames or set reference to none")
        frames = snap_frames(length)
        if frames != length:
            log.info("H3 Blackwell: length %d is not on H3's grid of 17k + 5 frames; using %d", length, frames)
        # bf16 on the CPU too, where ComfyUI would choose fp32: the fused block is defined on a bf16 stream.
        model = load_h3(selftest_file(adaln, seed), compute_dtype=torch.bfloat16)
        positive = conditioning(width, height, frames, seed, first_frame, last_frame, reference)
        device = comfy.model_management.intermediate_device()
        video = torch.zeros(1, 24, latent_frames(frames), height // 16, width // 16, device=device)
        audio = torch.zeros(1, 32, 2, audio_steps(frames), device=device)
        latent = {"samples": comfy.nested_tensor.NestedTensor((video, audio))}
        return io.NodeOutput(model, positive, latent)


class SelfTestDecode(io.ComfyNode):
    """Frames and sound of an H3 latent without a VAE."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3BW_SelfTestDecode",
            display_name="H3 Self-Test Decode",
            category="H3 Blackwell/self-test",
            description=(
                "Shows an H3 audio-video latent without a VAE: frames through the latent format's RGB factors in "
                "16-pixel cells, and a 32 kHz stereo track of harmonics from the audio latent."
            ),
            search_aliases=["h3", "minimax", "preview", "latent", "decode"],
            inputs=[io.Latent.Input("latent", tooltip="A sampled H3 latent (video and audio).")],
            outputs=[
                io.Image.Output(tooltip="Frames at 24 fps, as many as the latent stands for."),
                io.Audio.Output(tooltip="32 kHz stereo, as long as the frames."),
            ],
        )

    @classmethod
    def execute(cls, latent) -> io.NodeOutput:
        video, audio = av_latent(latent)
        frames = latent_to_frames(video.cpu())
        track = {"waveform": latent_to_audio(audio.cpu()), "sample_rate": SAMPLE_RATE}
        return io.NodeOutput(frames, track)


def av_latent(latent: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """``(video [1, 24, T, h, w], audio [1, 32, 2, A])`` of an H3 latent; ValueError for any other latent."""
    samples = latent["samples"]
    parts = list(samples.unbind()) if getattr(samples, "is_nested", False) else []
    if len(parts) != 2 or parts[0].dim() != 5 or parts[0].shape[:2] != (1, 24) or parts[1].shape[:3] != (1, 32, 2):
        found = [tuple(part.shape) for part in parts] or [tuple(samples.shape)]
        raise ValueError(
            f"an H3 latent holds video [1, 24, T, H/16, W/16] and audio [1, 32, 2, A], this one holds "
            f"{', '.join(map(str, found))}"
        )
    return parts[0], parts[1]
