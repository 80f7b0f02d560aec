"""Small networks of the federated-learning literature.

`mlp` and `cnn` are the "2NN" and the CNN of McMahan et al., Communication-Efficient Learning of Deep Networks from
Decentralized Data, AISTATS 2017, arXiv:1602.05629. `lenet5` is LeNet-5 with ReLU, max pooling and BatchNorm, as in the
published FedVG code.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from raysim.models.base import InputSpec


def mlp(spec: InputSpec) -> nn.Module:
    """Two hidden layers of 200 units with ReLU; takes any image size."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(spec.channels * spec.height * spec.width, 200),
            relu1=nn.ReLU(),
            fc2=nn.Linear(200, 200),
            relu2=nn.ReLU(),
            classifier=nn.Linear(200, spec.num_classes),
        )
    )


def cnn(spec: InputSpec) -> nn.Module:
    """Two 5x5 convolutions (32 and 64 channels, same padding), each with 2x2 max pooling, and 512 hidden units."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(spec.channels, 32, 5, padding=2),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, 5, padding=2),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * (spec.height // 4) * (spec.width // 4), 512),
            relu3=nn.ReLU(),
            classifier=nn.Linear(512, spec.num_classes),
        )
    )


def lenet5(spec: InputSpec) -> nn.Module:
    """LeNet-5 with BatchNorm: two 5x5 convolutions (6 and 16 channels, no padding), then 120 and 84 hidden units."""
    height, width = (((side - 4) // 2 - 4) // 2 for side in (spec.height, spec.width))
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(spec.channels, 6, 5),
            bn1=nn.BatchNorm2d(6),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5),
            bn2=nn.BatchNorm2d(16),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(16 * height * width, 120),
            relu3=nn.ReLU(),
            fc2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
            classifier=nn.Linear(84, spec.num_classes),
        )
    )
