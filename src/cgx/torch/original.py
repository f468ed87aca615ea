"""The public names of the original CGX, for scripts written for it; ``docs/migration.md`` has the table."""

# No postponed evaluation of annotations here: DDP inspects the hook's.
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from cgx.collectives.base import Op
from cgx.core.env import original_setting
from cgx.core.plan import Parameter
from cgx.core.spec import EXACT, PhaseSpecs, Uniform
from cgx.errors import CgxError, SpecError
from cgx.telemetry.summary import Report, count_specs
from cgx.torch.compat import DTYPES
from cgx.torch.endings import raise_at_end, settle_at_end
from cgx.torch.method import GIVEN
from cgx.torch.session import Pending, Session
from cgx.torch.tensors import check_tensor

_EXACT_BITS, _BUCKET_SIZE, _MINIMAL_SIZE = 32, 512, 16  # defaults of the original
_KEYS = ("bits", "bucket_size")


@final
class CGXState:
    """State of ``cgx_hook``: what is compressed, how, and over which ranks.

    Arguments win over the variables ``CGX_COMPRESSION_QUANTIZATION_BITS``, ``CGX_COMPRESSION_BUCKET_SIZE`` and
    ``CGX_COMPRESSION_MINIMAL_SIZE``, and those over the original's defaults: 32 bits (exact), 512 and 16.

    New scripts call ``cgx.compress``, which knows the names of parameters and chooses by itself with ``"auto"``.

    Args:
        process_group: The model's group; None is the default group.
        layer_min_size: Parameters of fewer elements travel exact, as those of one dimension do.
        compression_params: ``bits``: 1 to 8, or 32 for exact; ``bucket_size``: elements that share a scale, a power of
            two from 32 to 65536.

    Raises:
        SpecError: A value is out of its range, or ``compression_params`` has another key.

    Example:
        >>> state = CGXState(None, layer_min_size=1024, compression_params={"bits": 4, "bucket_size": 1024})
        >>> str(state.specs)
        'uniform:4/block=1024/rounding=stochastic/scale=fp32'
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        layer_min_size: int | None = None,
        compression_params: Mapping[str, int] | None = None,
    ) -> None:
        params = compression_params or {}
        unknown = sorted(params.keys() - set(_KEYS))
        if unknown:
            raise SpecError(f"compression_params takes {' and '.join(_KEYS)}; found {', '.join(map(repr, unknown))}")
        bits = params.get("bits", original_setting("QUANTIZATION_BITS", _EXACT_BITS))
        block_size = params.get("bucket_size", original_setting("BUCKET_SIZE", _BUCKET_SIZE))
        if layer_min_size is None:
            layer_min_size = original_setting("MINIMAL_SIZE", _MINIMAL_SIZE)
        if not isinstance(layer_min_size, int) or layer_min_size < 0:
            raise SpecError(f"layer_min_size must be a number of elements, found {layer_min_size!r}")
        self.process_group, self.layer_min_size = process_group, layer_min_size
        self.specs = _specs(bits, block_size)
        self._session: Session | None = None
        # Tensors hash by identity. DDP rebuilds its buckets after the first step, but not their parameters.
        self._names: dict[torch.Tensor, str] = {}
        self._last: Pending | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """Ranks that reduce together.

        Raises:
            SpecError: torch.distributed is not initialised, or this rank is not in the group.
        """
        group = self.process_group if self.process_group is not None else dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            raise SpecError(f"CGXState needs a process group that this rank is in, found {group!r}")
        return group

    def report(self) -> Report:
        """Totals of this rank so far; zeros before the first gradient, and at 32 bits, where torch reduces alone."""
        if self._session is None:
            return Report(self.group.size(), 0, 0, 0, 0, 0.0, {}, None)
        return replace(self._session.report(), plan=count_specs(self._session.plans[GIVEN]))

    def close(self) -> None:
        """Ends the connections; the hook opens new ones if it is called again."""
        session, self._session, self._last = self._session, None, None
        self._names.clear()
        if session is not None:
            session.close()

    def reduce_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Averages a bucket over the ranks; errors reach the caller of ``backward()``.

        Raises:
            SpecError: DDP reduces gradients one by one (its Python reducer, for compiled autograd).
        """
        if not isinstance(bucket, GradBucket):
            raise SpecError(
                "cgx_hook takes DDP's buckets, found a single gradient, as compiled autograd gives it; use cgx.compress"
            )
        if self.specs == EXACT:
            return allreduce_hook(self.group, bucket)
        buffer = bucket.buffer()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        try:
            if self.group.size() == 1:
                future.set_result(buffer)
                return future
            parameters = bucket.parameters()
            session = self._session_with(parameters)
            pending = self._last = session.reduce_flat(
                buffer,
                [self._names[parameter] for parameter in parameters],
                [tuple(parameter.shape) for parameter in parameters],
                Op.AVG,
                label=f"bucket {bucket.index()}, reduction {session.reductions}",
                on_done=lambda: future.set_result(buffer),
            )
        except CgxError as error:
            future.set_result(buffer)
            raise_at_end(error)
        else:
            settle_at_end(session, pending)
        return future

    def _session_with(self, parameters: Sequence[torch.Tensor]) -> Session:
        """The session, after it has learnt of parameters that come for the first time.

        A hook sees no names, so a parameter is named by its place in the order of first appearance, which is the
        same on all ranks because the order of buckets is.
        """
        new = [parameter for parameter in parameters if parameter not in self._names]
        if self._session is not None and not new:
            return self._session
        described = []
        for at, tensor in enumerate(new, start=len(self._names)):
            check_tensor(f"parameter {at}", tensor)
            described.append(
                Parameter(f"parameter {at}", tuple(tensor.shape), DTYPES.get(tensor.dtype, str(tensor.dtype)))
            )
        plans = {GIVEN: {parameter.name: self._specs_of(parameter) for parameter in described}}
        if self._session is None:
            self._session = Session(self.group, [], {GIVEN: {}})
        if self._last is not None:
            self._last.wait()  # lanes must be idle; the last to be queued is the last to end
        self._session.register(described, plans)
        self._names |= {tensor: parameter.name for tensor, parameter in zip(new, described, strict=True)}
        return self._session

    def _specs_of(self, parameter: Parameter) -> PhaseSpecs:
        numel = torch.Size(parameter.shape).numel()
        return self.specs if len(parameter.shape) > 1 and numel >= self.layer_min_size else EXACT


def cgx_hook(state: CGXState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The original's communication hook: ``model.register_comm_hook(state, cgx_hook)``."""
    return state.reduce_bucket(bucket)


def _specs(bits: int, block_size: int) -> PhaseSpecs:
    if bits == _EXACT_BITS:
        return EXACT
    # The original's quantiser: unbiased max-min levels, scales in full precision.
    try:
        spec = Uniform(bits, block_size, "stochastic", "fp32")
    except SpecError as error:
        raise SpecError(
            f"the original's settings ask for bits={bits!r}, bucket_size={block_size!r}; bits may be 1 to 8, or 32 for "
            f"exact, bucket_size a power of two from 32 to 65536 ({error})"
        ) from error
    return PhaseSpecs(spec, spec)
