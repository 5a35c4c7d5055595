"""75 formulas changed, one at a time: do the tests of what each touches notice?

    python -m experiments.bench.mutation [--folder F] [--only WORD] [--seconds 120] [--again]

The repository is copied; in the copy one line of the library is changed (a sign, a factor 1/N, a
transposition, off by one, > for >=, ...) and the tests beside it run until the first failure: the
quick ones, and where they let it pass the slow ones. A change that both let pass has survived: it
is printed, and the exit status is 1. At last the quick tests run without a change. What is in the
folder is not tried again; ``--again`` tries what was not caught by quick tests.
"""

import argparse
import collections
import dataclasses
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments.store import Store

CAUGHT = ("caught", "caught by slow tests")
ROOT = Path(__file__).parents[2]
COPIED = ("jaxttp", "tests", "experiments", "pyproject.toml", "README.md", "docs")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A change.

    Attributes:
        file: below ``jaxttp``.
        old: what stands there, once.
        new: what is put in its place.
        tests: below ``tests``; several with a space between them.
    """

    file: str
    old: str
    new: str
    tests: str

    @property
    def words(self) -> str:
        """File and change."""
        return f"{self.file}: {self.old} -> {self.new}"


def group(file: str, tests: str, *changes: tuple[str, str]) -> list[Mutant]:
    """Changes of one module."""
    return [Mutant(file, old, new, tests) for old, new in changes]


MUTANTS = [
    *group(
        "losses.py", "test_losses.py",
        ("targets * (jax.nn.logsumexp(outputs) - outputs)",
         "targets * (jax.nn.logsumexp(outputs) + outputs)"),
        ("return 0.5 * jnp.sum((outputs - targets) ** 2)",
         "return jnp.sum((outputs - targets) ** 2)"),
        ("jax.nn.softplus(outputs) - targets", "jax.nn.softplus(-outputs) - targets"),
    ),
    *group(
        "losses.py", "test_weights.py",
        ("return weights[0] * loss.sample_loss", "return loss.sample_loss"),
    ),
    *group(
        "_error_rates.py", "test_losses.py",
        ("(outputs > 0) != (targets > 0.5)", "(outputs > 0.5) != (targets > 0.5)"),
        ("return jnp.sum(w * (outputs - targets) ** 2) / scale",
         "return 1 - jnp.sum(w * (outputs - targets) ** 2) / scale"),
    ),
    *group(
        "crossing.py", "test_crossing.py",
        ("reached = curve[:-window] - curve[window:] < threshold",
         "reached = curve[:-window] - curve[window:] > threshold"),
        ("xp.argmax(reached) + window, -1)", "xp.argmax(reached) + window - 1, -1)"),
        ("(distance < threshold * distance[0])", "(distance < threshold * distance[-1])"),
        ("xp.concatenate([curve[:1], (sums / counts)[1:]])", "xp.asarray(sums / counts)"),
    ),
    *group(
        "early_stopping.py", "test_early_stopping.py",
        ("int(above[above < step][-1]) + 1 if", "int(above[above < step][-1]) if"),
        ("values > lowest + NEAR * fall", "values > lowest + NEAR * lowest"),
    ),
    *group(
        "dynamics/rates.py", "dynamics/test_effective_rate.py",
        ("learning_rate / (1.0 - momentum)", "learning_rate / (1.0 + momentum)"),
    ),
    *group(
        "dynamics/recursion.py", "dynamics/test_recursion.py",
        ("return loss.gradient(f, targets) / f.shape[0]", "return loss.gradient(f, targets)"),
        ("targets[batch]) / batch.shape[0]", "targets[batch]) / f.shape[0]"),
        ("moved + (coefficients.weights - 1.0) * tangent",
         "moved + coefficients.weights * tangent"),
        ("moved = f0_test[None] + apply_kernel", "moved = f0_test[None] - apply_kernel"),
        ("1 + jnp.argmin(alive))", "jnp.argmin(alive))"),
    ),
    *group(
        "dynamics/closed_form.py", "dynamics/test_closed_form.py",
        ("check_rate(learning_rate), f0.dtype) / f0.shape[0]",
         "check_rate(learning_rate), f0.dtype) / f0.size"),
        ("ratio = jnp.where(exponent > 0, -jnp.expm1(-safe) / safe, 1.0)",
         "ratio = jnp.where(exponent > 0, jnp.exp(-safe), 1.0)"),
        ("test = f0_test[None] - apply_kernel", "test = f0_test[None] + apply_kernel"),
        ("decayed = jnp.exp(-exponent)", "decayed = jnp.exp(-2 * exponent)"),
    ),
    *group(
        "dynamics/flow.py", "dynamics/test_flow.py",
        ("rate = jnp.asarray(check_rate(learning_rate), f0.dtype) / f0.shape[0]",
         "rate = jnp.asarray(check_rate(learning_rate), f0.dtype)"),
    ),
    *group(
        "dynamics/stability.py", "dynamics/test_stability.py",
        ("return whole.reshape(n * c, n * c) / n", "return whole.reshape(n * c, n * c) / (n * c)"),
        ("factor = 2.0 * (1.0 + momentum)", "factor = 2.0 * (1.0 - momentum)"),
        ("(1.0 + 2.0 * momentum if nesterov", "(1.0 + momentum if nesterov"),
        ("scaled = vectors * jnp.sqrt(jnp.maximum(values, 0.0))",
         "scaled = vectors * jnp.maximum(values, 0.0)"),
    ),
    *group(
        "dynamics/_limits.py", "dynamics/test_limits.py",
        ("return (samples - batch_size) / (batch_size * max(samples - 1, 1))",
         "return (samples - batch_size) / (batch_size * samples)"),
        ("return 1.0 / batch_size", "return 1.0 / batch_size**2"),
        ("np.array([[[1.0, -rate * momentum], [0.0, momentum]]])",
         "np.array([[[1.0, rate * momentum], [0.0, momentum]]])"),
        ("root = half**2 - size", "root = half**2 + size"),
    ),
    *group(
        "dynamics/noise.py", "dynamics/test_diffusion.py",
        ("return float(np.sqrt((n - batch_size) / max(n - 1, 1)))",
         "return float(np.sqrt((n - batch_size) / n))"),
        ("centred = normal - jnp.mean(normal)", "centred = normal"),
        ("epoch, 1.0 - float(np.sqrt(max(0.0, 1.0 - epoch * batch_size / n)))",
         "epoch, 1.0 - float(max(0.0, 1.0 - epoch * batch_size / n))"),
    ),
    *group(
        "dynamics/two_factor.py", "dynamics/test_two_factor.py",
        ("return -rate * _product(residual, w.T), -rate * _product(f.T, residual)",
         "return -rate * _product(residual, w.T), rate * _product(f.T, residual)"),
        ("theorem_f=-rate * g * s2", "theorem_f=-rate * g * s1"),
        ("imbalance=_product(f.T, f) - _product(w, w.T)",
         "imbalance=_product(f.T, f) + _product(w, w.T)"),
        ("** exponent\n", "** -exponent\n"),
        ("1.0 if reduction == \"sum\" else 1.0 / f.shape[0]", "1.0"),
    ),
    *group(
        "dynamics/batches.py", "dynamics/test_batches.py",
        ("per_epoch = n // batch_size", "per_epoch = -(-n // batch_size)"),
        ("jax.random.randint(key, (steps, batch_size), 0, n)",
         "jax.random.randint(key, (steps, batch_size), 0, n - 1)"),
    ),
    *group(
        "ntk/power_law.py", "ntk/test_power_law.py",
        ("return PowerLaw(jnp.exp(intercept), -slope", "return PowerLaw(jnp.exp(intercept), slope"),
    ),
    *group(
        "ntk/spectrum.py", "ntk/test_spectrum.py",
        ("values, vectors = values[::-1], vectors.T[::-1]",
         "values, vectors = values[::-1], vectors[::-1]"),
        ("values = jnp.maximum(values, jnp.zeros((), values.dtype))", "values = jnp.abs(values)"),
        ("@ jnp.reshape(residual, -1)) ** 2", "@ jnp.reshape(residual, -1))"),
        ("scale = jnp.sqrt(system.values[:count])", "scale = (system.values[:count])"),
        ("good = (values[0] >= -tolerance)", "good = (values[0] >= tolerance)"),
    ),
    *group(
        "ntk/sketch.py", "ntk/test_sketch.py",
        ("return total / jnp.sqrt(jnp.asarray(dim, rows.dtype))",
         "return total / jnp.asarray(dim, rows.dtype)"),
        ("return value * jnp.sqrt(jnp.asarray(3.0, dtype))", "return value"),
        ("(squared - trace**2 / dim) / (1 + 1 / dim)", "squared"),
        ("return turns[:, :dim] + turns[:, dim:]", "return turns[:, :dim] - turns[:, dim:]"),
    ),
    *group(
        "gauss_newton/update.py", "gauss_newton/test_update.py",
        ("update = both.solution.swapaxes(1, 2) / network.blocks",
         "update = both.solution.swapaxes(1, 2)"),
        ("before1 = t1 - written", "before1 = t1 + written"),
    ),
    *group(
        "gauss_newton/modes.py", "gauss_newton/test_modes.py gauss_newton/test_pseudoinverse.py",
        ("safe / (safe**2 + tolerance**2)", "safe / (safe**2 + tolerance)"),
        ("jnp.where(counted, 1 / (safe + tolerance), 0.0)",
         "jnp.where(counted, 1 / (safe - tolerance), 0.0)"),
        ("smallest = jnp.maximum(tolerance, jnp.asarray(self.atol, values.dtype) ** 2)",
         "smallest = jnp.minimum(tolerance, jnp.asarray(self.atol, values.dtype) ** 2)"),
        ("keep = (values >= smallest) & (values > 0)", "keep = values > 0"),
    ),
    *group(
        "gauss_newton/output_space.py", "gauss_newton/test_output_space.py",
        ("return moved - shift[:, None] * spread", "return moved"),
        ("f = f - rate * change_of(", "f = f + rate * change_of("),
        ("path = targets[None] + decay * (f0 - targets)[None]",
         "path = targets[None] + decay * (targets - f0)[None]"),
    ),
    *group(
        "conditioning/leaky_relu.py", "conditioning/test_leaky_relu.py",
        ("jnp.where(hidden >= 0, 1.0, jnp.asarray(alpha)",
         "jnp.where(hidden <= 0, 1.0, jnp.asarray(alpha)"),
        ("return min(k * n, m * (d + k) - m)", "return min(k * n, m * (d + k))"),
        ("(slope * x_min * w_min) ** 2 + g_min**2", "slope * (x_min * w_min) ** 2 + g_min**2"),
    ),
    *group(
        "conditioning/initialization.py", "conditioning/test_initialization.py",
        ("jnp.maximum(root_m - root_k - t, 0.0)", "jnp.maximum(root_m - root_k + t, 0.0)"),
        ("1.0 - 4.0 * jnp.exp", "1.0 - 2.0 * jnp.exp"),
    ),
    *group(
        "conditioning/linear.py", "conditioning/test_linear.py",
        ("return k * r - (k - q) * (r - q)", "return k * r"),
        ("1 / jnp.sqrt(jnp.where(variance > 0", "1 / (jnp.where(variance > 0"),
    ),
    *group(
        "conditioning/convergence.py", "conditioning/test_convergence.py",
        ("jnp.isinf(kappa), 1.0, (kappa - 1) / (kappa + 1))",
         "jnp.isinf(kappa), 1.0, (kappa - 1) / kappa)"),
    ),
    *group(
        "conditioning/condition_number.py", "conditioning/test_condition_number.py",
        ("smallest = jnp.where(counted > 0, at(counted - 1), 0.0)",
         "smallest = jnp.where(counted > 0, at(counted), 0.0)"),
    ),
    *group(
        "representation/measures.py", "representation/test_measures.py",
        ("return jnp.sum(values) ** 2 / jnp.sum(values**2)",
         "return jnp.sum(values) / jnp.sum(values**2)"),
        ("return jnp.exp(-jnp.sum(", "return jnp.exp(jnp.sum("),
    ),
    *group(
        "representation/similarity.py", "representation/test_similarity.py",
        ("return 0.5 * jnp.sum((a - b) ** 2)", "return jnp.sum((a - b) ** 2)"),
    ),
    *group(
        "forecast/scaling.py", "forecast/test_scaling.py",
        ("later = np.log2(ratio) * growth", "later = np.log(ratio) * growth"),
    ),
]  # fmt: skip
"""Every change, by module."""


def copied() -> Path:
    """A copy of the repository."""
    place = Path(tempfile.mkdtemp(prefix="jaxttp-mutation-"))
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.npz")
            shutil.copytree(source, place / name, ignore=ignored)
        else:
            shutil.copy(source, place / name)
    return place


def run(place: Path, tests: str, seconds: int, marks: str = "not slow") -> str:
    """What the tests say in a copy: "passed", "failed", "timed out", "none", or "error"."""
    files = [f"tests/{name}" for name in tests.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", marks, *files]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=place, capture_output=True, text=True, timeout=seconds, env=environment
        )
    except subprocess.TimeoutExpired:
        return "timed out"
    return {0: "passed", 1: "failed", 5: "none"}.get(done.returncode, "error")


def try_one(place: Path, mutant: Mutant, seconds: int) -> str:
    """What the tests make of a change.

    Returns:
        "caught", "caught by slow tests", "survived", "timed out", or why it is stale.
    """
    path = place / "jaxttp" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        return f"stale: it stands there {text.count(mutant.old)} times"
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        found = run(place, mutant.tests, seconds)
        if found == "passed":
            slow = run(place, mutant.tests, 5 * seconds, "slow")
            found = {"failed": "caught by slow tests", "none": "passed"}.get(slow, slow)
    finally:
        path.write_text(text)
    return {"passed": "survived", "failed": "caught"}.get(found, found)


def main(arguments: list[str] | None = None) -> int:
    """Try the changes, print those that no test noticed, and leave with 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--folder", type=Path, help="where to keep what came of them")
    parser.add_argument("--only", default="", help="changes with this in their words")
    parser.add_argument("--seconds", type=int, default=120, help="for the tests of one change")
    parser.add_argument("--again", action="store_true", help="what no quick test caught")
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.words]
    place = copied()
    try:
        store = Store(options.folder, settings={})
        if options.again:
            kept = store.records.items()
            store.records = {k: one for k, one in kept if one["value"] in ("caught", "passed")}
        files = sorted({mutant.tests for mutant in chosen})
        whole = {f"unchanged: {name}": functools.partial(run, place, name, 600) for name in files}
        changes = {
            mutant.words: functools.partial(try_one, place, mutant, options.seconds)
            for mutant in chosen
        }
        found, unchanged = store.all(changes), store.all(whole)
    finally:
        shutil.rmtree(place)
    for name, answer in (found | unchanged).items():
        if answer not in (*CAUGHT, "passed"):
            print(f"{answer}: {name}")
    counts = collections.Counter(found.values())
    caught = sum(counts[name] for name in CAUGHT)
    print(f"{caught} of {len(found)} caught; {dict(counts)}")
    return int(caught < len(found) or set(unchanged.values()) != {"passed"})


if __name__ == "__main__":
    raise SystemExit(main())
