"""``H3BW_MediaCheck``: the clip on disk is what its latent says it is."""

from __future__ import annotations

import os

import torch
from comfy_api.latest import InputImpl, Types, io, ui

from . import output
from .selftest import FPS, SAMPLE_RATE, av_latent, pixel_frames

TOLERANCE_SECONDS = 1 / FPS
VIDEO_KEYS = ("width", "height", "frames", "fps", "video_codec", "video_seconds")
AUDIO_KEYS = ("audio_codec", "sample_rate", "channels", "audio_seconds")


class MediaError(ValueError):
    """The clip is not what it should be; ``findings`` has one sentence for each difference."""

    def __init__(self, findings: list[str]):
        self.findings = findings
        super().__init__("the clip is not what its latent says: " + "; ".join(findings))


def expected_of(latent: dict) -> dict:
    """What a finished clip of this H3 latent must be (pixels, frames, seconds, hertz)."""
    video, _ = av_latent(latent)
    frames = pixel_frames(video.shape[2])
    return {
        "width": video.shape[4] * 16,
        "height": video.shape[3] * 16,
        "frames": frames,
        "fps": float(FPS),
        "video_codec": "h264",
        "video_seconds": frames / FPS,
        "audio_codec": "aac",
        "sample_rate": SAMPLE_RATE,
        "channels": 2,
        "audio_seconds": frames / FPS,
    }


def refuse_components(components) -> None:
    """Refuse frames or sound that an encoder would answer with a bare error number.

    Raises:
        MediaError: a NaN or Inf, an odd width or height, an empty track, no frames.
    """
    findings = []
    images = components.images
    if images.shape[0] == 0:
        findings.append("there are no frames")
    for name, size in (("height", images.shape[1]), ("width", images.shape[2])):
        if size % 2:
            findings.append(f"{name} {size} is odd, H.264 with 4:2:0 colour needs an even one")
    findings += _nonfinite("the video", images, "values")
    if not float(components.frame_rate) > 0:
        findings.append(f"the frame rate is {components.frame_rate}, must be above 0")
    if components.audio:
        waveform = components.audio["waveform"]
        if waveform.shape[-1] == 0:
            findings.append("audio has 0 samples")
        findings += _nonfinite("audio", waveform, "samples")
    if findings:
        raise MediaError(findings)


def _nonfinite(what: str, tensor: torch.Tensor, unit: str) -> list[str]:
    counts = {"NaN": int(torch.isnan(tensor).sum()), "Inf": int(torch.isinf(tensor).sum())}
    return [f"{what} has {count} {kind} of {tensor.numel()} {unit}" for kind, count in counts.items() if count]


def inspect(path: str) -> dict:
    """Decode a clip to its end and say what it is.

    Args:
        path: file to open with PyAV.

    Returns:
        The keys of :func:`expected_of` that were found (``None`` where a stream is missing), and ``audio_peak`` and
        ``audio_constant`` of the decoded sound.

    Raises:
        MediaError: the file cannot be opened or decoded (cut off, not a clip).
    """
    import av

    found: dict = dict.fromkeys((*VIDEO_KEYS, *AUDIO_KEYS, "audio_peak", "audio_constant"))
    try:
        with av.open(path) as container:
            _inspect_video(container, found)
        with av.open(path) as container:
            _inspect_audio(container, found)
    except (av.FFmpegError, OSError) as error:
        raise MediaError([f"the file cannot be decoded to its end ({error.strerror or error})"]) from error
    return found


def _inspect_video(container, found: dict) -> None:
    if not container.streams.video:
        return
    stream = container.streams.video[0]
    found["video_codec"] = stream.codec_context.name
    found["width"], found["height"] = stream.codec_context.width, stream.codec_context.height
    found["fps"] = float(stream.average_rate) if stream.average_rate else None
    found["frames"] = sum(1 for _ in container.decode(stream))
    if stream.duration is not None:
        found["video_seconds"] = float(stream.duration * stream.time_base)


def _inspect_audio(container, found: dict) -> None:
    if not container.streams.audio:
        return
    stream = container.streams.audio[0]
    found["audio_codec"] = stream.codec_context.name
    found["sample_rate"], found["channels"] = stream.codec_context.sample_rate, stream.codec_context.channels
    if stream.duration is not None:
        found["audio_seconds"] = float(stream.duration * stream.time_base)
    low = high = None
    for frame in container.decode(stream):
        data = frame.to_ndarray()
        low = data.min() if low is None else min(low, data.min())
        high = data.max() if high is None else max(high, data.max())
    if low is not None:
        found["audio_peak"] = float(max(-low, high))
        found["audio_constant"] = bool(high - low < 1e-4)


