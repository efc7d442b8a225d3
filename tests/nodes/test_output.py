"""Where the nodes put their files: no path in an error, no half file, no name that fails after the work."""

import errno
import os

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
        with module().writing(path), open(path, "x") as out:
            out.write("half")
            out.flush()
            raise error

    with pytest.raises(kind) as caught:
        write()
    assert os.listdir(folder) == []
    if isinstance(error, OSError):
        assert str(caught.value) == "report.json cannot be written: No space left on device"


def test_another_ones_file_stays(folder):
    path = folder / "report.json"
    path.write_text("theirs")
    with pytest.raises(ValueError, match="report.json cannot be written"), module().writing(str(path)), open(path, "x"):
        pass
    assert path.read_text() == "theirs"
