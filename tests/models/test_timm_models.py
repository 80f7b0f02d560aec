import numpy as np
import pytest
import torch

from raysim.errors import ConfigError
from raysim.models import build_model, choose_size, has_batch_norm
from raysim.models.base import InputSpec, ModelSettings


def build(name: str, *, channels: int = 3, side: int = 32, pretrained: bool = False, seed: int = 0) -> torch.nn.Module:
    spec = InputSpec(channels, side, side, 5)
    return build_model(ModelSettings(name=name, pretrained=pretrained), spec, np.random.default_rng(seed))


@pytest.mark.parametrize("channels", [1, 3])
def test_classes_and_channels(channels):
    model = build("timm:mobilenetv3_small_050", channels=channels)
    assert model.eval()(torch.zeros(2, channels, 32, 32)).shape == (2, 5)
    assert has_batch_norm(model)


def test_parameters_are_a_function_of_the_generator_only():
    before = torch.get_rng_state()
    first, same, other = (build("timm:test_resnet", seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize(
    ("name", "native", "requested", "chosen"),
    [
        ("timm:test_resnet", 28, None, 32),
        ("timm:test_resnet", 64, None, 64),
        ("timm:test_resnet", 28, 96, 96),
        ("timm:vit_tiny_patch16_224", 28, None, 224),
        ("timm:vit_tiny_patch16_224", 224, None, 224),
        ("timm:test_vit", 28, 160, 160),
        ("timm:resnet18.a1_in1k", 28, None, 32),
    ],
)
def test_choose_size(name, native, requested, chosen):
    assert choose_size(ModelSettings(name=name), native, requested) == chosen


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("timm:vit_tiny_patch16_224", 30, "30 pixels, but timm:vit_tiny_patch16_224 takes 224 only"),
        ("timm:vit_tiny_patch16_224", 256, ".* takes 224 only"),
        ("timm:test_resnet", 31, "31 pixels, but timm:test_resnet takes 32 and more"),
    ],
)
def test_sizes_that_are_not_taken(name, size, message):
    with pytest.raises(ConfigError, match=rf"data\.image_size: {message}"):
        choose_size(ModelSettings(name=name), 28, size)


def test_building_for_a_wrong_size_is_refused():
    with pytest.raises(ConfigError, match="takes 160 only"):
        build("timm:test_vit", side=32)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("vit_small_pach16_224", "timm:vit_small_patch16_224"), ("resnet18.a9_in1k", "timm:resnet18.a1_in1k")],
)
def test_unknown_names_and_tags(name, hint):
    with pytest.raises(ConfigError, match=rf"model\.name: timm has no '{name}' .*did you mean .*") as info:
        build(f"timm:{name}")
    assert hint in str(info.value)


def test_pretrained_without_network(monkeypatch):
    """timm asks the hub for the weights by `load_state_dict_from_hf`; the hub's client refuses when offline."""
    import timm.models._builder
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import LocalEntryNotFoundError

    def refuse(*args, **kwargs):
        raise LocalEntryNotFoundError("not in the cache")

    monkeypatch.setattr(timm.models._builder, "load_state_dict_from_hf", refuse)
    with pytest.raises(ConfigError, match=r"pretrained weights of timm:test_resnet .*not in the cache") as info:
        build("timm:test_resnet", pretrained=True)
    assert HF_HUB_CACHE in str(info.value)


def test_pretrained_where_none_exist():
    with pytest.raises(ConfigError, match="timm:mixer_s32_224"):
        build("timm:mixer_s32_224", side=224, pretrained=True)
