"""What a communication hook leaves to the end of the backward pass, where errors keep their class."""

from __future__ import annotations

from functools import partial

from cgx.errors import CgxError
from cgx.torch.compat import at_end_of_backward
from cgx.torch.session import Pending, Session


def settle_at_end(session: Session, pending: Pending) -> None:
    """Waits for a bucket before DDP does, which would neither count the time nor keep the class of an error."""
    at_end_of_backward(partial(_settle, session, pending))


def raise_at_end(error: CgxError) -> None:
    """Raises behind DDP's own end of the pass: cut short, it would fail in the next one."""
    at_end_of_backward(partial(at_end_of_backward, partial(_throw, error)))


def _settle(session: Session, pending: Pending) -> None:
    try:
        session.wait(pending)
    except CgxError as error:
        at_end_of_backward(partial(_throw, error))


def _throw(error: CgxError) -> None:
    raise error
