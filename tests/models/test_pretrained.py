import pytest
from flax import nnx

from experiments import pretrain_digits
from jaxttp.models import load_pretrained
from jaxttp.models.pretrained import checkpoint as shipped


def test_the_shipped_network_classifies_what_it_was_not_trained_on():
    parts = pretrain_digits.load_split(pretrain_digits.Settings())
    assert len(parts.held_out) > 150
    model = load_pretrained("digits-resnet")
    assert pretrain_digits.accuracy(model, parts.held_out) > 0.97
    assert pretrain_digits.accuracy(model, parts.train) > 0.99


def test_a_file_that_is_missing_or_of_another_network(monkeypatch):
    monkeypatch.setitem(shipped._NETWORKS, "absent", shipped._NETWORKS["digits-resnet"])
    with pytest.raises(FileNotFoundError, match=r"absent\.safetensors"):
        load_pretrained("absent")
    monkeypatch.setitem(
        shipped._NETWORKS, "digits-resnet", lambda: shipped.digits_resnet(6, rngs=nnx.Rngs(0))
    )
    with pytest.raises(ValueError, match=r"head.bias \(5,\) instead of \(6,\)"):
        load_pretrained("digits-resnet")
