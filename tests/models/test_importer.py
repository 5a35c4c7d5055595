"""Weights of other libraries: outputs against those of the reference implementations."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from jaxttp.models import MLP, ResNet, ViT, calibrate_batch_norm, load_weights, save_params
from tests.draws import normal
from tests.models.filled import filled

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
RESNET = {
    "in_channels": 3, "stem": "imagenet", "norm": "batch", "stem_width": 8,
    "blocks": (1, 2, 1, 1), "widths": (8, 12, 16, 20), "strides": (1, 2, 2, 2),
}  # fmt: skip
BOTTLENECK = RESNET | {"block": "bottleneck", "widths": (16, 24, 32, 40)}
VIT = {"image_size": 32, "patch_size": 8, "width": 12, "depth": 2, "heads": 3, "hidden": 20}
NETWORKS = {
    "torchvision-basic": (ResNet, RESNET),
    "torchvision-bottleneck": (ResNet, BOTTLENECK),
    "timm-basic": (ResNet, RESNET | {"stem_width": 64}),
    "timm-vit": (ViT, VIT),
}


def abstract(name, classes=5, **options):
    """The network without values: enough to be loaded into, and quick to make."""
    kind, known = NETWORKS[name]
    return nnx.eval_shape(lambda: kind(classes, **(known | options), rngs=nnx.Rngs(0)))


def build(name, classes=5, seed=0, **options):
    return filled(lambda: abstract(name, classes, **options), seed)


def tensors(name):
    return safetensors.numpy.load_file(GOLDENS / f"{name}.safetensors")


@pytest.fixture(scope="module")
def outputs():
    return safetensors.numpy.load_file(GOLDENS / "outputs.safetensors")


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [*((name, "float64", 1e-10) for name in NETWORKS), ("timm-vit", "float32", 1e-4)],
)
@pytest.mark.usefixtures("full_precision")
def test_outputs_are_those_of_the_reference(name, dtype, tolerance, outputs):
    model = abstract(name, param_dtype=jnp.dtype(dtype))
    model = load_weights(model, GOLDENS / f"{name}.safetensors")
    found = nnx.jit(lambda model, x: model(x))(model, jnp.asarray(outputs["x"], dtype))
    expected = outputs[f"{name}.{dtype}"]
    assert found.dtype == expected.dtype
    # Of outputs of order one; float32 sums a few thousand terms in another order.
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def test_without_the_head_the_models_own_is_kept():
    name = "timm-basic"
    model = build(name, classes=3)
    loaded = load_weights(model, GOLDENS / f"{name}.safetensors", head=False)
    np.testing.assert_array_equal(loaded.head.kernel, model.head.kernel)
    assert loaded.blocks[0] is not model.blocks[0]
    before, after = (jax.tree.leaves(nnx.state(m.blocks[0])) for m in (model, loaded))
    assert any(np.any(a != b) for a, b in zip(before, after, strict=True))


def test_a_body_without_its_head_says_how_to_load_it(tmp_path):
    body = {name: v for name, v in tensors("timm-vit").items() if not name.startswith("head.")}
    safetensors.numpy.save_file(body, tmp_path / "body.safetensors")
    with pytest.raises(ValueError, match=r"missing: .*head=False keeps the model's own"):
        load_weights(build("timm-vit"), tmp_path / "body.safetensors")


@pytest.mark.parametrize("side", [2, 7])
def test_positions_for_images_of_another_size_are_those_of_timm(side):
    expected = safetensors.numpy.load_file(GOLDENS / "positions.safetensors")[str(side)]
    model = abstract("timm-vit", image_size=8 * side)
    loaded = load_weights(model, GOLDENS / "timm-vit.safetensors")
    # timm interpolates in float32; positions are of order 0.2.
    np.testing.assert_allclose(loaded.positions[...], expected, rtol=0, atol=1e-6)


def test_our_own_files_keep_the_running_averages(tmp_path, key):
    x = normal(key, (6, 32, 32, 3), dtype=jnp.float32)
    model = calibrate_batch_norm(build("torchvision-basic"), x)
    save_params(tmp_path / "a.safetensors", nnx.state(model))
    loaded = load_weights(build("torchvision-basic", seed=1), tmp_path / "a.safetensors")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(loaded), nnx.state(model))
    assert np.any(loaded.stem_norm.mean[...] != 0)


def test_a_pickle(tmp_path):
    (tmp_path / "model.pth").write_bytes(b"\x80\x02}q\x00." * 9)
    with pytest.raises(ValueError, match=r"not a safetensors file.*Pickles .* are not read"):
        load_weights(abstract("timm-vit"), tmp_path / "model.pth")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layer1.0.bn1.running_var"), r"missing: layer1\.0\.bn1\.running_var\."),
        (lambda t: t.update(extra=np.ones(3, np.float32)), r"unexpected: extra\."),
        (
            lambda t: t.update({"bn1.weight": np.ones(9, np.float32)}),
            r"of another shape: bn1\.weight \(9,\) instead of \(8,\)\.",
        ),
        (
            lambda t: [t.pop("conv1.weight"), t.update(extra=np.ones(3, np.float32))],
            r"naming of torchvision or timm.*missing: conv1\.weight; unexpected: extra\.",
        ),
        (
            lambda t: t.update({"bn1.weight": np.full(8, np.nan, np.float32)}),
            r"bn1\.weight.* holds 8 value\(s\) that are NaN",
        ),
    ],
)
def test_what_does_not_fit_is_listed(change, message, tmp_path):
    found = tensors("torchvision-basic")
    change(found)
    safetensors.numpy.save_file(found, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=message):
        load_weights(abstract("torchvision-basic"), tmp_path / "a.safetensors")


def test_a_network_without_a_foreign_naming():
    with pytest.raises(ValueError, match=r"known for a MLP: jaxttp"):
        load_weights(MLP((3, 2), rngs=nnx.Rngs(0)), GOLDENS / "timm-vit.safetensors")
