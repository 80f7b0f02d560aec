"""FedVG: weigh clients by how flat the validation loss is at the model they return.

    g_k     = (1/N_val) sum_i grad loss_i(theta_k)        gradient of the mean validation loss at client k's model
    G_{k,u} = || g_{k,u} ||_p                             p = 1 or 2, u over parameter tensors
    s_k     = (1/U) sum_u G_{k,u}                         score
    w_k     = (s_k + eps)^-1 / sum_j (s_j + eps)^-1       granularity `model`
    w_{k,u} = (G_{k,u} + eps)^-1 / sum_j (G_{j,u} + eps)^-1    granularity `tensor`, the paper's layer-wise weights

Under `tensor`, a bias in front of a BatchNorm has a true gradient of zero when batch statistics are used, so its norm is
rounding noise. A tensor whose per-element norm (G / numel for p = 1, G / sqrt(numel) for p = 2) falls below `noise_floor` times
the client's median per-element norm, for any client of the cohort, takes the client weights w_k.

Reference: Devkota et al., FedVG, CVPR 2026 Findings, arXiv:2602.21399.
Differs from the authors' code: mean over tensors instead of their sum and mean loss instead of summed loss over batches (common
factors, which cancel up to eps); nothing of the model moves while scoring and dropout is off; class-stratified validation
batches; norms and sums in float64; the noise rule.
Shapes: C cohort, U parameter tensors, P parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from raysim.fields import NonNegative
from raysim.objective import Batch, Objective
from raysim.vector import Vector, VectorLayout
from raysim.weighting.base import Probe, Report, Sums, Weighting, Weights, normalised

DOMINANT = 0.99
"""A single weight above this is worth a warning: a model with a vanishing gradient need not be a good one."""


@dataclass(frozen=True)
class FedVG(Weighting):
    """Each client counts by the inverse norm of its model's validation gradient.

    Attributes:
        norm: l1 (the authors' code) or l2, of each tensor's gradient.
        granularity: `model`: one weight per client; `tensor`: one per client and parameter tensor.
        eps: Added to every norm (1e-8 in the authors' code).
        noise_floor: See the module's text; under `tensor` only.
    """

    name: Literal["fedvg"] = "fedvg"
    norm: Literal["l1", "l2"] = "l1"
    granularity: Literal["model", "tensor"] = "model"
    eps: NonNegative = 1e-8
    noise_floor: NonNegative = 1e-3

    needs_probe: ClassVar[bool] = True

    def accumulate(self, objective: Objective, shard: Iterable[Batch]) -> Sums:
        """Summed gradient [P], summed loss, correct predictions and examples over the shard."""
        objective.grad.zero_()
        sums = [objective.add_gradient(batch) for batch in shard]
        return {
            "gradient": objective.grad.cpu().numpy().astype(np.float64),
            "loss": np.array(sum(s.loss for s in sums), dtype=np.float64),
            "correct": np.array(sum(s.correct for s in sums)),
            "count": np.array(sum(s.count for s in sums)),
        }

    def finish(self, sums: Sums, params: Vector, global_params: Vector, layout: VectorLayout) -> Probe:
        """G_{k,u} for every parameter tensor, with the validation loss and accuracy that the pass computed anyway."""
        mean = sums["gradient"] / float(sums["count"])
        # numpy's own sums: its linear algebra goes to a BLAS whose bits depend on the number of threads.
        if self.norm == "l1":
            norms = np.array([np.abs(mean[part]).sum() for part in layout.slices])
        else:
            norms = np.array([np.sqrt(np.square(mean[part]).sum()) for part in layout.slices])
        return Probe(norms, float(sums["loss"] / sums["count"]), int(sums["correct"]), int(sums["count"]))

    def weights(self, reports: Sequence[Report], reference: Sums | None, layout: VectorLayout) -> Weights:
        """Normalised inverse norms, per client or per client and tensor."""
        norms_CU = np.stack([report.probe.unit_norms for report in reports if report.probe is not None])
        assert len(norms_CU) == len(reports), "every report has a probe"
        client = self._inverse(norms_CU.mean(axis=1))
        notes = []
        if len(reports) > 1 and client.max() > DOMINANT:
            top = reports[int(client.argmax())].client_id
            notes.append(
                f"client {top} takes {client.max():.4f} of the weight: its validation gradient almost vanishes"
            )
        if self.granularity == "model":
            return Weights(client, notes=tuple(notes))
        unit = self._inverse(norms_CU)
        sizes = np.array([part.stop - part.start for part in layout.slices], dtype=np.float64)
        noisy = self._noisy(norms_CU, sizes)
        unit[:, noisy] = client[:, None]
        if noisy.any():
            notes.append(f"{int(noisy.sum())} tensors have a gradient of rounding noise and take the client weights")
        return Weights(client, unit, "tensor", tuple(notes))

    def _inverse(self, norms: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            inverse = 1.0 / (norms + self.eps)
        # eps = 0 and a vanishing gradient: such clients share all of the weight.
        infinite = np.isinf(inverse)
        return normalised(np.where(infinite.any(axis=0), infinite, inverse).astype(np.float64))

    def _noisy(self, norms_CU: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        per_element = norms_CU / (sizes if self.norm == "l1" else np.sqrt(sizes))
        floor = self.noise_floor * np.median(per_element, axis=1, keepdims=True)
        noisy: np.ndarray = (per_element < floor).any(axis=0)
        return noisy
