"""Where the nodes put their files: no path in an error, no half file, no name that fails after the work."""

import errno
import os
import shutil

import pytest
from conftest import pack_module

pytestmark = pytest.mark.usefixtures("pack")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    import folder_paths

    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    return tmp_path


def module():
    return pack_module("nodes.output")


@pytest.mark.parametrize("prefix", ["a\ud800", "é" * 150, "é" * 140 + "/y", "h3bw/x"])
def test_a_prefix_that_no_file_can_have(folder, prefix):
    """Surrogates, names over 255 bytes, a folder that is too long or is a file: refused at once, without the path."""
    (folder / "h3bw").write_text("not a folder")
    with pytest.raises(ValueError, match="filename_prefix") as caught:
        module().place(prefix, "json")
    assert str(folder) not in str(caught.value) and type(caught.value) is ValueError


def test_a_folder_that_cannot_be_made(folder):
    (folder / "diffusion_models").write_text("not a folder")
    with pytest.raises(ValueError, match="output/diffusion_models cannot be made") as caught:
        module().folder("diffusion_models")
    assert str(folder) not in str(caught.value)


class Cancelled(BaseException):
    pass


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), Cancelled(), ValueError("nan")])
def test_nothing_half_written_stays(folder, error):
    path = str(folder / "report.json")
    kind = ValueError if isinstance(error, OSError) else type(error)

    def write():
        with module().writing(path) as temporary, open(temporary, "x") as out:
            out.write("half")
            out.flush()
            assert not os.path.exists(path), "a process that is killed here leaves no half file under the final name"
            raise error

    with pytest.raises(kind) as caught:
        write()
    assert os.listdir(folder) == []
    if isinstance(error, OSError):
        assert str(caught.value) == "report.json cannot be written: No space left on device"


def test_a_whole_file_gets_its_name_and_no_other_stays(folder):
    path = folder / "clip.mp4"
    with module().writing(str(path)) as temporary:
        assert os.path.dirname(temporary) == str(folder) and temporary.endswith(".mp4")
        with open(temporary, "x") as out:
            out.write("whole")
    assert path.read_text() == "whole" and os.listdir(folder) == ["clip.mp4"]


def test_another_ones_file_stays(folder):
    path = folder / "report.json"

    def write():
        with module().writing(str(path)) as temporary:
            with open(temporary, "x") as out:
                out.write("ours")
            path.write_text("theirs")

    with pytest.raises(ValueError, match="report.json cannot be written: File exists"):
        write()
    assert path.read_text() == "theirs" and os.listdir(folder) == ["report.json"]


def drawn(place):
    with open(place, "x") as out:
        out.write("picture")


def no_room(place):
    drawn(place)
    raise OSError(errno.ENOSPC, "No space left on device", place)


@pytest.mark.parametrize(
    ("draw", "told", "left"),
    [
        (drawn, "table", ["run.png"]),
        (lambda place: "no plot: no matplotlib", "table\nno plot: no matplotlib", []),
        (no_room, "table\nno plot: run.png cannot be written: No space left on device", []),
    ],
)
def test_a_measurement_is_not_lost_for_its_picture(folder, draw, told, left):
    saved = {"filename": "run.json", "subfolder": "", "type": "output"}
    text, shown = module().with_picture("table", str(folder / "run.json"), saved, draw)
    assert text == told and shown["text"] == (told,) and shown["h3bw_record"] == [saved]
    assert [entry["filename"] for entry in shown.get("images", [])] == left == os.listdir(folder)


def test_a_mistake_of_the_drawing_itself_is_not_hidden(folder):
    def wrong(place):
        raise ValueError("no such line")

    with pytest.raises(ValueError, match="no such line"):
        module().with_picture("table", str(folder / "run.json"), {"filename": "run.json"}, wrong)


def test_a_record_that_cannot_be_written_names_no_folder(folder):
    """At the start; and at a cancel, where the cancel is what shows."""
    manifest = pack_module("kernels.measure.manifest")
    with pytest.raises(manifest.UnwritableError) as caught, manifest.Manifest(folder / "gone" / "run.json", "smoke"):
        pass
    assert str(caught.value) == "run.json cannot be written: No such file or directory"

    def cancelled():
        with manifest.Manifest(folder / "h3bw" / "run.json", "smoke"):
            shutil.rmtree(folder / "h3bw")
            raise Cancelled

    (folder / "h3bw").mkdir()
    with pytest.raises(Cancelled):
        cancelled()
