"""One command on every host, watched as one: the first host to fail ends it everywhere."""

import codecs
import math
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import IO, Any, Final, NamedTuple, Self, final

from cgx.errors import CgxError
from cgx.testbed.tether import Tethered

_POLL_SECONDS: Final = 0.05
# When one rank dies, its peers die of that; waiting a little shows them all in one message.
_COMPANY_SECONDS: Final = 1.5
_TAIL_LINES: Final = 40


class JobFailedError(CgxError):
    """A command failed on some host, or took too long; the message has what each said last."""


class Line(NamedTuple):
    """One line of standard output, without its end."""

    host: int
    text: str


@final
class Job:
    """A command running on every host.

    Standard output comes through `lines` or `wait`, one of which must be called for the commands
    to get on; standard error is kept for `stderr` and for the message of a failure. As a context
    manager it stops what still runs.

    Args:
        popen: Starts a command on a host: `Hosts.popen`.
        argvs: The command of each host, in order.
        env: The whole environment of the commands.

    Attributes:
        processes: The command of each host.
    """

    def __init__(
        self,
        popen: Callable[..., Tethered],
        argvs: Sequence[Sequence[str]],
        *,
        env: dict[str, str],
    ) -> None:
        self.processes: list[Tethered] = []
        self._errors: list[IO[bytes]] = []
        self._said: list[str] | None = None
        try:
            for host, argv in enumerate(argvs):
                self._errors.append(tempfile.TemporaryFile())  # noqa: SIM115
                options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": self._errors[-1]}
                self.processes.append(popen(host, argv, env=env, **options))
        except BaseException:
            self.stop()
            raise

    def lines(self, timeout_seconds: float | None = None) -> Iterator[Line]:
        """Yields what the hosts print, as it comes, until all have ended.

        Args:
            timeout_seconds: Longest time for the whole job, from this call on; None is no limit.

        Raises:
            JobFailedError: A host's command ended with an exit code other than 0 (128 + n for
                signal n), or the time is over. All hosts are stopped by then, and everything that
                they printed has been yielded.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with selectors.DefaultSelector() as selector:
            for host, process in enumerate(self.processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, _Splitter(host))
            try:
                yield from self._watch(selector, deadline)
            except GeneratorExit:  # the reader has seen enough; the job goes on
                raise
            except BaseException:
                self.stop()
                raise
        self.stop()

    def wait(self, timeout_seconds: float | None = None) -> list[str]:
        """Waits until all hosts have ended.

        Args:
            timeout_seconds: As for `lines`.

        Returns:
            The standard output of each host.

        Raises:
            JobFailedError: As for `lines`.
        """
        texts: list[list[str]] = [[] for _ in self.processes]
        for host, text in self.lines(timeout_seconds):
            texts[host].append(f"{text}\n")
        return ["".join(text) for text in texts]

    def stderr(self, host: int) -> str:
        """What the command of a host has written to standard error so far."""
        if self._said is not None:
            return self._said[host]
        # The command shares the file's position, so the file is read without moving it.
        descriptor = self._errors[host].fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def stop(self) -> None:
        """Ends the command on every host, and waits until everything it started is gone."""
        self._end()
        if self._said is None:
            self._said = [self.stderr(host) for host in range(len(self._errors))]
        for process in self.processes:
            if process.stdout is not None:
                process.stdout.close()
        for file in self._errors:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _end(self) -> None:
        for process in self.processes:
            process.release()
        for process in self.processes:
            process.end()

    def _watch(self, selector: selectors.BaseSelector, deadline: float | None) -> Iterator[Line]:
        """Yields lines until all have ended; after a failure ends and drains them, then raises."""
        failed_at = math.inf
        reason = ""
        while True:
            events = selector.select(_POLL_SECONDS)
            for key, _ in events:
                part = os.read(key.fd, 1 << 16)
                if not part:
                    selector.unregister(key.fileobj)
                yield from key.data.feed(part)
            now = time.monotonic()
            codes = [process.poll() for process in self.processes]
            if None not in codes:
                if not events:
                    break
                continue
            if any(codes):
                failed_at = min(failed_at, now)
            if now > failed_at + _COMPANY_SECONDS:
                reason = self._describe_failures()
                self._end()
            elif deadline is not None and now > deadline:
                reason = self._describe_overtime()
                self._end()
        reason = reason or self._describe_failures()
        if reason:
            raise JobFailedError(reason)

    def _describe_failures(self) -> str:
        codes = {host: process.poll() for host, process in enumerate(self.processes)}
        return "\n".join(
            f"The command on host {host} of {len(codes)} ended with exit code {code}, so the job "
            f"was stopped on all hosts. It said last:\n{self._tail(host)}"
            for host, code in codes.items()
            if code
        )

    def _describe_overtime(self) -> str:
        return "\n".join(
            f"The command on host {host} of {len(self.processes)} was still running at the end of "
            f"its time, so the job was stopped on all hosts. It said last:\n{self._tail(host)}"
            for host, process in enumerate(self.processes)
            if process.poll() is None
        )

    def _tail(self, host: int) -> str:
        lines = self.stderr(host).splitlines()[-_TAIL_LINES:]
        return "\n".join(f"    {line}" for line in lines) or "    (nothing)"


class _Splitter:
    """Cuts the bytes of one host into lines."""

    def __init__(self, host: int) -> None:
        self._host = host
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._rest = ""

    def feed(self, part: bytes) -> Iterator[Line]:
        """Yields the lines that `part` completes; an empty part is the end."""
        *lines, self._rest = (self._rest + self._decode(part, not part)).split("\n")
        if not part and self._rest:
            lines.append(self._rest)
        for line in lines:
            yield Line(self._host, line.removesuffix("\r"))
