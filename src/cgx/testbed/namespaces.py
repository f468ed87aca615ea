"""Network namespaces that last exactly as long as this process wants them.

As root they are made directly. Anybody else first gets a user namespace, inside which they are
root; it belongs to the anchor, and everything else enters it.
"""

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final, final

from cgx.errors import CgxError
from cgx.testbed.tether import ALONE_IN_PID_NAMESPACE, Tethered

_TOOLS: Final = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "ip": "iproute2",
    "tc": "iproute2",
}
_TIMEOUT_SECONDS: Final = 20.0
_SAY_READY_AND_STAY: Final = "echo; exec cat"


class NamespacesRefusedError(CgxError):
    """This machine does not give what emulated hosts are made of; the message says what."""


@final
class Namespace:
    """A network namespace, kept by a tethered process; its loopback interface is up.

    Args:
        anchor: The namespace whose user namespace this one joins; None makes an anchor.

    Raises:
        NamespacesRefusedError: The system is not Linux, a tool is missing, or the kernel says no.

    Attributes:
        pid: The process that keeps it; `/proc/<pid>/ns/net` is the namespace.
    """

    def __init__(self, anchor: "Namespace | None" = None) -> None:
        self._tools: dict[str, str] = _find_tools() if anchor is None else anchor._tools
        self._enter_user: list[str] = []
        make_user: list[str] = []
        if anchor is not None:
            self._enter_user = anchor._enter_user
        elif os.geteuid() != 0:
            make_user = ["--user", "--map-root-user"]
        # The PID namespace is of no use here, but every `popen` needs one: a refusal shows at once.
        self._keeper = Tethered(
            [
                *(anchor._enter(net=False) if anchor is not None else []),
                *(self._tools["unshare"], *make_user, "--net", "--pid", "--fork", "--kill-child"),
                *("sh", "-c", _SAY_READY_AND_STAY),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.pid = self._keeper.pid
        if make_user:
            self._enter_user = [f"--user=/proc/{self.pid}/ns/user", "--preserve-credentials"]
        try:
            self._await_ready()
            self.run("ip", "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise

    def run(self, tool: str, *arguments: str, script: str = "") -> None:
        """Runs `ip` or `tc` inside and waits for it.

        Args:
            tool: ``ip`` or ``tc``.
            arguments: Its arguments.
            script: Its standard input, for ``-batch -``.

        Raises:
            NamespacesRefusedError: It fails; the message has what it said.
        """
        try:
            subprocess.run(
                [*self._enter(), self._tools[tool], *arguments],
                input=script,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_SECONDS,
                check=True,
            )
        except subprocess.SubprocessError as error:
            said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
            raise NamespacesRefusedError(
                f"`{tool} {' '.join(arguments)}` failed inside a network namespace: "
                f"{said.strip() or error}. The kernel may lack the module (veth, bridge, "
                "sch_tbf), or a security policy may withhold the right."
            ) from error

    def popen(self, argv: Sequence[str], **options: Any) -> Tethered:
        """Starts a command inside; nothing it starts survives it, or this process."""
        alone = [self._tools["unshare"], "--pid", "--fork", "--kill-child"]
        shell = ["sh", "-c", ALONE_IN_PID_NAMESPACE, "sh"]
        return Tethered([*self._enter(), *alone, *shell, *argv], **options)

    def close(self) -> None:
        """Ends the keeper; the kernel removes the namespace once nothing else runs in it."""
        self._keeper.end()
        for stream in (self._keeper.stdout, self._keeper.stderr):
            if stream is not None:
                stream.close()

    def _enter(self, *, net: bool = True) -> list[str]:
        into_net = [f"--net=/proc/{self.pid}/ns/net"] if net else []
        return [self._tools["nsenter"], *self._enter_user, *into_net, "--"]

    def _await_ready(self) -> None:
        out, err = self._keeper.stdout, self._keeper.stderr
        assert out is not None
        assert err is not None
        ready, _, _ = select.select([out], [], [], _TIMEOUT_SECONDS)
        if ready and out.readline():
            return
        self._keeper.end()
        said = err.read().decode(errors="replace").strip() or "it did not answer"
        raise NamespacesRefusedError(
            f"The kernel gives no network namespace ({said}). Root always may make one, unless a "
            "container withholds CAP_SYS_ADMIN; other users may where user namespaces are allowed "
            "(sysctl user.max_user_namespaces, user.max_net_namespaces, "
            "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)."
        )


def _find_tools() -> dict[str, str]:
    if sys.platform != "linux":
        raise NamespacesRefusedError(
            f"Emulated hosts need the network namespaces of Linux; this system is {sys.platform}."
        )
    # Ordinary users often lack the directories of the administrator in their PATH.
    path = os.pathsep.join([*os.get_exec_path(), "/usr/sbin", "/sbin"])
    found = {tool: shutil.which(tool, path=path) for tool in _TOOLS}
    missing = [tool for tool, place in found.items() if place is None]
    if missing:
        packages = sorted({_TOOLS[tool] for tool in missing})
        raise NamespacesRefusedError(
            f"Emulated hosts need {' and '.join(f'`{tool}`' for tool in missing)}, which this "
            f"machine lacks: install the package {' and '.join(packages)}."
        )
    return {tool: place for tool, place in found.items() if place is not None}
