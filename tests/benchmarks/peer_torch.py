"""What the peers' programs share: the network of `raysim/models/small.py` and the work of a client, in plain PyTorch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import nn


class LeNet5(nn.Module):
    """LeNet-5 with BatchNorm."""

    def __init__(self, side: int = 28) -> None:
        super().__init__()
        left = ((side - 4) // 2 - 4) // 2
        self.conv1, self.bn1 = nn.Conv2d(1, 6, 5), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16)
        self.pool = nn.MaxPool2d(2)
        self.fc1, self.fc2, self.classifier = nn.Linear(16 * left**2, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.bn1(self.conv1(x)).relu())
        x = self.pool(self.bn2(self.conv2(x)).relu()).flatten(1)
        return self.classifier(self.fc2(self.fc1(x).relu()).relu())


@functools.cache
def work(path: str) -> dict[str, Any]:
    """The work that raysim has exported: images as float tensors, and the positions of each client's examples."""
    with np.load(path) as archive:
        content = {name: archive[name] for name in archive.files}
    for part in ("train", "test"):
        content[f"{part}_images"] = torch.from_numpy(content[f"{part}_images"]).float() / 255
        content[f"{part}_labels"] = torch.from_numpy(content[f"{part}_labels"])
    content["clients"] = np.split(content["indices"], content["offsets"][1:-1])
    return content


@torch.no_grad()
def test_accuracy(model: nn.Module, content: dict[str, Any]) -> float:
    """Share of the test images that the model knows."""
    model.eval()
    predicted = torch.cat([model(images).argmax(dim=1) for images in content["test_images"].split(256)])
    return (predicted == content["test_labels"]).float().mean().item()
