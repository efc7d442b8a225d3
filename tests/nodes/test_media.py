"""Media: real clips that pass, and each way of being wrong with its own sentence."""

import inspect
from fractions import Fraction

import pytest
import torch
from conftest import pack_module

pytestmark = pytest.mark.usefixtures("pack")


def latent_of(frames=22, width=64, height=64):
    import comfy.nested_tensor

    selftest = pack_module("nodes.selftest")
    generator = torch.Generator().manual_seed(0)
    video = torch.randn(1, 24, selftest.latent_frames(frames), height // 16, width // 16, generator=generator)
    audio = torch.randn(1, 32, 2, selftest.audio_steps(frames), generator=generator)
    return {"samples": comfy.nested_tensor.NestedTensor((video, audio))}


def clip_of(latent, fps=24.0, audio=True, edit=None):
    """A VIDEO as Create Video makes it; ``edit(images, track)`` changes its parts first."""
    from comfy_api.latest import InputImpl, Types

    images, track = pack_module("nodes.selftest").SelfTestDecode.execute(latent).result
    track = dict(track)
    if edit is not None:
        images, track = edit(images, track)
    parts = Types.VideoComponents(images=images, audio=track if audio else None, frame_rate=Fraction(fps))
    return InputImpl.VideoFromComponents(parts)


def check(video, latent, prefix="media/test"):
    return pack_module("nodes.media").MediaCheck.execute(video, latent, prefix)


def findings(video, latent):
    with pytest.raises(pack_module("nodes.media").MediaError) as caught:
        check(video, latent)
    return caught.value.findings


def saved(latent, tmp_path, name="clip.mp4", **options):
    """A clip written by ComfyUI itself, as a VIDEO that is a file."""
    from comfy_api.latest import InputImpl, Types

    path = tmp_path / name
    clip_of(latent, **options).save_to(str(path), format=Types.VideoContainer.MP4, codec=Types.VideoCodec.H264)
    return path, InputImpl.VideoFromFile(str(path))


@pytest.mark.parametrize(("frames", "width", "height"), [(5, 32, 32), (22, 64, 96), (124, 64, 64)])
def test_a_right_clip_passes_and_is_what_it_says(frames, width, height):
    latent = latent_of(frames, width, height)
    out = check(clip_of(latent), latent)
    numbers = out.ui["h3bw_rungs"][0]["numbers"]
    assert (numbers["width"], numbers["height"], numbers["frames"]) == (width, height, frames)
    assert (numbers["video_codec"], numbers["audio_codec"]) == ("h264", "aac")
    assert (numbers["fps"], numbers["sample_rate"], numbers["channels"]) == (24.0, 32000, 2)
    assert abs(numbers["video_seconds"] - frames / 24) < 1e-3
    assert abs(numbers["audio_seconds"] - frames / 24) <= 1 / 24
    assert out.ui["h3bw_rungs"][0]["reason"] is None
    assert out.result[0].get_frame_count() == frames


def test_the_sound_is_sound():
    latent = latent_of()
    _, track = pack_module("nodes.selftest").SelfTestDecode.execute(latent).result
    wave = track["waveform"]
    assert wave.shape == (1, 2, 37 * 800) and track["sample_rate"] == 32000
    assert float(wave.std()) > 0.05 and float(wave.abs().max()) <= 1.0
    assert not torch.equal(wave[0, 0], wave[0, 1])


def test_a_truncated_file(tmp_path):
    latent = latent_of(124)
    path, video = saved(latent, tmp_path)
    whole = path.read_bytes()
    for share in (0.0, 0.3, 0.9):
        path.write_bytes(whole[: int(len(whole) * share)])
        assert findings(video, latent)


def test_a_clip_cut_in_the_middle_of_its_frames(tmp_path):
    """An index that promises more than the data holds: found by decoding to the end."""
    import av

    latent = latent_of(124)
    path, _ = saved(latent, tmp_path)
    moved = tmp_path / "faststart.mp4"
    with av.open(str(path)) as source, av.open(str(moved), "w", options={"movflags": "faststart"}) as out:
        streams = {stream: out.add_stream_from_template(stream) for stream in source.streams}
        for packet in source.demux():
            if packet.dts is not None:
                packet.stream = streams[packet.stream]
                out.mux(packet)
    from comfy_api.latest import InputImpl

    check(InputImpl.VideoFromFile(str(moved)), latent)
    whole = moved.read_bytes()
    moved.write_bytes(whole[: len(whole) // 2])
    assert findings(InputImpl.VideoFromFile(str(moved)), latent)


def test_a_wrong_frame_count(tmp_path):
    latent = latent_of(22)
    _, video = saved(latent_of(39), tmp_path)
    text = findings(video, latent)
    assert "frames is 39, must be 22" in text and any(item.startswith("video_seconds is 1.625") for item in text)


def test_a_missing_audio_track(tmp_path):
    latent = latent_of()
    _, video = saved(latent, tmp_path, audio=False)
    assert findings(video, latent) == ["there is no audio track"]
    assert findings(clip_of(latent, audio=False), latent) == ["there is no audio track"]


def test_a_wrong_size_rate_and_sample_rate():
    latent = latent_of()
    assert "width is 64, must be 96" in findings(clip_of(latent), latent_of(22, 96, 64))
    assert any(item.startswith("fps is 25") for item in findings(clip_of(latent, fps=25), latent))

    def other_rate(images, track):
        return images, {**track, "sample_rate": 44100}

    assert any(item.startswith("sample_rate is 44100") for item in findings(clip_of(latent, edit=other_rate), latent))

    def mono(images, track):
        return images, {**track, "waveform": track["waveform"][:, :1]}

    assert "channels is 1, must be 2" in findings(clip_of(latent, edit=mono), latent)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda images, track: (images, poison(track, float("nan"))), "audio has 1 NaN of 59200 samples"),
        (lambda images, track: (images, poison(track, float("inf"))), "audio has 1 Inf of 59200 samples"),
        (lambda images, track: (images, {**track, "waveform": track["waveform"][..., :0]}), "audio has 0 samples"),
        (lambda images, track: (images[:, :, :63], track), "width 63 is odd"),
        (lambda images, track: (images[:, :31], track), "height 31 is odd"),
        (lambda images, track: (images[:0], track), "there are no frames"),
        (lambda images, track: (images * float("nan"), track), "the video has 270336 NaN of 270336 values"),
    ],
)
def test_what_an_encoder_would_answer_with_a_number_has_a_sentence(edit, text):
    latent = latent_of()
    assert any(item.startswith(text) for item in findings(clip_of(latent, edit=edit), latent))


