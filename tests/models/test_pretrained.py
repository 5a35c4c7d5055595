import pytest

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
    monkeypatch.setattr(shipped, "SHIPPED", ("absent",))
    with pytest.raises(FileNotFoundError, match=r"absent\.safetensors"):
        load_pretrained("absent")
    monkeypatch.undo()
    digits = shipped.digits_resnet
    monkeypatch.setattr(shipped, "digits_resnet", lambda _, rngs: digits(6, rngs=rngs))
    with pytest.raises(ValueError, match=r"head.bias \(5,\) instead of \(6,\)"):
        load_pretrained("digits-resnet")
