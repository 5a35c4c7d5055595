"""What is measured: every row, its sides, and what is the same work in it."""

import dataclasses
from functools import partial

from experiments.bench.peers import networks, problems
from experiments.bench.peers.environments import OURS
from experiments.bench.peers.harness import Row, Side

PRODUCT = Side("product", OURS, "ours", "product")
NT = ("neural-tangents", "neural-tangents", "neural_tangents")
NT_WAYS = tuple(
    {"implementation": name}
    for name in ("JACOBIAN_CONTRACTION", "NTK_VECTOR_PRODUCTS", "STRUCTURED_DERIVATIVES")
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        kernels: (network, samples, words, samples a tile for `nt.batch`).
        moving: (network, samples, steps) whose kernel moves outputs.
        longer: steps of the row that asks what a step costs beside what a call does.
        sketched: (network, samples, columns, samples at a time of a dense projection).
        curved: (network, samples, classes) for products with curvature.
        largest: the same for the largest eigenvalue.
        density: (network, samples, classes, probes, depth).
        linear: widths of a deep linear network.
        step: (blocks, d / 2, m, samples) of a reversible MLP for one step.
        fit: the same for fits to `target`.
        outputs: of reversible MLPs.
        target: a loss.
        side: of the product of matrices that says how fast operations can be.
    """

    kernels: tuple[tuple[str, int, str, int], ...] = (
        ("digits", 150, "ResNet on 8 x 8 pixels, 77k weights, C = 5", 25),
        ("mlp", 200, "MLP 784-512-512-512-10", 20),
        ("resnet20", 200, "ResNet20 without normalisation, 270k weights, C = 10", 20),
        ("vit", 100, "ViT, 4 blocks of width 64 on 64 patches, C = 10", 20),
        ("transformer", 64, "decoder, 4 blocks of width 128 on 32 tokens, C = 4", 16),
    )
    moving: tuple[str, int, int] = ("digits", 150, 150)
    longer: int = 1500
    sketched: tuple[str, int, int, int] = ("digits", 150, 1000, 10)
    curved: tuple[str, int, int] = ("digits", 150, 5)
    largest: tuple[str, int, int] = ("digits", 40, 5)
    density: tuple[str, int, int, int, int] = ("digits", 40, 5, 4, 16)
    linear: tuple[int, ...] = (196, 300, 300, 10)
    step: tuple[int, int, int, int] = (2, 196, 1024, 512)
    fit: tuple[int, int, int, int] = (1, 16, 32, 16)
    outputs: int = 10
    target: float = 1e-6
    side: int = 2048


FULL = Sizes()
SMOKE = Sizes(
    kernels=(("tiny", 6, "MLP 5-7-3", 3),), moving=("tiny", 4, 5), longer=9,
    sketched=("tiny", 4, 20000, 2),
    curved=("tiny", 6, 3), largest=("tiny", 6, 3), density=("tiny", 6, 3, 2, 3), linear=(6, 7, 3),
    step=(1, 2, 16, 6), fit=(1, 5, 32, 6), outputs=3, target=1e-5, side=64,
)  # fmt: skip
"""Seconds a row, so that a test, or a peer's new release, can be tried."""


def kernel_row(sizes: Sizes, network: str, samples: int, words: str, batch: int) -> Row:
    """The whole kernel of a network."""
    product = dataclasses.replace(PRODUCT, variants=({"side": sizes.side},))
    batched = tuple({**way, "batch": batch} for way in NT_WAYS[::2])
    torch_ways = ({"way": "jacobian"}, {"way": "products"})
    return Row(
        name=f"kernel-{network}", group="kernels",
        same=f"{words}, N = {samples}, the whole kernel (N, C, N, C), float32. neural-tangents by "
        "tiles of samples (`nt.batch`) is tried where all at once does not do.",
        problem=partial(networks.make_problem, network, samples),
        sides=(
            Side("jaxttp", OURS, "ours", "kernel"),
            Side(*NT, "kernel", NT_WAYS, batched),
            Side("torch.func", "torch", "pytorch", "kernel", torch_ways),
            product,
        ),
        tolerance=1e-3,
        why="In CPU seconds the two are level: a part of XLA's passes runs on one core. torch.func "
        "holds the whole Jacobian at once.",
    )  # fmt: skip


def motion_row(
    name: str, sizes: Sizes, same: str, sides: tuple[Side, ...], tolerance: float, why: str = ""
) -> Row:
    """Outputs moved by a kernel, held against a float64 oracle."""
    network, samples, steps = sizes.moving
    oracle = Side(
        "oracle", OURS, "oracle", name.split("-")[0], sides[0].variants[:1], timed=False
    )  # fmt: skip
    words = f"kernel of {network}, N = {samples}, random labels, {steps} steps; "
    return Row(
        name=f"dynamics-{name}", group="dynamics",
        same=words + same + f" All errors below {tolerance:g} of the largest output.",
        problem=partial(problems.motion, network, samples, steps, 1.0),
        sides=(*sides, oracle), tolerance=tolerance, reference="oracle", seconds=20.0, why=why,
    )  # fmt: skip


def dynamics(sizes: Sizes) -> tuple[Row, ...]:
    """Flow, closed form and recursion."""
    ours, plain = ("jaxttp", OURS, "ours_dynamics"), (OURS, "plain")
    flow_ways = ({}, {"rtol": 1e-3, "atol": 1e-4}, {"rtol": 1e-4, "atol": 1e-5})
    parts = tuple({"parts": count} for count in (1, 4, 14, 64, 256))
    nt_ways = tuple({"double": d, "jit": j} for d in (False, True) for j in (False, True))
    momentum = ({"factor": 0.1},)
    by_flow = (
        Side(*ours, "flow", flow_ways),
        Side(*NT, "flow", nt_ways),
        Side("lax.scan, Euler", *plain, "euler", parts),
    )
    by_momentum = (
        Side(*ours, "momentum", momentum),
        Side("lax.scan", *plain, "momentum", momentum),
    )
    more = dataclasses.replace(sizes, moving=(*sizes.moving[:2], sizes.longer))
    return (
        motion_row(
            "flow", sizes,
            "cross-entropy's gradient flow at eta lambda_max / N = 1, every unit of time kept; of "
            "every side the fastest setting that is accurate enough.",
            by_flow, 1e-3,
            "Euler's steps are products and nothing else, and suffice for so little accuracy; see "
            "the finer row.",
        ),
        motion_row(
            "flow-finer", sizes, "the same, ten times as accurate.",
            by_flow, 1e-4,
        ),
        motion_row(
            "closed", sizes,
            "squared error's closed form at the same times, the decomposition in every call.",
            (
                Side(*ours, "closed"),
                Side(*NT, "closed"),
                Side("jnp.linalg.eigh", *plain, "closed"),
            ),
            1e-3,
            "jaxttp decomposes on half of the cores: threads of BLAS wait for each other beside "
            "other work.",
        ),
        motion_row(
            "momentum", sizes,
            "gradient descent with momentum 0.9, step by step; neural-tangents has no recursion.",
            by_momentum, 1e-3,
            "A call of ours checks its arguments (finite, of one shape, labels in range) before it "
            "steps: milliseconds, which of so short a call is much; see the longer row.",
        ),
        motion_row(
            "momentum-longer", more, "the same over more steps, where the steps count.",
            by_momentum, 1e-3,
        ),
    )  # fmt: skip


def sketches(sizes: Sizes) -> tuple[Row, ...]:
    """Sketches of the Jacobian."""
    network, samples, dim, piece = sizes.sketched
    blocks = tuple({"dim": dim, "block": block} for block in (100, dim))
    return (
        Row(
            name="sketch", group="sketches",
            same=f"Jacobian of {network}, N = {samples}, to {dim} columns; \"off by\" is the error "
            "of the kernel that the sketch gives, in the Frobenius norm. The dense matrices are "
            "drawn before the clock starts.",
            problem=partial(networks.make_problem, network, samples),
            sides=(
                Side("jaxttp, CountSketch", OURS, "ours", "sketch", ({"dim": dim},)),
                Side("dense projection", OURS, "plain", "projection",
                     ({"dim": dim, "piece": piece}, {"dim": dim, "piece": samples})),
                Side("TRAK's BasicProjector", "torch", "pytorch", "projection", blocks),
                Side("exact", OURS, "ours", "kernel", timed=False),
            ),
            tolerance=0.2, reference="exact", judge=problems.frobenius,
        ),
    )  # fmt: skip


def products(sizes: Sizes) -> tuple[Row, ...]:
    """Products with the Hessian and the Gauss-Newton matrix, and what is made of them."""
    network, samples, classes = sizes.curved
    problem = partial(problems.trained, network, samples, classes)
    words = f"mean cross-entropy of {network}, N = {samples}, C = {classes}"
    single = " jaxttp computes in float64 always; a peer in float32 is named so."
    made = []
    for kind, name in (("hessian", "Hessian"), ("generalized", "Gauss-Newton matrix")):
        double, half = {"kind": kind}, {"kind": kind, "dtype": "float32"}
        torch = ("torch", "pytorch_curvature")
        made.append(Row(
            name=f"product-{kind}", group="curvature",
            same=f"{words}: the {name} times a vector.{single}",
            problem=problem,
            sides=(
                Side("jaxttp", OURS, "ours_curvature", "product", (double,)),
                Side("jvp and grad, jitted", OURS, "plain_curvature", "product", (double,)),
                Side("the same, float32", OURS, "plain_curvature", "product", (half,)),
                Side("torch.func", *torch, "torch_func", (double,)),
                Side("curvlinops", *torch, "linear_operator", (double,)),
                Side("curvlinops, float32", *torch, "linear_operator", (half,)),
            ),
            tolerance=1e-3, seconds=30.0,
            why="In float32: curvature is for eigenvalues, which jaxttp computes in float64.",
        ))  # fmt: skip
    return (*made, *_spectra(sizes))


def _spectra(sizes: Sizes) -> tuple[Row, ...]:
    network, samples, classes = sizes.largest
    problem = partial(problems.trained, network, samples, classes)
    words = f"mean cross-entropy of {network}, N = {samples}, C = {classes}"
    kind = {"kind": "hessian"}
    depths = tuple({**kind, "depth": depth} for depth in (4, 6, 8, 16))
    loose = tuple({**kind, "tol": tol} for tol in (1e-2, 1e-3))
    power = tuple({"tol": tol, "most": 200} for tol in (1e-3, 1e-5))
    torch = ("torch", "pytorch_curvature")
    *which, probes, depth = sizes.density
    return (
        Row(
            name="largest-eigenvalue", group="curvature",
            same=f"{words}: the largest eigenvalue of the Hessian to 0.1 %, float64; of every "
            "side the fastest setting that is accurate enough.",
            problem=problem,
            sides=(
                Side("jaxttp", OURS, "ours_curvature", "largest", depths),
                Side("curvlinops, SciPy's Lanczos", *torch, "eigsh", loose),
                Side("PyHessian", *torch, "pyhessian", power),
                Side("converged", OURS, "plain_curvature", "converged", (kind,), timed=False),
            ),
            tolerance=1e-3, reference="converged",
            why="Power iterations that end at a change of 0.1 %; Lanczos has more digits.",
        ),
        Row(
            name="density", group="curvature",
            same=f"the same loss, N = {which[1]}: tr log(1 + G) of the Gauss-Newton matrix by "
            f"stochastic Lanczos, {probes} probes of {depth} steps with full "
            "reorthogonalisation, the same probes, float64.",
            problem=partial(problems.density, *which, probes),
            sides=(
                Side("jaxttp", OURS, "ours_curvature", "density", ({"depth": depth},)),
                Side("matfree", "jax", "jax_curvature", "density", ({"depth": depth},)),
            ),
            tolerance=1e-6,
        ),
        Row(
            name="condition-linear", group="curvature",
            same=f"condition number of the Gauss-Newton matrix of a linear network "
            f"{'-'.join(map(str, sizes.linear))}, inputs as of images, float64, from the weights.",
            problem=partial(problems.linear, sizes.linear),
            sides=(
                Side("jaxttp, matrix-free", OURS, "ours_curvature", "condition"),
                Side("numpy.kron and eigvalsh", OURS, "plain", "dense_condition"),
            ),
            tolerance=1e-6, seconds=20.0,
        ),
    )  # fmt: skip


def steps(sizes: Sizes) -> tuple[Row, ...]:
    """Steps of optimisers, and fits."""
    blocks, half, width, samples = sizes.step
    target = {"target": sizes.target}
    rates = tuple({**target, "rate": rate, "most": 20000} for rate in (1e-3, 3e-3, 1e-2))
    solvers = tuple(
        {"solver": name, "rtol": 1e-4, **target}
        for name in ("LevenbergMarquardt", "IndirectLevenbergMarquardt", "Dogleg", "GaussNewton")
    )
    modes = tuple({"mode": mode, **target} for mode in ("exact", "truncate", "truncate little"))
    ours, theirs = (OURS, "ours_steps"), ("jax", "jax_steps")
    small = "-".join(map(str, sizes.fit))
    return (
        Row(
            name="step", group="steps",
            same=f"one step on the same batch of a reversible MLP, {blocks} blocks, "
            f"d / 2 = {half}, m = {width}, n = {samples}, float32. The first two make the same "
            "step; the others make one of their own, to say what a step costs.",
            problem=partial(problems.reversible, blocks, half, width, samples, sizes.outputs),
            sides=(
                Side("jaxttp, truncated", *ours, "step", ({"mode": "truncate"},)),
                Side("the same by an SVD", *ours, "step", ({"mode": "truncate by svd"},)),
                Side("jaxttp, full rank", *ours, "step-own", ({"mode": "exact"},)),
                Side("optax.adam", *theirs, "adam_step"),
                Side("kfac-jax", "kfac", "kfac", "kfac_step"),
            ),
            tolerance=1e-2,
        ),
        Row(
            name="fit", group="steps",
            same=f"from the same weights of a reversible MLP ({small}: blocks, d / 2, m, n) to a "
            f"squared error below {sizes.target:g}, float32, compilation apart. On inputs "
            "of width 16 whole steps of jaxttp diverge; \"off by\" is the loss reached.",
            problem=partial(problems.reversible, *sizes.fit, sizes.outputs),
            sides=(
                Side("jaxttp", *ours, "fit", modes),
                Side("optimistix", *theirs, "least_squares", solvers),
                Side("kfac-jax", "kfac", "kfac", "kfac_fit", ({"most": 300, **target},)),
                Side("optax.adam", *theirs, "adam_fit", rates),
            ),
            tolerance=sizes.target, judge=problems.reached, seconds=30.0,
        ),
    )  # fmt: skip


def make_rows(sizes: Sizes) -> tuple[Row, ...]:
    """All rows in these sizes."""
    kernels = tuple(kernel_row(sizes, *each) for each in sizes.kernels)
    return (*kernels, *dynamics(sizes), *sketches(sizes), *products(sizes), *steps(sizes))


PRESETS: dict[str, Sizes] = {"full": FULL, "smoke": SMOKE}
