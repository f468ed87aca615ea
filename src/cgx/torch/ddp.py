"""The DDP door: one line compresses the gradients of a DistributedDataParallel model."""

# No postponed evaluation of annotations here: DDP inspects the hook's.
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, final
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from cgx.collectives.base import Op
from cgx.collectives.exact import divide
from cgx.core.algorithm import Algorithm
from cgx.core.plan import OFF, How, Parameter, choose_specs
from cgx.core.spec import parse_spec
from cgx.errors import CgxError, SpecError
from cgx.torch.advisor import SPECS, Advisor, Load, load_of
from cgx.torch.compat import DTYPES, at_end_of_backward, untraced
from cgx.torch.endings import raise_at_end, settle_at_end
from cgx.torch.handle import Handle
from cgx.torch.method import GIVEN, Method
from cgx.torch.session import Session
from cgx.torch.tensors import check_tensor
from cgx.torch.tuner import Tuner, auto_plans

_LOG = logging.getLogger("cgx")
AUTO = "auto"
_FIRST_BUCKET_NBYTES = 1 << 20  # DDP's default, so that the first reduction starts early


@final
class _Hook:
    """What is registered on a DDP model; its handle may come and go."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.group: dist.ProcessGroup = model.process_group
        self.handle: Handle | None = None
        self._is_registered = False
        self._index = self._last_index = 0
        self._reduced: set[str] = set()
        _hooks[model] = self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of the model gets none of this: it has connections of its own to open."""
        return type(None), ()

    def register(self, model: DistributedDataParallel) -> None:
        """Puts the hook on the model, once and for all: DDP has no way to take one off.

        The hook keeps no reference to the model: the cycle would go through C++, where no collector sees it.
        """
        if self._is_registered:
            return
        try:
            model.register_comm_hook(self, _reduce_bucket)
        except RuntimeError as error:
            del _hooks[model]
            raise SpecError(
                "this DDP model has a communication hook already, and DDP allows one: remove it or leave out cgx "
                f"({error})"
            ) from error
        self._is_registered = True

    def reduce_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        if self.group.size() == 1:
            future.set_result(buffer)
            return future
        handle = self.handle
        session = None if handle is None else handle.session
        if handle is None or session is None:
            return _native_mean(buffer, self.group)
        names, shapes = handle.parameters(bucket)
        is_awaited = self._is_awaited(bucket)
        try:
            is_first = bucket.index() <= self._index  # of a step, whichever DDP leaves out
            self._index = bucket.index()
            method = _method(handle, session, names, buffer, is_first=is_first)
            if method is None and session.throttle_bit_s is None:
                return _timed(session, _native_mean(buffer, self.group), buffer)
            pending = session.reduce_flat(
                buffer,
                names,
                shapes,
                Op.AVG,
                label=f"bucket {bucket.index()}, reduction {session.reductions}",
                method=method or Method(OFF, "scatter_reduce"),
                is_awaited=is_awaited,
                on_done=lambda: future.set_result(buffer),
            )
        except CgxError as error:
            future.set_result(buffer)
            raise_at_end(error)
        else:
            settle_at_end(session, pending)
        return future

    def reduce_gradient(self, gradient: torch.Tensor, parameter: torch.Tensor) -> None:
        """Reduces one gradient in place: under compiled autograd they come one by one, and nothing waits for them."""
        if self.group.size() == 1:
            return
        handle = self.handle
        session = None if handle is None else handle.session
        if handle is None or session is None:
            _native_mean(gradient, self.group).wait()
            return
        name = handle.name(parameter)
        is_first = not self._reduced or name in self._reduced  # a step begins where a gradient comes again
        if is_first:
            self._reduced.clear()
        self._reduced.add(name)
        method = _method(handle, session, [name], gradient, is_first=is_first)
        if gradient.is_sparse or (method is None and session.throttle_bit_s is None):
            session.count_native(gradient)
            _native_mean(gradient, self.group).wait()
        else:
            label = f"{name}, reduction {session.reductions}"
            session.reduce({name: gradient}, Op.AVG, label=label, method=method or Method(OFF, "scatter_reduce"))

    def _is_awaited(self, bucket: GradBucket) -> bool:
        """True for a step's last two buckets: both are ready when the backward pass ends, or nearly so."""
        if bucket.is_last():
            self._last_index = bucket.index()
        return bucket.index() >= self._last_index - 1


