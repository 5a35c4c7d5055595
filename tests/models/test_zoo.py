"""The networks of the literature: sizes, samples on their own, kernels, normalisation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxttp import from_nnx
from jaxttp.adapters import check_per_sample
from jaxttp.models import (
    VGG,
    ResNet,
    ViT,
    calibrate_batch_norm,
    resnet18,
    resnet20,
    resnet50,
    vgg5,
    vit_small,
    vit_tiny,
)
from tests.models.filled import filled

SMALL = {"in_channels": 2, "stem_width": 4, "widths": (4, 8), "strides": (1, 2)}


def builder(kind, *arguments, **options):
    """A function that makes the network in float64."""
    return lambda: kind(*arguments, **options, param_dtype=jnp.float64, rngs=nnx.Rngs(0))


NETWORKS = {
    "resnet": builder(ResNet, 3, norm="batch", stem="imagenet", **SMALL),
    "resnet-group": builder(ResNet, 3, norm="group", **SMALL),
    "bottleneck": builder(ResNet, 3, norm="batch", block="bottleneck", **SMALL),
    "vgg": builder(VGG, 3, in_channels=2, widths=(4, 6)),
    "vit": builder(ViT, 3, in_channels=2, image_size=8, patch_size=4, width=8, depth=2, heads=2),
}


def images(n=4):
    return np.random.default_rng(1).standard_normal((n, 8, 8, 2))


@pytest.mark.parametrize(
    ("build", "count"),
    [
        # As torchvision and timm count them.
        (resnet18, 11_689_512),
        (resnet50, 25_557_032),
        (vit_small, 22_050_664),
        # Ours, by hand: stem, stages, shortcuts, norms, head.
        (resnet20, 272_474),
        (vgg5, 1_558_026),
    ],
)
def test_the_number_of_parameters(build, count):
    model = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == count


@pytest.mark.parametrize("name", NETWORKS)
def test_a_sample_alone_gives_what_it_gives_in_a_batch(name):
    model = from_nnx(filled(NETWORKS[name]))
    x = images()
    check_per_sample(*model, x)
    apply = jax.jit(model.apply_fn)
    alone = np.concatenate([apply(model.params, image[None]) for image in x])
    # The same sums, perhaps in another order.
    np.testing.assert_allclose(alone, apply(model.params, x), rtol=0, atol=1e-13)


# --- normalisation --------------------------------------------------------------------------------


def test_calibration_gives_every_norm_the_statistics_of_its_own_inputs():
    model = filled(NETWORKS["resnet"])
    x = images(16)
    calibrated = calibrate_batch_norm(model, x)
    stem = np.asarray(model.stem(jnp.asarray(x)))
    # Two ways to a mean in float64.
    np.testing.assert_allclose(calibrated.stem_norm.mean, stem.mean((0, 1, 2)), atol=1e-12)
    np.testing.assert_allclose(calibrated.stem_norm.var, stem.var((0, 1, 2)), atol=1e-12)
    # The second norm sees what the first, with these very averages, has normalised.
    h = jax.nn.relu(calibrated.stem_norm(calibrated.stem(jnp.asarray(x))))
    h = nnx.max_pool(h, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
    h = np.asarray(calibrated.blocks[0].conv1(h))
    np.testing.assert_allclose(calibrated.blocks[0].norm1.mean, h.mean((0, 1, 2)), atol=1e-12)
    # Frozen again, with the parameters as they were, and the given module untouched.
    check_per_sample(*from_nnx(calibrated), x)
    assert calibrated.stem_norm.use_running_average
    jax.tree.map(
        np.testing.assert_array_equal,
        nnx.state(calibrated, nnx.Param),
        nnx.state(filled(NETWORKS["resnet"]), nnx.Param),
    )
    assert np.any(model.stem_norm.mean[...] != calibrated.stem_norm.mean[...])


def test_calibration_needs_batch_norm():
    with pytest.raises(ValueError, match=r"this ResNet has no nnx\.BatchNorm"):
        calibrate_batch_norm(filled(NETWORKS["resnet-group"]), images())


def test_group_norms_have_as_many_of_32_groups_as_divide_the_channels():
    model = nnx.eval_shape(
        builder(ResNet, 3, norm="group", stem_width=48, widths=(8,), strides=(1,))
    )
    assert (model.stem_norm.num_groups, model.blocks[0].norm1.num_groups) == (16, 8)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: resnet20(norm="layer", rngs=nnx.Rngs(0)), "norm='layer' is not known"),
        (lambda: resnet18(stem="deep", rngs=nnx.Rngs(0)), "stem='deep' is not known"),
        (lambda: resnet18(block="wide", rngs=nnx.Rngs(0)), "block='wide' is not known"),
        (
            lambda: resnet50(widths=(6, 8, 8, 8), rngs=nnx.Rngs(0)),
            "widths of bottlenecks must be multiples of 4; got 6",
        ),
        (lambda: VGG(3, widths=(), rngs=nnx.Rngs(0)), "widths must hold at least one"),
        (lambda: VGG(3, widths=(0,), rngs=nnx.Rngs(0)), "widths must be an integer of at least 1"),
        (lambda: vit_tiny(image_size=30, rngs=nnx.Rngs(0)), "must be a multiple of patch_size=16"),
        (lambda: vit_tiny(heads=5, rngs=nnx.Rngs(0)), "heads=5 must divide width=192"),
        (lambda: vit_tiny(depth=0, rngs=nnx.Rngs(0)), "depth must be an integer of at least 1"),
    ],
)
def test_bad_arguments(build, message):
    with pytest.raises(ValueError, match=message):
        nnx.eval_shape(build)


@pytest.mark.parametrize(
    ("build", "shape", "message"),
    [
        (lambda: vgg5(rngs=nnx.Rngs(0)), (2, 32, 32, 1), r"not a batch of images \(N, H, W, 3\)"),
        (lambda: vgg5(rngs=nnx.Rngs(0)), (2, 8, 8, 3), "at least 16 pixels a side"),
        (
            lambda: vit_tiny(depth=1, rngs=nnx.Rngs(0)),
            (2, 64, 64, 3),
            "the positions fix the size",
        ),
    ],
)
def test_images_that_do_not_fit(build, shape, message):
    with pytest.raises(ValueError, match=message):
        nnx.eval_shape(lambda: build()(jnp.zeros(shape, jnp.float32)))
