import numpy as np
import pytest

from jaxttp.representation import weight_path


def tree(seed):
    rng = np.random.default_rng(seed)
    return {"b": rng.standard_normal(3), "w": rng.standard_normal((2, 3)), "steps": np.array(7)}


def flat(params):
    return np.concatenate([params["b"], params["w"].reshape(-1)])


def cosine(a, b):
    return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


def test_path():
    history = [tree(seed) for seed in range(4)]
    vectors = [flat(params) for params in history]
    path = weight_path(history)
    assert path.names == ("b", "w")
    np.testing.assert_allclose(path.norm, [np.linalg.norm(v) for v in vectors], rtol=1e-12)
    np.testing.assert_allclose(path.cosine, [cosine(v, vectors[0]) for v in vectors], rtol=1e-12)
    away = [np.linalg.norm(v - vectors[0]) for v in vectors]
    np.testing.assert_allclose(path.distance, away, rtol=1e-12)
    moves = np.diff(vectors, axis=0)
    np.testing.assert_allclose(path.step_norm, np.linalg.norm(moves, axis=1), rtol=1e-12)
    turns = [cosine(moves[i], moves[i + 1]) for i in range(2)]
    np.testing.assert_allclose(path.step_cosine, turns, rtol=1e-12)
    np.testing.assert_allclose(path.leaf_norm[2, 0], np.linalg.norm(history[2]["b"]), rtol=1e-12)
    np.testing.assert_allclose(
        path.leaf_cosine[3, 1], cosine(history[3]["w"].ravel(), history[0]["w"].ravel()), rtol=1e-12
    )


def test_one_checkpoint_and_zero_leaves():
    path = weight_path([{"w": np.ones(2), "b": np.zeros(2)}])
    assert path.norm.shape == (1,)
    assert path.step_norm.shape == path.step_cosine.shape == (0,)
    assert np.isnan(path.leaf_cosine[0, 0])
    assert path.leaf_cosine[0, 1] == 1.0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: weight_path([]), "at least one checkpoint"),
        (lambda: weight_path([tree(0), {"b": np.ones(3)}]), r"history\[1\] must be the same tree"),
        (lambda: weight_path([{"steps": np.array(1)}]), "at least one floating-point"),
        (lambda: weight_path([[np.array([np.nan])]]), "history.*NaN"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