# Beside the models, not on them: they can still be copied and pickled.
_hooks: WeakKeyDictionary[DistributedDataParallel, _Hook] = WeakKeyDictionary()


def handle_of(model: DistributedDataParallel) -> Handle | None:
    """The handle of a compressed model; None for others."""
    hook = _hooks.get(model)
    return None if hook is None else hook.handle


def _timed(
    session: Session, future: torch.futures.Future[torch.Tensor], buffer: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    """Lets the session count bytes and waiting time of what the engine reduces by itself."""
    session.count_native(buffer)

    def settle() -> None:
        start = time.perf_counter()
        with suppress(RuntimeError):  # DDP waits for it too, and raises it
            future.wait()
        session.wait_seconds += time.perf_counter() - start

    at_end_of_backward(settle)
    return future


def _native_mean(buffer: torch.Tensor, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    divide(buffer, group.size())
    work: Any = dist.all_reduce(buffer, group=group, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


def _method(
    handle: Handle, session: Session, names: Sequence[str], buffer: torch.Tensor, *, is_first: bool
) -> Method | None:
    """How a buffer travels; None is the engine's own all-reduce."""
    tuner = handle.tuner
    if tuner is None:
        return session.method
    if is_first:
        tuner.begin_step()
    session.check()
    if buffer.is_sparse:
        return None
    return tuner.method(handle.load(tuple(names), buffer.nbytes))


def _reduce_bucket(state: _Hook, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    given: Any = bucket  # DDP reads the annotations, and holds us to them alone
    if isinstance(given, tuple):  # from its Python reducer, which is for compiled autograd and looks at no result
        _reduce_gradient(state, *given)
        return None  # type: ignore[return-value]
    return state.reduce_bucket(bucket)


@untraced
def _reduce_gradient(state: _Hook, gradient: torch.Tensor, parameter: torch.Tensor) -> None:
    state.reduce_gradient(gradient, parameter)


def compress(
    model: DistributedDataParallel,
    how: How = "uniform:4",
    *,
    seed: int = 0,
    error_feedback: bool = False,
    throttle_bit_s: float | None = None,
    piece_nbytes: int | None = None,
    algorithm: Algorithm = "scatter_reduce",
    intra: str = "identity",
) -> Handle:
    """Makes ``model`` communicate compressed gradients; the training loop stays as it is.

    Collective: every rank calls it, before or after the first steps, with the same arguments. Replicas stay
    bit-identical. 1-D and small tensors, and dtypes other than fp32, fp16 and bf16, travel exact.

    Args:
        model: A DistributedDataParallel module on the CPU.
        how: A spec or its text (``"uniform:4"``), a mapping from name pattern (glob, first match wins, ``*`` for the
            rest) to spec, ``"auto"`` or ``"off"``. ``"auto"`` measures the link and leaves the model alone unless
            compression is predicted to pay; then it tries exact, 8 and 4 bits while training, keeps the fastest, and
            tries again when the link changes.
        seed: Seed of the random bits of rounding, equal on all ranks.
        error_feedback: Keep what phase one loses and add it to the next gradient (one fp32 copy of the compressed
            parameters per rank). Needed below 3 bits; seldom useful above.
        throttle_bit_s: Model a link of this many bits per second, to see what compression would gain on it.
        piece_nbytes: Gradient bytes that move through the pipeline together; None chooses by the size of the bucket.
        algorithm: ``scatter_reduce`` (any size), ``all_gather`` (one step: small messages, few ranks),
            ``hierarchical`` (several ranks a node) or ``ring`` (few ranks: its error grows with their number); of no
            account when ``how`` is ``"auto"``.
        intra: Spec that the hierarchical algorithm uses inside a node.

    Returns:
        A handle with ``report()``, ``state_dict()``, ``load_state_dict()`` and ``remove()``. A second call on the same
        model changes nothing and returns the first handle.

    Raises:
        SpecError: Not a DDP model, invalid ``how``, a device without kernels, or another hook is registered.
        PlanMismatchError: Ranks disagree about model or options.

    Cost:
        By default per step and rank ``2 (W - 1) / W`` of one compressed copy of the gradient, 4.25 bits per element.

    Example:
        >>> import torch, torch.distributed as dist, cgx
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> handle = cgx.compress(model, "uniform:4")
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> dist.destroy_process_group()

    References:
        CGX (arXiv 2111.08617).
    """
    if not isinstance(model, DistributedDataParallel):
        raise SpecError(
            f"cgx.compress needs a torch.nn.parallel.DistributedDataParallel model, found {type(model).__name__}; wrap "
            "the model in DDP first, or use cgx.all_reduce in a loop that reduces gradients by hand"
        )
    hook = _hooks.get(model)
    if hook is not None and hook.handle is not None:
        _LOG.info("this model is compressed already; cgx.compress changes nothing. Call remove() on its handle first")
        return hook.handle
    named = dict(model.module.named_parameters())
    is_auto, inside = how == AUTO, parse_spec(intra)
    devices = {parameter.device.type for parameter in named.values()} - {"cpu"}
    if is_auto and devices:
        _LOG.warning("cgx leaves a model on %s alone: this version compresses on the CPU only", sorted(devices))
        how, is_auto = OFF, False
    else:
        for name, parameter in named.items():
            check_tensor(name, parameter)
    parameters = [Parameter(n, tuple(p.shape), DTYPES.get(p.dtype, str(p.dtype))) for n, p in named.items()]
    if is_auto and error_feedback:
        raise SpecError(
            "error feedback is asked for with how='auto', which changes specs and algorithms on the way, so residuals "
            "would go astray; name a spec"
        )
    plans = auto_plans(parameters) if is_auto else {GIVEN: choose_specs(how, parameters)}
    if hook is None:
        hook = _Hook(model)
    if not is_auto:
        hook.register(model)  # before connections are opened: it may be refused
    names = {id(parameter): name for name, parameter in named.items()}
    session = tuner = None
    if hook.group.size() > 1 and (how != OFF or throttle_bit_s is not None):
        session = Session(
            hook.group,
            parameters,
            plans,
            algorithm="scatter_reduce" if is_auto else algorithm,
            intra=inside,
            seed=seed,
            has_error_feedback=error_feedback,
            throttle_bit_s=throttle_bit_s,
            piece_nbytes=piece_nbytes,
        )
        if is_auto:
            try:
                tuner = Tuner(session, Advisor(session, SPECS), _loads_to_come(model, session, names))
                if tuner.is_worth_a_hook:
                    hook.register(model)
            except CgxError:
                session.close()
                raise
            if not tuner.is_worth_a_hook:
                session.close()
                session = None
    handle = hook.handle = Handle(session, names, hook, tuner)
    finalize(model, handle.remove).atexit = False  # a framework drops models without a word
    return handle


def _loads_to_come(model: DistributedDataParallel, session: Session, names: Mapping[int, str]) -> list[Load]:
    """The buckets DDP will make: gradients come in reverse order, and the first bucket is small."""
    buckets: list[tuple[tuple[str, ...], int]] = [((), 0)]
    caps = (_FIRST_BUCKET_NBYTES, model.bucket_bytes_cap)
    for parameter in reversed([p for p in model.module.parameters() if p.requires_grad]):
        if buckets[-1][1] >= caps[min(len(buckets) - 1, 1)]:
            buckets.append(((), 0))
        inside, nbytes = buckets[-1]
        buckets[-1] = (*inside, names[id(parameter)]), nbytes + parameter.nbytes
    return [load_of(session, inside, nbytes) for inside, nbytes in buckets]
