import numpy as np
import pytest

from jaxttp.data import Dataset

GOOD = {
    "x": np.zeros((4, 2), np.float32),
    "y": np.array([0, 1, 1, 0], np.int32),
    "name": "toy",
    "description": "Four points.",
    "num_classes": 2,
    "class_names": ("a", "b"),
}


def test_take_picks_rows_in_order():
    data = Dataset(**(GOOD | {"x": np.arange(8, dtype=np.float32).reshape(4, 2)}))
    part = data.take(np.array([2, 0]))
    np.testing.assert_array_equal(part.x, [[4, 5], [0, 1]])
    np.testing.assert_array_equal(part.y, [1, 0])
    assert part.class_names == ("a", "b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((4, 2))}, "x must be float32; got float64"),
        ({"x": np.zeros(4, np.float32)}, r"x is \(N, ...\)"),
        ({"x": np.zeros((3, 2), np.float32)}, "y has the same length"),
        ({"y": np.zeros(4)}, "labels .* in int32; got float64"),
        ({"y": np.array([0, 1, 2, 0], np.int32)}, r"labels from 0 to 2; .* 0\.\.1"),
        ({"y": np.array([0, 1, -1, 0], np.int32)}, "labels from -1 to 1"),
        ({"num_classes": None, "class_names": ()}, r"targets \(N, K\) in float32; got int32"),
    ],
)
def test_parts_that_do_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        Dataset(**(GOOD | change))
