import jax
import jax.numpy as jnp
import numpy as np

from jaxttp._sequence import after


def test_the_value_is_unchanged_and_depends_on_what_was_done():
    value, done = jnp.arange(3.0), jnp.array([[5.0, -1.0]])
    np.testing.assert_array_equal(after(value, done), value)
    np.testing.assert_array_equal(jax.jit(after)(value, done), value)
    assert after(value.astype(jnp.float32), done).dtype == jnp.float32


def test_xla_keeps_the_order():
    """The second SVD reads something computed from the first, in the program that is run."""

    def two(a, b):
        first = jnp.linalg.svd(a, compute_uv=False)
        return first, jnp.linalg.svd(after(b, first), compute_uv=False)

    x = jnp.ones((4, 5, 3))
    text = jax.jit(jax.vmap(two)).lower(x, x).compile().as_text()
    entry = text[text.index("ENTRY") :]
    calls = [line for line in entry.splitlines() if "custom-call(" in line and "gesdd" in line]
    assert len(calls) == 2
    names = [line.split("=")[0].replace("ROOT", "").strip().lstrip("%") for line in calls]

    lines = {}
    for line in entry.splitlines():
        if " = " in line:
            lines[line.split("=")[0].replace("ROOT", "").strip().lstrip("%")] = line
    for start, goal in (names, names[::-1]):
        seen, todo = set(), [goal]
        while todo:
            name = todo.pop()
            if name in seen or name not in lines:
                continue
            seen.add(name)
            body = lines[name].split(" = ", 1)[1]
            todo += [
                other
                for other in lines
                if other != name
                and f"{other}"
                in body.replace("(", " ")
                .replace(")", " ")
                .replace(",", " ")
                .replace("%", " ")
                .split()
            ]
        if start in seen:
            return
    raise AssertionError("the two decompositions are independent")