def compare(found: dict, expected: dict) -> tuple[list[str], list[str]]:
    """Return ``(findings, warnings)``: what makes the clip wrong, and what is only odd."""
    findings = []
    for name, wanted in expected.items():
        have = found[name]
        if have is None:
            if name == "video_codec":
                findings.append("there is no video track")
            elif name == "audio_codec":
                findings.append("there is no audio track")
            elif found["video_codec" if name in VIDEO_KEYS else "audio_codec"]:
                findings.append(f"{name} is not in the file")
        elif name.endswith("_seconds"):
            if abs(have - wanted) > TOLERANCE_SECONDS:
                findings.append(f"{name} is {have:.3f}, must be {wanted:.3f} within {TOLERANCE_SECONDS:.3f}")
        elif name == "fps":
            if abs(have - wanted) > 1e-3:
                findings.append(f"fps is {have:g}, must be {wanted:g}")
        elif have != wanted:
            findings.append(f"{name} is {have}, must be {wanted}")
    warnings = []
    if found["audio_constant"]:
        silent = found["audio_peak"] < 1e-4
        warnings.append("the audio is silent" if silent else "the audio is a constant, so nothing is heard")
    return findings, warnings


class MediaCheck(io.ComfyNode):
    """Write a clip and prove that the file is right."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3BW_MediaCheck",
            display_name="H3 Media Check",
            category="H3 Blackwell/diagnostics",
            description=(
                "Writes the clip as H.264 and AAC into the output folder, decodes the file to its end and compares "
                "size, codec, frame count, durations, sample rate and channels with the latent's own numbers. Stops "
                "the run when something differs. A clip that already is a file is checked as it is."
            ),
            search_aliases=["mp4", "video", "verify", "ffprobe", "save video", "h3"],
            is_output_node=True,
            inputs=[
                io.Video.Input("video", tooltip="From Create Video (24 fps, with audio), or a file."),
                io.Latent.Input("latent", tooltip="The H3 latent that the clip was decoded from."),
                io.String.Input(
                    "filename_prefix", default="video/h3bw", tooltip="Under the output folder, as in Save Video."
                ),
            ],
            outputs=[io.Video.Output("video", tooltip="The file that was checked.")],
        )

    @classmethod
    def execute(cls, video, latent, filename_prefix) -> io.NodeOutput:
        expected = expected_of(latent)
        preview = {}
        # A trimmed file stands for a part of itself: it is written out first, as frames are.
        whole = isinstance(video, InputImpl.VideoFromFile) and video.get_active_trim_window() == (0.0, 0.0)
        source = video.get_stream_source() if whole else None
        if isinstance(source, str):
            path = source
        else:
            refuse_components(video.get_components())
            path, preview = save(video, filename_prefix)
        found = inspect(path)
        findings, warnings = compare(found, expected)
        if findings:
            raise MediaError(findings)
        text = (
            f"{os.path.basename(path)}: {found['width']}x{found['height']} {found['video_codec']}, {found['frames']} "
            f"frames at {found['fps']:g} fps, {found['video_seconds']:.3f} s; {found['audio_codec']} "
            f"{found['sample_rate']} Hz, {found['channels']} channels, {found['audio_seconds']:.3f} s"
        )
        text += "".join(f"; warning: {warning}" for warning in warnings)
        numbers = {name: found[name] for name in expected}
        rung = {"rung": "media", "result": "passed", "numbers": numbers, "reason": "; ".join(warnings) or None}
        return io.NodeOutput(
            InputImpl.VideoFromFile(path), ui={**preview, "text": (text,), "h3bw_rungs": [rung]}
        )


def save(video, filename_prefix: str) -> tuple[str, dict]:
    """Write the clip as mp4 under the output folder; returns its path and the UI's preview entry."""
    width, height = video.get_dimensions()
    path, saved = output.place(filename_prefix, "mp4", width, height)
    with output.writing(path) as temporary:
        video.save_to(temporary, format=Types.VideoContainer.MP4, codec=Types.VideoCodec.H264)
    result = ui.SavedResult(saved["filename"], saved["subfolder"], io.FolderType.output)
    return path, ui.PreviewVideo([result]).as_dict()

