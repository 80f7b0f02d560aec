"""The works of `peers.py` in Flower's simulation engine, as its tutorials write them; runs in Flower's own environment.

python peer_flower.py overhead --parameters 44426 --clients 20 --rounds 7 [--api numpy]
python peer_flower.py throughput --work FILE.npz --rounds 20
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
import warnings

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg as NumPyFedAvg
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peer_torch import LeNet5, test_accuracy, work
from torch.utils.data import DataLoader, TensorDataset

TIMES: list[float] = []
"""When the test evaluation of each round was over, the initial one included."""
ACCURACIES: list[float] = []


def note(accuracy: float | None = None) -> None:
    TIMES.append(time.perf_counter())
    if accuracy is not None:
        ACCURACIES.append(accuracy)


def train_client(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    config = message.content["config"]
    content = work(config["work"])
    model = LeNet5()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.train()
    mine = content["clients"][context.node_config["partition-id"]]
    data = TensorDataset(content["train_images"][mine], content["train_labels"][mine])
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    criterion = torch.nn.CrossEntropyLoss()
    for images, labels in DataLoader(data, batch_size=config["batch-size"], shuffle=True):
        optimizer.zero_grad()
        criterion(model(images), labels).backward()
        optimizer.step()
    reply = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(mine)})}
    return Message(content=RecordDict(reply), reply_to=message)


def return_arrays(message: Message, context: Context) -> Message:
    reply = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
    return Message(content=RecordDict(reply), reply_to=message)


class Returning(NumPyClient):
    def fit(self, parameters: Any, config: Any) -> Any:
        return parameters, 1, {}


def message_apps(args: argparse.Namespace, num_clients: int) -> tuple[ServerApp, ClientApp]:
    """Server and client of Flower's Message API."""
    client, server = ClientApp(), ServerApp()
    client.train()(train_client if args.work else return_arrays)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        torch.set_num_threads(1)
        config = {}
        if args.work:
            content = work(args.work)
            config = {"work": args.work, "lr": float(content["lr"]), "batch-size": int(content["batch_size"])}
            initial, per_round = ArrayRecord(LeNet5().state_dict()), int(content["per_round"])
        else:
            initial, per_round = ArrayRecord({"vector": Array(np.zeros(args.parameters, np.float32))}), num_clients

        def evaluate(round_num: int, arrays: ArrayRecord) -> MetricRecord | None:
            if not args.work:
                return note()
            model = LeNet5()
            model.load_state_dict(arrays.to_torch_state_dict())
            accuracy = test_accuracy(model, work(args.work))
            note(accuracy)
            return MetricRecord({"accuracy": accuracy})

        strategy = FedAvg(
            fraction_train=per_round / num_clients,
            fraction_evaluate=0.0,
            min_train_nodes=per_round,
            min_available_nodes=num_clients,
        )
        strategy.start(
            grid=grid,
            initial_arrays=initial,
            train_config=ConfigRecord(config),
            num_rounds=args.rounds,
            evaluate_fn=evaluate,
        )

    return server, client


def numpy_apps(args: argparse.Namespace, num_clients: int) -> tuple[ServerApp, ClientApp]:
    """Server and client of Flower's older API, with a NumPyClient."""

    def server_fn(context: Context) -> ServerAppComponents:
        strategy = NumPyFedAvg(
            fraction_fit=1.0,
            fraction_evaluate=0.0,
            min_fit_clients=num_clients,
            min_available_clients=num_clients,
            initial_parameters=ndarrays_to_parameters([np.zeros(args.parameters, np.float32)]),
            evaluate_fn=lambda round_num, parameters, config: note(),
        )
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=args.rounds))

    return ServerApp(server_fn=server_fn), ClientApp(client_fn=lambda context: Returning().to_client())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["overhead", "throughput"])
    parser.add_argument("--work")
    parser.add_argument("--parameters", type=int)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--api", choices=["message", "numpy"], default="message")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    num_clients = len(work(args.work)["clients"]) if args.work else args.clients
    server, client = (numpy_apps if args.api == "numpy" else message_apps)(args, num_clients)
    started = time.perf_counter()
    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=num_clients,
        backend_config={
            "init_args": {"num_cpus": 2, "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    assert len(TIMES) == args.rounds + 1, f"{len(TIMES)} evaluations in {args.rounds} rounds"
    print(json.dumps({"start_s": TIMES[0] - started, "seconds": np.diff(TIMES).tolist(), "accuracy": ACCURACIES}))


if __name__ == "__main__":
    main()
