"""A study in a notebook's cells: do clients with few kinds of labels get less weight from FedVG?

Opens as a notebook in Jupyter (jupytext) and VS Code; runs as a script too.
"""

# %% Two weightings, two seeds; Ray and its actors start once.
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy.stats import kendalltau

import raysim

config = {
    "rounds": 4,
    "data": {"name": "digits"},
    "model": {"name": "mlp"},
    "partition": {"scheme": "dirichlet", "clients": 12, "alpha": 0.1},
    "client": {"per_round": 6, "local_epochs": 2},
}
records = []
with raysim.Session() as session:
    for weighting in ("size", "fedvg"):
        for seed in (0, 1):
            overrides = [f"weighting.name={weighting}", f"seed={seed}", f"name={weighting}-{seed}"]
            records.append(raysim.run(config, overrides, session=session))
print(*records, sep="\n")

# %% Every round of every run, in one table.
rounds = pd.concat(
    [r.rounds.to_pandas().assign(weighting=r.config.weighting.name, seed=r.config.seed) for r in records]
)
accuracy = rounds.pivot_table(index="round_num", columns=["weighting", "seed"], values="accuracy")
print(accuracy.round(3))

# %% Weight against the label entropy of the client, nats.
record = raysim.load("runs/fedvg-0")
shares = record.class_counts / record.class_counts.sum(axis=1, keepdims=True)
entropy = -np.where(shares > 0, shares * np.log(np.where(shares > 0, shares, 1.0)), 0.0).sum(axis=1)
clients = record.clients.to_pandas()
clients["entropy"] = entropy[clients.client_id]
tau = kendalltau(clients.entropy, clients.weight)
print(f"Kendall's tau {tau.statistic:.2f}, p = {tau.pvalue:.3f}, {len(clients)} weights")

# %% And a picture.
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
accuracy.plot(ax=left, xlabel="round", ylabel="test accuracy")
right.scatter(clients.entropy, clients.weight)
right.set(xlabel="label entropy of the client (nats)", ylabel="weight")
figure.savefig("weights.png", dpi=150)

# %% Two more rounds for one of them: the bits of a run of six.
longer = raysim.resume("runs/fedvg-0", ["rounds=6"])
print(longer)
