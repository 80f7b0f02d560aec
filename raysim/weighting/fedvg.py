"""FedVG: weigh clients by how flat the validation loss is at the model they return.

    g_k     = (1/N_val) sum_i grad loss_i(theta_k)           gradient of the mean validation loss at client k's model
    G_{k,u} = || g_{k,u} ||                                  one norm per unit u: tensor, module or block
    s_k     = (1/U) sum_u G_{k,u}                            score
    w_k     = (s_k + eps)^-q / sum_j (s_j + eps)^-q          granularity `model`; q = 1 is the paper's, q = 0 uniform
    w_{k,u} = (G_{k,u} + eps)^-q / sum_j (G_{j,u} + eps)^-q  other granularities; `tensor` is the paper's layer-wise

Under granularities other than `model`, a unit may be rounding noise: a bias in front of a BatchNorm has a true gradient of zero
when batch statistics are used. A unit whose norm per element (G / numel for l1, G / sqrt(numel) else) falls below `noise_floor`
times the client's median, for any client of the cohort, takes the client weights w_k. Then neighbouring units may be smoothed:

    moving_average   mean of w_{k,u} over a window of units in module order, the ends repeated
    graph            (w_{k,u} + sum of w_k over the units next to u) / (1 + their number)

A narrower `scope` takes gradients of the last block or module only, for about a third of the work: a forward pass and the very
end of a backward one. The score is the mean over the units in scope; units outside take the client weights.

Reference: Devkota et al., FedVG, CVPR 2026 Findings, arXiv:2602.21399.
Differs from the authors' code: mean over tensors instead of their sum and mean loss instead of summed loss over batches (common
factors, which cancel up to eps); nothing of the model moves while scoring and dropout is off; class-stratified validation
batches; norms and sums in float64; the noise rule; the norm of a module or block is that of its whole gradient instead of the
sum of its tensors' norms (the same for l1), and a spectral norm that tensors of one dimension have too; edges of the graph pass
through operations without parameters.
Shapes: C cohort, U units, P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from raysim.fields import Count, NonNegative
from raysim.vector import Granularity, Unit, VectorLayout
from raysim.weighting.base import Needs, Probe, Report, Scored, Sums, Weighting, Weights, normalised, probes_of

DOMINANT = 0.99
"""A single weight above this is worth a warning: a model with a vanishing gradient need not be a good one."""


@dataclass(frozen=True)
class FedVG(Weighting):
    """Each client counts by the inverse norm of its model's validation gradient.

    Attributes:
        norm: l1 (the authors' code), l2 or spectral (largest singular value; of convolutions as out x rest) norm of the
            gradient; or `delta`, the l2 norm of the client's update instead, which needs no data.
        granularity: `model`: one weight per client; `tensor`, `module`, `block`: one per client and unit.
        units: What the mean under `model` runs over: `tensor` (null is the same), `module`, `block`, or `model`, the norm
            of the whole gradient. Elsewhere it is the granularity.
        eps: Added to every norm (1e-8 in the authors' code).
        relative_eps: In place of `eps`, this share of the cohort's median norm (0.1 tames vanishing gradients).
        exponent: q.
        scale_free: Multiply each tensor's gradient by the same norm of its parameters, so that rescaling a layer in front
            of a BatchNorm changes nothing.
        smoothing: Of the weights over neighbouring units; see the module's text.
        window: Units per moving average, odd.
        noise_floor: See the module's text.
        scope: Whose gradients are looked at: `all`; `last_block`, of most networks the head; `last_module`.
    """

    name: Literal["fedvg"] = "fedvg"
    norm: Literal["l1", "l2", "spectral", "delta"] = "l1"
    granularity: Literal["model", "tensor", "module", "block"] = "model"
    units: Literal["tensor", "module", "block", "model"] | None = None
    eps: NonNegative = 1e-8
    relative_eps: NonNegative | None = None
    exponent: NonNegative = 1.0
    scale_free: bool = False
    smoothing: Literal["none", "moving_average", "graph"] = "none"
    window: Count = 3
    noise_floor: NonNegative = 1e-3
    scope: Literal["all", "last_block", "last_module"] = "all"

    def __post_init__(self) -> None:
        if self.granularity != "model" and self.units not in (None, self.granularity):
            raise ValueError(f"units: {self.units} contradicts granularity: {self.granularity}, whose units it has")
        if self.granularity == "model" and self.smoothing != "none":
            raise ValueError("smoothing needs one weight per unit; granularity: model has one per client")
        if self.window % 2 == 0:
            raise ValueError(f"window should be odd, got {self.window}")
        if self.relative_eps is not None and self.eps != FedVG.eps:
            raise ValueError(f"eps: {self.eps} has no effect beside relative_eps")
        if self.smoothing != "moving_average" and self.window != FedVG.window:
            raise ValueError(f"window: {self.window} has no effect without smoothing: moving_average")
        if self.granularity == "model" and self.noise_floor != FedVG.noise_floor:
            raise ValueError(f"noise_floor: {self.noise_floor} has no effect under granularity: model")
        if self.scale_free and self.norm == "delta":
            raise ValueError("scale_free is about gradients; norm: delta has none")
        if self.scope != "all" and self.norm == "delta":
            raise ValueError(f"scope: {self.scope} is about gradients; norm: delta has none")
        if self.scope == "last_module" and self._units == "block":
            raise ValueError("scope: last_module contradicts units of a block, which may be more than a module")

    @property
    def needs(self) -> Needs:
        """A forward and a backward pass, but for the norm of the update."""
        return "vectors" if self.norm == "delta" else "gradient"

    @property
    def needs_edges(self) -> bool:
        """For smoothing along the graph."""
        return self.smoothing == "graph"

    def scored_units(self, layout: VectorLayout) -> tuple[Unit, ...]:
        """Parameter tensors, modules or blocks in scope."""
        scope = self.gradient_units(layout)
        if scope is None:
            return layout.units(self._units)
        if self._units == "model":
            return scope
        units = layout.units(self._units)
        return tuple(units[u] for u in _within(units, scope))

    def gradient_units(self, layout: VectorLayout) -> tuple[Unit, ...] | None:
        """The last block or module, or all."""
        if self.scope == "all":
            return None
        return layout.units("block" if self.scope == "last_block" else "module")[-1:]

    @property
    def _units(self) -> Granularity | Literal["model"]:
        return (self.units or "tensor") if self.granularity == "model" else self.granularity

    def finish(self, sums: Sums, model: Scored) -> Probe:
        """G_{k,u} for every unit, with the validation loss and accuracy that the pass computed anyway."""
        layout, units = model.layout, self.scored_units(model.layout)
        if self.norm == "delta":
            delta = (model.params - model.global_params).cpu().numpy().astype(np.float64)
            norms = unit_norms(delta, "l2", units, layout)
        else:
            gradient = sums["gradient"] / float(sums["count"])
            if self.scale_free:
                params, tensors = model.params.cpu().numpy().astype(np.float64), layout.units("tensor")
                for norm, part in zip(unit_norms(params, self.norm, tensors, layout), layout.slices, strict=True):
                    gradient[part] *= norm
            norms = unit_norms(gradient, self.norm, units, layout)
        return Probe.of(sums, values=norms, score=float(np.mean(norms)))

    def weights(self, reports: Sequence[Report], reference: Sums | None, layout: VectorLayout) -> Weights:
        """Normalised inverse norms, per client or per client and unit."""
        norms_CU = np.stack([probe.values for probe in probes_of(reports)])
        client = self._inverse(norms_CU.mean(axis=1))
        notes = []
        if len(reports) > 1 and client.max() > DOMINANT:
            top = reports[int(client.argmax())].client_id
            notes.append(f"client {top} takes {client.max():.4f} of the weight: its {self._measured} almost vanishes")
        if self.granularity == "model":
            return Weights(client, notes=tuple(notes))
        scored = self.scored_units(layout)
        unit = self._inverse(norms_CU)
        sizes = np.array([unit.size for unit in scored], dtype=np.float64)
        noisy = self._noisy(norms_CU, sizes)
        unit[:, noisy] = client[:, None]
        if noisy.any():
            notes.append(f"{int(noisy.sum())} {self.granularity}s take the client weights: rounding noise")
        dominated = int((unit[:, ~noisy] > DOMINANT).any(axis=0).sum()) if len(reports) > 1 else 0
        if dominated:
            notes.append(
                f"{dominated} {self.granularity}s give one client over {DOMINANT} of their weight: its {self._measured} "
                "almost vanishes there"
            )
        if self.scope != "all":
            inside, units = unit, layout.units(self._units)
            unit = np.repeat(client[:, None], len(units), axis=1)
            unit[:, _within(units, scored)] = inside
        if self.smoothing == "moving_average":
            unit = moving_average(unit, self.window)
        elif self.smoothing == "graph":
            unit = graph_average(unit, layout.neighbours(self.granularity))
        return Weights(client, unit, self.granularity, tuple(notes))

    @property
    def _measured(self) -> str:
        return "update" if self.norm == "delta" else "validation gradient"

    def _inverse(self, norms: np.ndarray) -> np.ndarray:
        eps = self.eps if self.relative_eps is None else self.relative_eps * np.median(norms, axis=0)
        raised = norms + eps
        if self.exponent != 1:  # Relative to the smallest, lest a high power underflows.
            least = raised.min(axis=0)
            raised = raised / np.where(least > 0, least, 1.0)
        with np.errstate(divide="ignore", over="ignore"):
            inverse = raised**-self.exponent
        # eps = 0 and a vanishing gradient: such clients share all of the weight.
        infinite = np.isinf(inverse)
        return normalised(np.where(infinite.any(axis=0), infinite, inverse).astype(np.float64))

    def _noisy(self, norms_CU: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        scale = sizes if self.norm == "l1" else np.sqrt(sizes)
        per_element = norms_CU / (scale**2 if self.scale_free else scale)
        floor = self.noise_floor * np.median(per_element, axis=1, keepdims=True)
        noisy: np.ndarray = (per_element < floor).any(axis=0)
        return noisy


def _within(units: Sequence[Unit], scope: Sequence[Unit]) -> list[int]:
    """Indices of the units that lie in the scope."""
    parts = [part for unit in scope for part in unit.slices]
    return [
        u
        for u, unit in enumerate(units)
        if all(any(part.start <= own.start and own.stop <= part.stop for part in parts) for own in unit.slices)
    ]


def unit_norms(vector: np.ndarray, norm: str, units: Sequence[Unit], layout: VectorLayout) -> np.ndarray:
    """Norm of each unit's part of a float64 vector [P]: [U].

    The spectral norm of a unit of several tensors is the root of the sum of their squared spectral norms.
    """
    # numpy's own sums: its linear algebra goes to a BLAS whose bits depend on the number of threads.
    if norm == "l1":
        return np.array([sum(np.abs(vector[part]).sum() for part in unit.slices) for unit in units])
    if norm == "l2":
        squares = [sum(np.square(vector[part]).sum() for part in unit.slices) for unit in units]
    else:
        inside = [
            [i for i, own in enumerate(layout.slices) if any(p.start <= own.start < p.stop for p in unit.slices)]
            for unit in units
        ]
        sigma = [
            largest_singular(vector[part], shape) for part, shape in zip(layout.slices, layout.shapes, strict=True)
        ]
        squares = [sum(sigma[i] ** 2 for i in members) for members in inside]
    result: np.ndarray = np.sqrt(np.array(squares, dtype=np.float64))
    return result


def largest_singular(values: np.ndarray, shape: tuple[int, ...]) -> float:
    """Largest singular value of a tensor as out x rest; the l2 norm of one with a single dimension."""
    if len(shape) < 2:
        return float(np.sqrt(np.square(values).sum()))
    if not np.isfinite(values).all():
        return float("nan")
    matrix = torch.from_numpy(values).clone().reshape(shape[0], -1)
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    return float(torch.linalg.eigvalsh(torch.mm(wide, wide.T))[-1].clamp(min=0).sqrt())


def moving_average(weights: np.ndarray, window: int) -> np.ndarray:
    """Weights [C, U] averaged over `window` neighbouring units, the ends repeated; columns sum to 1."""
    reach, count = window // 2, weights.shape[1]
    padded = np.pad(weights, ((0, 0), (reach, reach)), mode="edge")
    return normalised(sum((padded[:, i : i + count] for i in range(window)), np.zeros_like(weights)) / window)


def graph_average(weights: np.ndarray, neighbours: Sequence[Sequence[int]]) -> np.ndarray:
    """Weights [C, U] averaged over each unit and those next to it; columns sum to 1."""
    means = [weights[:, [u, *near]].sum(axis=1) / (1 + len(near)) for u, near in enumerate(neighbours)]
    return normalised(np.stack(means, axis=1))
