"""The recipe of docs/pytorch.md, where torchax and a torch that it works with are installed.

pip install "torch==2.9.1" torchax transformers
python -m pytest -n 0 tests/test_pytorch_recipe.py
"""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp import empirical_ntk
from jaxttp.adapters import check_per_sample

RECIPE = pathlib.Path(__file__).parents[1] / "docs" / "pytorch.md"


@pytest.fixture(scope="module", autouse=True)
def rank_promotion():
    """PyTorch's operations broadcast; the suite's own code does not."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def recipe():
    """The names that the recipe defines."""
    try:
        import torchax  # noqa: F401
        import transformers  # noqa: F401
    except (ImportError, AttributeError) as problem:  # the latter with a torch that is too new
        pytest.skip(f"torchax cannot be imported: {problem}")
    (code,) = re.findall(r"```python\n(.*?)```", RECIPE.read_text(), re.DOTALL)
    names = {}
    exec(compile(code, str(RECIPE), "exec"), names)
    return names


def test_the_recipe_is_one_block_of_python():
    (code,) = re.findall(r"```python\n(.*?)```", RECIPE.read_text(), re.DOTALL)
    compile(code, str(RECIPE), "exec")


def test_outputs_are_those_of_the_module(recipe):
    import torch

    with torch.no_grad():
        expected = recipe["module"](torch.tensor(recipe["tokens"])).logits.numpy()
    found = recipe["apply_fn"](recipe["params"], jnp.asarray(recipe["tokens"]))
    # float32 on both sides.
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_the_kernel_is_that_of_torchs_gradients(recipe):
    import torch

    module, tokens = recipe["module"], recipe["tokens"]
    rows = []
    for sample in range(len(tokens)):
        for output in range(2):
            module.zero_grad()
            module(torch.tensor(tokens[sample : sample + 1])).logits[0, output].backward()
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            rows.append(torch.cat([grad.reshape(-1) for grad in grads]).double().numpy())
    jacobian = np.stack(rows)
    expected = (jacobian @ jacobian.T).reshape(6, 2, 6, 2)
    check_per_sample(recipe["apply_fn"], recipe["params"], jnp.asarray(tokens))
    found = empirical_ntk(recipe["apply_fn"], recipe["params"], jnp.asarray(tokens))
    # float32 gradients.
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_the_forecast(recipe):
    assert recipe["forecast"].stable
    assert np.isfinite(recipe["forecast"].loss).all()
