"""A MiniMax H3 of a few megabytes with random weights, in the real key format, for tests, self-test and demo."""

import math

import torch

from .writer import nvfp4_tensors

VIDEO_CHANNELS = 24
AUDIO_CHANNELS = 32
VIDEO_PATCH = VIDEO_CHANNELS * 1 * 2 * 2
CURVE_GRID = 1025
CURVE_BASIS = 8
TIME_FREQUENCIES = 256
ROPE_LENGTH = 16
MODALITIES = 3
QUANTISED = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
"""The four linears of a DiT block that H3's NVFP4 files quantise."""


def tiny_h3(
    adaln: str = "pruned",
    seed: int = 0,
    hidden: int = 256,
    heads: int = 2,
    head_dim: int = 128,
    ffn: int = 512,
    blocks: int = 3,
    refiner_blocks: int = 2,
    text_dim: int = 64,
    t_emb: int = 32,
    quantise: bool = True,
    device: str | torch.device = "cpu",
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Make the state dict of a small H3. Equal arguments give equal bytes (one generator, a fixed order of draws;
    another device draws other numbers).

    dtypes as in the files in circulation: patch projections, output heads, time embedder and rope fp32; everything else
    bf16, but the AdaLN linears of the pruned form fp32; the four linears of each DiT block NVFP4 (``quantise=False``
    leaves them bf16). Row norms of the quantised linears vary lognormally, as trained ones do, so that a wrong layout
    of their scales shows. Branch outputs are scaled down and gates kept near a half: the velocity is of the order of
    one and a sampling run stays finite, with every weight mattering.

    Args:
        adaln: ``pruned`` (fp32 table ``[1025, 8]`` of the time curve) or ``full`` (time embedder of width `t_emb`).
        heads, head_dim: head_dim at least 96, because rope turns 96 of a head's dimensions.
        text_dim: width of the text conditioning; not equal to `hidden`, or ComfyUI skips the refiner.
        device: where the numbers are drawn and quantised, and where the tensors lie. A model of full size (12.6 GB) is
            made in seconds on a GPU and in an hour on a CPU.

    Returns:
        Tensors by name and the file's metadata.

    Raises:
        ValueError: an unknown `adaln` or an impossible size.
    """
    if adaln not in ("pruned", "full"):
        raise ValueError(f"tiny_h3: adaln must be pruned or full, is {adaln!r}")
    if head_dim < 6 * ROPE_LENGTH or head_dim % 2:
        raise ValueError(f"tiny_h3: head_dim must be even and at least {6 * ROPE_LENGTH}, is {head_dim}")
    draw = _Draw(seed, device)
    inner = heads * head_dim
    sd: dict[str, torch.Tensor] = {}

    def linear(
        name: str, rows: int, cols: int, gain: float = 1.0, bias: bool = False, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        sd[f"{name}.weight"] = draw.matrix(rows, cols, gain / math.sqrt(cols)).to(dtype)
        if bias:
            sd[f"{name}.bias"] = draw.normal((rows,), 0.02).to(dtype)

    def norm(name: str, width: int) -> None:
        sd[f"{name}.weight"] = (1.0 + draw.normal((width,), 0.1)).to(torch.bfloat16)

    def attention_and_mlp(name: str) -> None:
        norm(f"{name}.norm1", hidden)
        norm(f"{name}.norm2", hidden)
        linear(f"{name}.attn.qkv_proj", 3 * inner, hidden)
        norm(f"{name}.attn.q_norm", head_dim)
        norm(f"{name}.attn.k_norm", head_dim)
        linear(f"{name}.attn.out_proj", hidden, inner, gain=0.5)
        linear(f"{name}.mlp.fc1", 2 * ffn, hidden)
        linear(f"{name}.mlp.fc2", hidden, ffn, gain=0.5)

    def adaln_linear(name: str, vectors: int, modalities: int, gate: tuple[int, ...]) -> None:
        # rows are [modality, vector, hidden]; the bias carries the level, the weight the change over time
        dtype = torch.float32 if adaln == "pruned" else torch.bfloat16
        width = CURVE_BASIS if adaln == "pruned" else t_emb
        rows = modalities * vectors * hidden
        sd[f"{name}.weight"] = draw.normal((rows, width), 0.2 / math.sqrt(width)).to(dtype)
        bias = draw.normal((modalities, vectors, hidden), 0.1)
        for vector in gate:
            bias[:, vector] += 0.5
        sd[f"{name}.bias"] = bias.flatten().to(dtype)

    linear("video_patch_proj", hidden, VIDEO_PATCH, bias=True, dtype=torch.float32)
    linear("audio_patch_proj", hidden, AUDIO_CHANNELS, bias=True, dtype=torch.float32)
    linear("condition_proj", hidden, text_dim, bias=True)
    if adaln == "pruned":
        sd["adaln_t_table"] = _time_curve().to(device)
    else:
        linear("time_embedder.proj_in", hidden, TIME_FREQUENCIES, bias=True, dtype=torch.float32)
        linear("time_embedder.proj_out", t_emb, hidden, gain=4.0, bias=True, dtype=torch.float32)
    inv_freq = 10000.0 ** (-torch.arange(ROPE_LENGTH, dtype=torch.float32) / ROPE_LENGTH)
    sd["rope.inv_freq"] = inv_freq.to(device)
    for i in range(refiner_blocks):
        attention_and_mlp(f"token_refiner.blocks.{i}")
    norm("token_refiner.final_norm", hidden)
    for i in range(blocks):
        attention_and_mlp(f"blocks.{i}")
        adaln_linear(f"blocks.{i}.adaln_proj.linear", 6, MODALITIES, gate=(2, 5))
        if quantise:
            for kind in QUANTISED:
                sd.update(nvfp4_tensors(f"blocks.{i}.{kind}", sd.pop(f"blocks.{i}.{kind}.weight")))
    norm("final_layer.norm", hidden)
    adaln_linear("final_layer.adaln_proj.linear", 2, 1, gate=())
    linear("final_layer.video_out", VIDEO_PATCH, hidden, bias=True, dtype=torch.float32)
    linear("final_layer.audio_out", AUDIO_CHANNELS, hidden, bias=True, dtype=torch.float32)
    return sd, {"format": "pt", "model": f"tiny MiniMax H3 with random weights, adaln {adaln}, seed {seed}"}


class _Draw:
    """Random numbers from one generator."""

    def __init__(self, seed: int, device: str | torch.device):
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, shape: tuple[int, ...], std: float) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float32, device=self.generator.device)
        return drawn * std

    def matrix(self, rows: int, cols: int, std: float) -> torch.Tensor:
        """Normal entries with lognormal row norms (sigma 0.5), overall rms `std`."""
        row = torch.exp(self.normal((rows, 1), 0.5))
        return self.normal((rows, cols), std) * row / row.square().mean().sqrt()


def _time_curve() -> torch.Tensor:
    """``[1025, 8]`` fp32: a smooth curve over t in [0, 1], cosines of rising frequency."""
    t = torch.linspace(0.0, 1.0, CURVE_GRID, dtype=torch.float64).unsqueeze(1)
    return torch.cos(math.pi * t * torch.arange(1, CURVE_BASIS + 1, dtype=torch.float64)).to(torch.float32)
