import pytest

from experiments import pretrain_digits
from jaxttp.models import load_pretrained
from jaxttp.models.pretrained import checkpoint as shipped
from jaxttp.pipeline.tasks import SHIPPED_SIZES


@pytest.mark.parametrize(("size", "name"), SHIPPED_SIZES.items())
def test_the_shipped_networks_classify_what_they_were_not_trained_on(size, name):
    parts = pretrain_digits.load_split(pretrain_digits.Settings(image_size=size))
    assert len(parts.held_out) > 150
    model = load_pretrained(name)
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
