"""Units and edges of real networks: blocks by family, who feeds whom, and norms where tensors have one dimension."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from raysim.data.arrays import ImageSet
from raysim.models import build_model
from raysim.models.base import InputSpec, ModelSettings
from raysim.models.graph import module_edges
from raysim.objective import ModelObjective
from raysim.seeding import Purpose, rng_for
from raysim.vector import VectorLayout
from raysim.weighting.base import Report, Scored
from raysim.weighting.fedvg import FedVG


def layout_of(build) -> VectorLayout:
    with torch.device("meta"):
        return VectorLayout.of(build().named_parameters())


def tiny_vit() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(img_size=16, patch_size=8, in_chans=1, embed_dim=16, depth=2, num_heads=2, num_classes=3)


RESNET = ["base", "layer1", "layer2", "layer3", "layer4", "classifier"]
SWIN = ["features.0", "features.1", "features.2", "features.3", "features.4", "features.5", "features.6", "features.7"]
VGG = [
    "features.0",
    "features.3",
    "features.6",
    "features.8",
    "features.11",
    "features.13",
    "features.16",
    "features.18",
]
BLOCKS = {
    "torchvision resnet18": (torchvision.models.resnet18, RESNET),
    "torchvision resnet50": (torchvision.models.resnet50, RESNET),
    "torchvision vit_b_16": (
        torchvision.models.vit_b_16,
        ["base", *(f"encoder.layers.encoder_layer_{i}" for i in range(12)), "classifier"],
    ),
    "torchvision swin_t": (torchvision.models.swin_t, [*SWIN, "base", "classifier"]),
    "torchvision vgg11": (torchvision.models.vgg11, [*VGG, "classifier"]),
    "timm ViT": (tiny_vit, ["base", "blocks.0", "blocks.1", "classifier"]),
}


@pytest.mark.parametrize("family", BLOCKS)
def test_blocks_of_families(family):
    build, names = BLOCKS[family]
    layout = layout_of(build)
    units = layout.units("block")
    assert [unit.name for unit in units] == names
    assert sum(unit.size for unit in units) == layout.size


def test_a_plain_network_has_a_block_per_module():
    spec = InputSpec(1, 28, 28, 10)
    layout = VectorLayout.of(build_model(ModelSettings("lenet5"), spec, rng_for(0, Purpose.INIT)).named_parameters())
    assert [unit.name for unit in layout.units("block")] == ["conv1", "bn1", "conv2", "bn2", "fc1", "fc2", "classifier"]


class Skip(nn.Module):
    """first -> (second -> third) + first -> last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(2, 2) for _ in range(4))
        self.act = nn.ReLU()

    def forward(self, x):
        x = self.act(self.first(x))
        return self.last(x + self.third(torch.relu(self.second(x))).flatten(1))


def test_edges_pass_through_what_has_no_parameters():
    edges = {("first", "second"), ("second", "third"), ("first", "last"), ("third", "last")}
    assert set(module_edges(Skip())) == edges


def test_edges_of_a_resnet_follow_its_shortcuts():
    edges = set(module_edges(torchvision.models.resnet18()))
    assert {
        ("conv1", "bn1"),
        ("bn1", "layer1.0.conv1"),
        ("bn1", "layer1.1.conv1"),
        ("layer2.0.downsample.1", "fc"),
    } & edges
    assert ("bn1", "layer1.1.conv1") in edges, "the identity shortcut of layer1.0"
    assert ("layer1.1.bn2", "layer2.0.downsample.0") in edges
    assert ("layer4.1.bn2", "fc") in edges
    assert not any("relu" in name or "maxpool" in name for edge in edges for name in edge)


def test_a_network_that_cannot_be_traced_has_no_edges():
    class Choosing(Skip):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    assert module_edges(Choosing()) == ()


def test_neighbours_by_granularity():
    shapes = ((2, 2), (2,)) * 3
    names = tuple(f"{module}.{kind}" for module in "abc" for kind in ("weight", "bias"))
    layout = VectorLayout(names, shapes, (("a", "c"),))
    assert layout.neighbours("module") == ((2,), (), (0,))
    assert layout.neighbours("tensor") == ((1, 4, 5), (0, 4, 5), (3,), (2,), (0, 1, 5), (0, 1, 4))
    assert VectorLayout(names, shapes).neighbours("module") == ((1,), (0, 2), (1,))


@pytest.mark.parametrize("granularity", ["model", "tensor", "module", "block"])
@pytest.mark.parametrize("norm", ["l1", "l2", "spectral", "delta"])
def test_a_vision_transformer_can_be_weighed_in_every_way(granularity, norm):
    """LayerNorm's tensors have one dimension, class tokens three."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    images = ImageSet(rng.integers(0, 256, (6, 1, 16, 16), dtype=np.uint8), np.arange(6) % 3)
    objective = ModelObjective(tiny_vit(), images)
    start = objective.params.clone()
    weighting = FedVG(norm=norm, granularity=granularity)
    reports = []
    for k in range(3):
        objective.params.copy_(start + 0.02 * k * torch.randn_like(start) + 0.01)
        with objective.scoring("batch"):
            sums = weighting.accumulate(objective, [objective.take(np.arange(6))])
        probe = weighting.finish(sums, Scored(objective.params, start, objective.layout))
        assert probe.values.shape == (len(weighting.scored_units(objective.layout)),)
        reports.append(Report(k, 1, 1, 0.0, probe))
    weights = weighting.weights(reports, None, objective.layout)
    assert weights.client.sum() == pytest.approx(1)
    assert np.isfinite(weights.parameters).all()
