"""The throughput work of `peers.py` in pfl, as its tutorials write it; runs in pfl's own environment.

torchrun --nproc_per_node 2 peer_pfl.py --work FILE.npz --rounds 20
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peer_torch import LeNet5, work
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel


class Model(LeNet5):
    def loss(self, images: Any, labels: Any, eval: bool = False) -> Any:
        self.train()
        return F.cross_entropy(self(images), labels)

    @torch.no_grad()
    def metrics(self, images: Any, labels: Any, eval: bool = True) -> dict[str, Weighted]:
        self.eval()
        return {"accuracy": Weighted((self(images).argmax(dim=1) == labels).sum().item(), len(labels))}


class Stopwatch(TrainingProcessCallback):
    """When the test evaluation of each round was over, the initial one included."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.accuracy: list[float] = []

    def on_train_begin(self, *, model: Any) -> Metrics:
        self.times.append(time.perf_counter())
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
        self.times.append(time.perf_counter())
        values = dict(aggregate_metrics.to_simple_dict())
        self.accuracy += [value for name, value in values.items() if "accuracy" in name]
        return False, Metrics()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    args = parser.parse_args()
    started = time.perf_counter()
    torch.set_num_threads(1)
    np.random.seed(0)
    torch.manual_seed(0)
    content = work(args.work)
    clients = content["clients"]

    def dataset_of(client: int) -> Dataset:
        order = np.random.permutation(clients[client])  # pfl does not shuffle by itself.
        return Dataset(raw_data=[content["train_images"][order], content["train_labels"][order]])

    model = Model()
    users = FederatedDataset(
        dataset_of,
        get_user_sampler("minimize_reuse", list(range(len(clients)))),
        user_id_to_weight={client: len(examples) for client, examples in enumerate(clients)},
    )
    trained = PyTorchModel(
        model,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
    )
    stopwatch = Stopwatch()
    test = Dataset(raw_data=[content["test_images"], content["test_labels"]], eval_kwargs={"eval": True})
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=args.rounds,
            evaluation_frequency=args.rounds + 1,
            train_cohort_size=int(content["per_round"]),
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=users, val_data=users, postprocessors=[WeightByDatapoints()]),
        model=trained,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=float(content["lr"]), local_num_epochs=1, local_batch_size=int(content["batch_size"])
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=256),
        callbacks=[CentralEvaluationCallback(test, NNEvalHyperParams(local_batch_size=256)), stopwatch],
    )
    if int(os.environ.get("RANK", 0)) == 0:
        seconds = np.diff(stopwatch.times).tolist()
        print(json.dumps({"start_s": stopwatch.times[0] - started, "seconds": seconds, "accuracy": stopwatch.accuracy}))


if __name__ == "__main__":
    main()
