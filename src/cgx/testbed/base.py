"""What every set of hosts can do, however its links come about.

A set of hosts has addresses and an interface; it starts a command on one host, or one on each, and
nothing that it started outlives it. `measured` says whether its links are real ones at the stated
rate; where it is False, `refusal` says why, and a figure taken there is a modelled one at best.
"""

import abc
import os
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from cgx.core.env import CODEC_THREADS
from cgx.testbed.counters import Counters
from cgx.testbed.job import Job
from cgx.testbed.tether import Tethered


class HostSet(abc.ABC):
    """Hosts that run commands until the set is closed.

    Attributes:
        count: How many hosts there are.
        measured: Whether the links are real and run at the stated rate.
        refusal: Why they are not; None when they are.
        interface: The name of each host's network interface.
        addresses: The IPv4 address of each host on it.
    """

    count: int
    measured: bool
    refusal: str | None
    interface: str
    addresses: tuple[str, ...]

    @abc.abstractmethod
    def popen(self, host: int, argv: Sequence[str], **options: Any) -> Tethered:
        """Starts a command on a host.

        Args:
            host: Which one, from 0.
            argv: The command. It gets no standard input.
            options: What `subprocess.Popen` takes, but for `stdin` and `start_new_session`.

        Returns:
            The process; its exit code is 128 + n where signal n ended the command. `end` ends it
            and all that it started.
        """

    @abc.abstractmethod
    def counters(self, host: int) -> Counters:
        """The bytes a host's interface has moved."""

    @abc.abstractmethod
    def set_rate(self, host: int, bit_s: float | None) -> None:
        """Changes the rate of a host's link, both ways, while it is in use.

        Args:
            host: Which one, from 0.
            bit_s: Bits per second of whole frames; None takes the limit away.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Ends everything that runs on the hosts, and the hosts; a second call does nothing."""

    @abc.abstractmethod
    def free_port(self) -> int:
        """A TCP port that nothing listens on, on any host."""

    def start(self, argvs: Sequence[Sequence[str]], *, env: Mapping[str, str] | None = None) -> Job:
        """Starts one command on each host.

        Args:
            argvs: The command of each host, in order.
            env: Variables to set beside those of this process.
        """
        return Job(self.popen, argvs, env={**os.environ, **(env or {})})

    def torchrun(
        self,
        argv: Sequence[str],
        *,
        ranks_per_host: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> Job:
        """Starts a script under torchrun on each host, as one world.

        Ranks count up host by host. Gloo is told the interface, and the threads of the CPU are
        dealt out evenly, to the model (``OMP_NUM_THREADS``) and to the codec,
        unless these are set. Torchrun makes Python write at once, and the ranks of a host share its
        output: where there are several, each should write a line and its end with one
        ``sys.stdout.write``, as `print` may mix them.

        Args:
            argv: The script and its arguments; ``-m`` and a module do as well.
            ranks_per_host: Processes per host.
            env: Variables to set beside those of this process.

        Cost:
            Three to five seconds to start, most of it `import torch` in every process.
        """
        threads = max((os.cpu_count() or 1) // (self.count * ranks_per_host), 1)
        common = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={self.count}", f"--nproc-per-node={ranks_per_host}"),
            *(f"--master-addr={self.addresses[0]}", f"--master-port={self.free_port()}"),
            # Not a file: it keeps torchrun from making directories that a kill would leave behind.
            f"--log-dir={os.devnull}",
        ]
        return self.start(
            [[*common, f"--node-rank={host}", *argv] for host in range(self.count)],
            env={
                "OMP_NUM_THREADS": f"{threads}",
                CODEC_THREADS: f"{threads}",
                **os.environ,
                "GLOO_SOCKET_IFNAME": self.interface,
                **(env or {}),
            },
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