def strided(tensor):
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def poison(track, value):
    wave = track["waveform"].clone()
    wave[0, 1, 7] = value
    return {**track, "waveform": wave}


@pytest.mark.parametrize(
    "edit",
    [
        lambda images, track: (images, {**track, "waveform": track["waveform"].double()}),
        lambda images, track: (images, {**track, "waveform": strided(track["waveform"])}),
        lambda images, track: (strided(images), track),
    ],
)
def test_float64_and_strided_parts_are_handled(edit):
    latent = latent_of()
    check(clip_of(latent, edit=edit), latent)


@pytest.mark.parametrize(("level", "warning"), [(0.0, "the audio is silent"), (0.25, "the audio is a constant")])
def test_silent_and_constant_audio_are_warnings(level, warning):
    latent = latent_of(124)

    def flat(images, track):
        return images, {**track, "waveform": torch.full_like(track["waveform"], level)}

    out = check(clip_of(latent, edit=flat), latent)
    # AAC starts a constant with a step, so only its silence survives the codec exactly.
    if level == 0.0:
        assert warning in out.ui["h3bw_rungs"][0]["reason"]
    else:
        found = {"audio_constant": True, "audio_peak": level}
        media = pack_module("nodes.media")
        expected = media.expected_of(latent)
        assert warning in media.compare({**expected, **found}, expected)[1][0]


def test_another_latent_is_refused(pack):
    with pytest.raises(ValueError, match=r"an H3 latent holds video .* this one holds \(1, 4, 8, 8\)"):
        check(clip_of(latent_of()), {"samples": torch.zeros(1, 4, 8, 8)})


@pytest.mark.parametrize(
    ("asked", "frames"), [(1, 5), (5, 5), (6, 22), (22, 22), (120, 124), (121, 124), (124, 124), (362, 362)]
)
def test_lengths_snap_to_the_grid(asked, frames, caplog):
    selftest = pack_module("nodes.selftest")
    with caplog.at_level("INFO", logger="h3bw"):
        _, _, latent = selftest.SelfTestModel.execute("pruned", 32, 32, asked, 0).result
    video, audio = selftest.av_latent(latent)
    assert selftest.pixel_frames(video.shape[2]) == frames and audio.shape[3] == round(frames / 24 * 40)
    said = [record.getMessage() for record in caplog.records if "grid" in record.getMessage()]
    assert said == ([] if asked == frames else [
        f"H3 Blackwell: length {asked} is not on H3's grid of 17k + 5 frames; using {frames}"
    ])


def test_our_grid_is_cores_grid(pack):
    import comfy_extras.nodes_minimax_h3 as core

    selftest = pack_module("nodes.selftest")
    for length in range(1, 400):
        frames, latents, steps = core.temporal_shape(length)
        assert selftest.snap_frames(length) == frames
        assert (selftest.latent_frames(frames), selftest.audio_steps(frames)) == (latents, steps)
        assert selftest.pixel_frames(latents) == frames


@pytest.mark.parametrize(
    ("width", "height", "text"), [(65, 64, "width .*65"), (64, 48, "height .*48"), (0, 64, "width .*0")]
)
def test_a_canvas_off_the_grid_is_refused_before_sampling(width, height, text):
    with pytest.raises(ValueError, match=text):
        pack_module("nodes.selftest").SelfTestModel.execute("pruned", width, height, 22, 0)


def test_a_keyframe_shows_its_picture():
    selftest = pack_module("nodes.selftest")
    image = torch.tensor([0.8, 0.4, 0.1]).expand(1, 48, 80, 3)
    frames = selftest.latent_to_frames(selftest.image_to_latent(image, 96, 64))
    assert frames.shape == (1, 64, 96, 3)
    torch.testing.assert_close(frames, torch.tensor([0.8, 0.4, 0.1]).expand_as(frames), atol=2e-3, rtol=0)


def test_keyframes_and_references_exclude_each_other():
    node = pack_module("nodes.selftest").SelfTestModel
    with pytest.raises(ValueError, match="keyframes or references, not both"):
        node.execute("pruned", 64, 64, 22, 0, "image", first_frame=torch.zeros(1, 64, 64, 3))


def test_the_self_test_is_deterministic_and_has_a_seed():
    from h3_sampling import equal, sample, selftest

    first = sample(*selftest(seed=3), steps=2)
    assert equal(sample(*selftest(seed=3), steps=2), first)
    assert not equal(sample(*selftest(seed=4), steps=2), first)


def test_every_input_and_output_has_a_tooltip(pack):
    for node in pack_module("nodes").NODES:
        schema = node.define_schema()
        assert schema.node_id.startswith("H3BW_") and schema.category.startswith("H3 Blackwell/")
        assert schema.description and inspect.getdoc(node)
        for item in (*schema.inputs, *schema.outputs):
            assert item.tooltip, f"{schema.node_id}.{item.id or item.display_name} has no tooltip"
