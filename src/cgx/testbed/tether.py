"""Processes that cannot outlive the one that started them.

The standard input of a tethered process is a pipe whose other end only its starter holds. When the
starter lets go, or dies, even of SIGKILL, the kernel closes that end; the process sees the end of
the file and leaves. There is no clean-up code that could be skipped.
"""

import os
import subprocess
import weakref
from collections.abc import Sequence
from typing import Any, Final

# The shells below run the command in "$@". It gets no standard input: file 3 is the tether.
# A shell that waits for its command, rather than becoming it, also lets the command be killed by
# any signal; process 1 of a PID namespace would ignore most.
_PREPARE: Final = "exec 3<&0 </dev/null; "

# As process 1 of a PID namespace: its exit makes the kernel kill every process left in there.
ALONE_IN_PID_NAMESPACE: Final = _PREPARE + '{ cat <&3 >/dev/null; kill -KILL -1; } & "$@" 3<&-; exit $?'

# Without such a namespace the best there is: SIGTERM to the process group, which torchrun
# passes on to its ranks. The trap keeps the shell itself alive to report the exit code.
IN_PROCESS_GROUP: Final = (
    _PREPARE
    + "trap : TERM; { cat <&3 >/dev/null; kill -TERM 0; } & "
    + '"$@" 3<&-; status=$?; kill -TERM 0; exit $status'
)


class Tethered(subprocess.Popen[bytes]):
    """A `subprocess.Popen` in a session of its own, whose standard input is the tether.

    A session of its own keeps Ctrl-C for the starter, who then decides.

    A process forked (not spawned) from the starter holds the tether too, and must end as well.

    Args:
        argv: A command that leaves at the end of its standard input, such as `cat` or a shell with
            one of the scripts above.
        options: What `subprocess.Popen` takes, but for `stdin` and `start_new_session`.
    """

    def __init__(self, argv: Sequence[str], **options: Any) -> None:
        inner, outer = os.pipe()
        self._release = weakref.finalize(self, os.close, outer)
        try:
            super().__init__(argv, stdin=inner, start_new_session=True, **options)
        except BaseException:
            self._release()
            raise
        finally:
            os.close(inner)

    def release(self) -> None:
        """Lets go of the process, which then ends by itself; does not wait for it."""
        self._release()

    def end(self, *, grace_seconds: float = 10.0) -> int:
        """Lets go of the process and waits until it has ended.

        Returns:
            Its exit code.

        Cost:
            Milliseconds; at most `grace_seconds` for a process that had been stopped, which is
            then killed.
        """
        self.release()
        try:
            return self.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.wait()
