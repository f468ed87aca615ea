"""The whole exception tree on one screen: a message says what was asked, what was found, why it matters, what to do."""

from __future__ import annotations


class CgxError(Exception):
    """Root of everything cgx raises on purpose."""


class SpecError(CgxError, ValueError):
    """A spec, a plan, a tensor or an option that cgx cannot use; raised before any byte moves."""


class PlanMismatchError(CgxError):
    """Ranks disagree about what to reduce or how; raised on every rank before the first compressed byte."""


class WireError(CgxError):
    """A payload that is not what this rank expects: truncated, oversized, foreign or from another reduction."""


class TransportError(CgxError):
    """Moving bytes failed. The session that raised it is broken and refuses further work."""


class PeerLostError(TransportError):
    """A peer closed its connection or died while this rank was waiting for it."""


class CollectiveTimeoutError(TransportError):
    """A peer stayed silent for longer than the group's timeout."""
