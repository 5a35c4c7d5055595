"""Files from anywhere are refused in one line and in bounded memory; written ones stay whole."""

import io
import json
import re
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from matplotlib.figure import Figure
from PIL import Image
from typer.testing import CliRunner

from jaxttp._core.files import parse_json
from jaxttp.cli import app
from jaxttp.cli._shell import write_json
from jaxttp.data import load_dataset, load_table
from jaxttp.data.images import open_image
from jaxttp.forecast import Hyperparameters, sweep_kernel
from jaxttp.models import load_params, save_params
from jaxttp.models.language import folder as folders
from jaxttp.plots import save


def member(path, name, data, kind=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "a", kind) as archive:
        archive.writestr(name, data)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def liar(shape=(10**12,)):
    """An array's header that speaks of eight terabytes, and eight bytes."""
    file = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + bytes(8)


@pytest.mark.parametrize(
    "data",
    {
        "a header that lies": liar(),
        "a shape that overflows": liar((2**62, 2**62)),
        "a negative shape": liar((-1, -8)),
        "another version": b"\x93NUMPY\x09\x00" + bytes(100),
        "truncated": npy(np.arange(10.0))[:-8],
        "a pickle": npy(np.array([{}, []], object)),
        "an oversized header": b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little") + b"{" * 100,
        "nothing": b"",
    }.items(),
    ids=lambda pair: pair[0],
)
def test_arrays_that_are_not_what_they_say(data, tmp_path):
    path = tmp_path / "a.npz"
    member(path, "x.npy", data[1])
    member(path, "y.npy", npy(np.arange(2)))
    with pytest.raises(ValueError, match=r"data='.*a\.npz'"):
        load_table(path)


def test_an_archive_is_read_and_never_unpacked(tmp_path):
    """Names that lead out of the folder lead nowhere; of two arrays of a name one is read."""
    path = tmp_path / "data" / "a.npz"
    path.parent.mkdir()
    np.savez(path, x=np.arange(8.0).reshape(4, 2), y=np.arange(4) % 2)
    for name in ("../evil.npy", "/tmp/evil.npy", "x/../../evil.npy"):
        member(path, name, npy(np.ones(3)))
    assert load_table(path).x.shape == (4, 2)
    assert [one.name for one in tmp_path.rglob("*")] == ["data", "a.npz"]


HEADER = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'


def tensors(header, data=bytes(8), length=None):
    size = len(header) if length is None else length
    return size.to_bytes(8, "little") + header + data


@pytest.mark.parametrize(
    "data",
    {
        "truncated": tensors(HEADER)[:-4],
        "half a header": tensors(HEADER)[:30],
        "an oversized header": tensors(HEADER, length=2**62),
        "beyond the end": tensors(HEADER.replace(b"[0,8]", b"[8,16]")),
        "too large": tensors(HEADER.replace(b"[2]", b"[2000000000000]")),
        "no JSON": tensors(b"{" * 5000),
        "another dtype": tensors(HEADER.replace(b"F32", b"F99")),
        "an array above another": safetensors.numpy.save({"a": np.ones(1), "a.b": np.ones(1)}),
        "an array below another": safetensors.numpy.save({"b.a": np.ones(2), "b": np.ones(1)}),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_safetensors_that_are_not_what_they_say(data, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(data[1])
    with pytest.raises(ValueError, match=r"^path='.*a\.safetensors'"):
        load_params(path)


@pytest.mark.parametrize("name", ["../w.safetensors", "/w.safetensors", "a\\w", "C:w", "..", "", 3])
def test_shards_lie_in_their_own_folder(name, tmp_path):
    (tmp_path / folders.INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(FileNotFoundError, match=r"lacks .*, of the 1 shards"):
        folders._files(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": NaN}', "NaN is not a finite number"),
        ('{"a": [-Infinity]}', "-Infinity is not"),
        ("1e999", "1e999 is not"),
        ("[" * 10**5, "nested too deeply"),
        ("{", "Expecting"),
    ],
)
def test_json_is_what_the_standard_says(text, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        parse_json(text)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is no JSON: .*" + words):
        folders.read_json(tmp_path / "config.json")


def image(path, size=(8, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((*size, 3), np.uint8)).save(path, format="PNG")


@pytest.mark.parametrize("limit", [40, 10])  # 64 pixels: up to twice the limit Pillow only warns
def test_images_that_unpack_to_too_many_pixels(limit, tmp_path, monkeypatch):
    image(tmp_path / "cat" / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(ValueError, match=r"a\.png is not an image that can be read \(Image size"):
        load_dataset("image_folder", folder=tmp_path)


@pytest.mark.parametrize("damage", [lambda data: data[:45], lambda data: data[:20], lambda _: b""])
def test_damaged_images(damage, tmp_path):
    image(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes(damage((tmp_path / "a.png").read_bytes()))
    with pytest.raises(ValueError, match=r"a\.png is not an image that can be read"):
        open_image(tmp_path / "a.png")


def test_what_is_called_an_image_starts_no_interpreter(tmp_path):
    """Pillow hands PostScript to another program, whatever the file is called."""
    path = tmp_path / "a.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
    with Image.open(path) as picture:
        assert picture.format == "EPS"
    with pytest.raises(ValueError, match=r"a\.png is not an image that can be read \(cannot ident"):
        open_image(path)


@pytest.mark.parametrize("line", ["bar/../../secret.jpg", "bar/..\\secret.jpg", "bar//x.jpg"])
def test_lists_of_images_stay_in_their_folder(line, tmp_path):
    image(tmp_path / "secret.jpg")
    root = tmp_path / "data"
    image(root / "Images" / "bar" / "a.jpg")
    (root / "TrainImages.txt").write_text(f"{line}\n")
    (root / "TestImages.txt").write_text("bar/a.jpg\n")
    with pytest.raises(ValueError, match=f"lists {re.escape(repr(line))}, which does not lie"):
        load_dataset("mit67", folder=root, split="train")


LARGE = np.arange(20_000.0)


def result():
    setting = Hyperparameters(0.1, loss="squared_error", steps=5)
    return sweep_kernel(jnp.eye(2), jnp.zeros((2, 1)), jnp.ones((2, 1)), [setting] * 200)


def drawn(path):
    figure = Figure()
    figure.subplots().plot(LARGE)
    save(figure, path)


WRITERS = {
    "a.safetensors": lambda path: save_params(path, {"w": LARGE}),
    "a.json": lambda path: write_json(path, list(LARGE)),
    "a.csv": lambda path: result().to_csv(path),
    "a.png": drawn,
}


@pytest.mark.parametrize("name", WRITERS)
def test_nothing_that_is_written_is_ever_half_there(name, tmp_path, full_disk):
    """The system's own refusal, in the middle of a file: the old one stays, no other is left."""
    WRITERS[name](tmp_path / name)
    (path,) = (one for one in tmp_path.rglob("*") if one.is_file())
    assert path.stat().st_size > 4096
    path.write_bytes(b"old")
    with full_disk(), pytest.raises(OSError, match="File too large"):
        WRITERS[name](tmp_path / name)
    assert [one for one in tmp_path.rglob("*") if one.is_file()] == [path]
    assert path.read_bytes() == b"old"
    WRITERS[name](tmp_path / name)
    assert path.stat().st_size > 4096


def test_a_command_whose_output_cannot_be_made_says_so_in_one_line(tmp_path):
    (tmp_path / "file").write_text("old")
    command = ["conditioning", "--width", "4", "--depth", "2", "--quiet", "--output"]
    done = CliRunner().invoke(app, [*command, str(tmp_path / "file" / "in")])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"jaxttp: output='{tmp_path}/file/in' cannot be written")
    assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "file").read_text() == "old"
