"""Training with virtual ranks: N micro-batches through one model, their gradients reduced as N ranks would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cgx.collectives.base import Op
from cgx.collectives.virtual import VirtualRanks
from cgx.core.algorithm import Algorithm
from cgx.core.plan import How, Parameter, choose_specs
from cgx.core.segments import Segment
from cgx.core.spec import EXACT
from cgx.errors import SpecError
from cgx.policies import error as measures
from cgx.torch.compat import DTYPES, to_array
from cgx.torch.method import check_options
from cgx.torch.tensors import check_tensor

Batch = TypeVar("Batch")


@final
@dataclass(frozen=True, slots=True)
class Reduced:
    """One step's gradients, all parameters in one flat array; views of memory that the next step overwrites.

    Args:
        mean: The reduced mean, as fp32 (elements,).
        exact: The exact mean in fp64 (elements,).
        extents: Elements of each parameter, by name.
        losses: By rank.
        squared_norms: Of each rank's gradient, by parameter, shape (ranks, parameters).
    """

    mean: NDArray[np.float32]
    exact: NDArray[np.float64]
    extents: dict[str, slice]
    losses: tuple[float, ...]
    squared_norms: NDArray[np.float64]

    @property
    def error(self) -> NDArray[np.float64]:
        """Reduced minus exact mean, (elements,)."""
        return self.mean - self.exact

    @property
    def relative_error(self) -> float:
        """Squared error of the mean over its squared norm."""
        return measures.relative_error(self.error, self.exact)

    @property
    def sampling_noise(self) -> float:
        """What the exact mean itself is uncertain by; see ``policies.error``. NaN with one rank."""
        if len(self.losses) < 2:
            return float("nan")
        return measures.sampling_noise(self.squared_norms.sum(1), measures.squared_error(self.exact))

    @property
    def extra_noise(self) -> float:
        """Squared error of compression over the sampling noise."""
        return measures.extra_noise(measures.squared_error(self.error), self.sampling_noise)


@final
class VirtualGroup:
    """N ranks that share one model's weights, in one process.

    The gradients are bit for bit those of a DDP model under ``cgx.compress`` with the same options on N ranks, as long
    as the micro-batches give the same local gradients. What a model keeps besides weights is shared, too: buffers
    (BatchNorm) see the micro-batches one after another, and dropout draws from one generator.

    Args:
        model: On the CPU, all trained parameters of one dtype (fp32, fp16 or bf16).
        world_size: Ranks.
        how: As for ``cgx.compress``, without ``"auto"``. With ``"off"`` the mean is the exact one, rounded once.
        algorithm: ``scatter_reduce``, ``all_gather`` or ``ring``.
        seed: Seed of the random bits of rounding.
        error_feedback: Keep what phase one loses and add it next time (N fp32 copies of the gradient).

    Raises:
        SpecError: Invalid options, or a model with gradients of several dtypes.

    Cost: N fp32 gradients of memory. Time beside the backward passes: see ``VirtualRanks.all_reduce``.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(64, 64)
        >>> group = VirtualGroup(model, 8, "uniform:4")
        >>> batches = torch.randn(8, 16, 64)
        >>> reduced = group.backward(lambda model, batch: model(batch).square().mean(), batches)
        >>> 0 < reduced.relative_error < 0.02 and model.weight.grad is not None
        True
    """

    def __init__(
        self,
        model: nn.Module,
        world_size: int,
        how: How = "uniform:4",
        *,
        algorithm: Algorithm = "scatter_reduce",
        seed: int = 0,
        error_feedback: bool = False,
    ) -> None:
        check_options(algorithm, has_error_feedback=error_feedback, piece_nbytes=None)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for name, parameter in named.items():
            check_tensor(name, parameter)
        dtypes = {parameter.dtype for parameter in named.values()}
        if len(dtypes) != 1 or not dtypes <= DTYPES.keys():
            raise SpecError(
                f"virtual ranks reduce one flat gradient of fp32, fp16 or bf16; the trained parameters are of {dtypes}"
            )
        self._dtype = dtypes.pop()
        self.model, self.world_size, self._parameters = model, world_size, list(named.values())
        dtype = DTYPES[self._dtype]
        specs = choose_specs(how, [Parameter(name, tuple(p.shape), dtype) for name, p in named.items()])
        segments = [Segment(name, tuple(p.shape), dtype, specs[name]) for name, p in named.items()]
        ends = np.cumsum([segment.numel for segment in segments]).tolist()
        self.extents = {s.name: slice(end - s.numel, end) for s, end in zip(segments, ends, strict=True)}
        self._is_exact = all(s == EXACT for s in specs.values())
        self.ranks = VirtualRanks(
            segments, world_size, algorithm=algorithm, seed=seed, has_error_feedback=error_feedback
        )
        self._parts = torch.empty(world_size, ends[-1], dtype=self._dtype)
        self._total = torch.empty(ends[-1], dtype=torch.float64)

    def backward(self, loss_of: Callable[[nn.Module, Batch], Tensor], batches: Sequence[Batch]) -> Reduced:
        """One backward pass for each rank's micro-batch; leaves the reduced mean in the parameters' ``grad``.

        Args:
            loss_of: The loss of a micro-batch, ready for ``backward``.
            batches: One for each rank.
        """
        if len(batches) != self.world_size:
            raise SpecError(f"{len(batches)} micro-batches were given to {self.world_size} virtual ranks: one for each")
        slices = list(self.extents.values())
        losses, norms = [], []
        self._total.zero_()
        for part, batch in zip(self._parts, batches, strict=True):
            for parameter in self._parameters:
                parameter.grad = None
            loss = loss_of(self.model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            for parameter, extent in zip(self._parameters, slices, strict=True):
                view = part[extent]
                # An unused parameter has zeros in DDP's bucket.
                _ = view.zero_() if parameter.grad is None else view.copy_(parameter.grad.reshape(-1))
            self._total += part
            norms.append([float(torch.linalg.vector_norm(part[e], dtype=torch.float64)) ** 2 for e in slices])
        self._total /= self.world_size
        if self._is_exact:
            self._parts[0] = self._total
        else:
            self.ranks.all_reduce(to_array(self._parts), Op.AVG)
        for parameter, extent in zip(self._parameters, slices, strict=True):
            parameter.grad = self._parts[0][extent].view(parameter.shape).clone()
        mean = self._parts[0].float().numpy()
        return Reduced(mean, self._total.numpy(), self.extents, tuple(losses), np.array(norms))
