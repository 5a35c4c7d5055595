"""Modules of PyTorch, where torchax and a torch that it works with are installed; and refusals.

pip install 'torch==2.9.1' 'torchax==0.0.13' transformers
python -m pytest -n 0 -s tests/test_from_torch.py

prints how far outputs and kernels are from PyTorch's own.
"""

import importlib.metadata
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp import empirical_ntk, from_torch, label_words, predict_training_time
from jaxttp.adapters import pytorch
from tests.threads import in_threads

RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(0, 30, (4, 6))
MASK = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
IMAGES = RANDOM.normal(size=(4, 3, 6, 6)).astype(np.float32)


@pytest.fixture(scope="module")
def torch():
    """PyTorch, if torchax can be imported beside it."""
    try:
        pytorch.import_pair()
    except ImportError as problem:
        pytest.skip(str(problem))
    import torch

    torch.manual_seed(0)
    return torch


def bert(torch):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=24,
        vocab_size=30, num_labels=2,
    )  # fmt: skip
    x = {"input_ids": TOKENS, "attention_mask": MASK}
    return transformers.BertForSequenceClassification(config), x, None


def gpt2(torch):
    """A language model with tied embeddings; its outputs are logits (N, T, V)."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=12, n_layer=2, n_head=3, vocab_size=30, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config), TOKENS, [3, 7]


def convolutions(torch):
    nn = torch.nn
    module = nn.Sequential(
        nn.Conv2d(3, 5, 3, stride=2, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3),
    )  # fmt: skip
    return module, IMAGES, None


def regularised(torch):
    nn = torch.nn
    module = nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2)
    )
    for _ in range(3):  # running averages that are not those at the start
        module(torch.randn(16, 5))
    return module, RANDOM.normal(size=(4, 5)).astype(np.float32), None


def brute_force(torch, module, x, words):
    """Outputs and kernel by PyTorch's gradients, one output at a time."""
    module.eval()
    rows, outputs = [], []
    for sample in range(4):
        parts = {k: torch.tensor(v[sample : sample + 1]) for k, v in x.items()} if isinstance(
            x, dict) else torch.tensor(x[sample : sample + 1])  # fmt: skip
        found = module(**parts) if isinstance(x, dict) else module(parts)
        found = getattr(found, "logits", found)[0]
        found = found if words is None else found[-1, words]
        outputs.append(found.detach().numpy())
        for one in found:
            module.zero_grad()
            one.backward(retain_graph=True)
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            rows.append(torch.cat([grad.reshape(-1) for grad in grads]).double().numpy())
    jacobian = np.stack(rows)
    return np.stack(outputs), (jacobian @ jacobian.T).reshape(4, -1, 4, len(rows) // 4)


@pytest.mark.parametrize("make", [bert, gpt2, convolutions, regularised])
def test_outputs_and_kernel_are_those_of_torch(torch, make):
    module, x, words = make(torch)
    module.train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    apply_fn, params = from_torch(module, x)
    assert module.training  # the user's module is as it was
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert {*params} == {name for name, _ in module.named_parameters()}
    classify = apply_fn if words is None else label_words(apply_fn, words)
    arrays = jax.tree.map(jnp.asarray, x)
    found, kernel = classify(params, x), empirical_ntk(classify, params, arrays)
    outputs, expected = brute_force(torch, module, x, words)
    off = np.abs(found - outputs).max() / np.abs(outputs).max()
    kernel_off = np.abs(kernel - expected).max() / np.abs(expected).max()
    print(
        f"\n{make.__name__}: outputs off by {off:.1e}, kernel by {kernel_off:.1e}, of the largest"
    )
    assert off < 1e-5  # float32 on both sides
    assert kernel_off < 1e-5


def test_forecasts_of_what_torch_made(torch):
    """Notes say what evaluation mode changed; frozen parameters stay; double precision passes."""
    module, x, _ = regularised(torch)
    module[0].requires_grad_(False)
    model = from_torch(module, torch.tensor(x))
    assert {*model.params} == {"1.weight", "1.bias", "4.weight", "4.bias"}
    y = np.arange(4) % 2
    found = predict_training_time(*model, x, y, learning_rate=0.01, steps=5, relinearize=0)
    assert found.stable
    assert set(found.notes) == {"1 BatchNorm on running averages", "1 dropout (0.3) off"}
    double = from_torch(module.double(), x.astype(float))
    assert double.apply_fn(double.params, jnp.asarray(x, float)).dtype == jnp.float64


def traced(f, params, x):
    """The operations, traced anew: JAX remembers those of a function."""
    return str(jax.make_jaxpr(lambda params: f(params, x))(params))


def test_threads_take_turns(torch):
    """Each trace has all weights, and the same operations as in the main thread.

    PyTorch swaps weights inside of a module; without a lock some of them miss in a trace.
    """
    layers = [torch.nn.Linear(4, 4) for _ in range(20)]
    x = np.ones((2, 4), np.float32)
    models = [from_torch(torch.nn.Sequential(*part), x) for part in (layers, layers[:15])]
    expected = [traced(*model, x) for model in models]
    assert [text.count("dot_general") for text in expected] == [20, 15]
    different, failed = [], []

    def trace():
        for _ in range(4):
            for model, text in zip(models, expected, strict=True):
                try:
                    different.append(traced(*model, x) != text)
                except Exception as problem:
                    failed.append(repr(problem))

    in_threads(trace, 3)
    assert not failed
    assert different == [False] * 24


def test_what_cannot_be_is_refused(torch):
    nn = torch.nn
    x = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match="track_running_stats=False"):
        from_torch(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)), x)
    with pytest.raises(ValueError, match="no parameter with requires_grad"):
        from_torch(nn.Linear(3, 2).requires_grad_(False), x)

    class Two(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    with pytest.raises(ValueError, match=r"returns tuple; say which.*select"):
        from_torch(Two(3, 2), x)
    assert from_torch(Two(3, 2), x, select=lambda found: found[0]).apply_fn is not None
    with pytest.raises(ValueError, match=r"x holds 'images', which module.forward does not take"):
        from_torch(nn.Linear(3, 2), {"images": x})


def test_packages_that_are_missing_or_do_not_fit(monkeypatch):
    """One line, which names the pair of versions that works."""
    module = type("Module", (), {"__module__": "torch.nn.modules.module"})()
    monkeypatch.setattr(pytorch, "_version", lambda name: None)
    with pytest.raises(
        ImportError, match=r"needs torch and torchax: .*torch==2.9.1.*jaxttp\[torch"
    ):
        from_torch(module, None)
    monkeypatch.setattr(pytorch, "_version", lambda name: {"torch": "2.13.0"}.get(name, "0.0.13"))

    def refuse(name):
        if name == "torchax":
            raise AttributeError("'aten.prod' has no overload name 'dim_Dimname'.")

    monkeypatch.setattr(pytorch, "importlib", types.SimpleNamespace(
        import_module=refuse, metadata=importlib.metadata))  # fmt: skip
    message = (
        r"torchax 0.0.13 does not import with torch 2.13.0 .*Dimname'\); torch 2.9.1 and torchax"
    )
    with pytest.raises(ImportError, match=message):
        from_torch(module, None)
    with pytest.raises(TypeError, match=r"instance of torch.nn.Module; got dict"):
        from_torch({}, None)


def test_the_guide_is_one_block_of_python_that_runs():
    guide = pathlib.Path(__file__).parents[1] / "docs" / "pytorch.md"
    (code,) = re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)
    compiled = compile(code, str(guide), "exec")
    try:
        pytorch.import_pair()
        import transformers  # noqa: F401
    except ImportError:
        return
    names = {}
    exec(compiled, names)
    assert names["forecast"].stable
