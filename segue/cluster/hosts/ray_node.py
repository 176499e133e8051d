"""What `segue join` puts between itself and Ray's node process: both end with it, in whatever way it ends.

consumes       the pid of `segue join`, its folder, the command that runs Ray's node process
produces       that process, and its exit code
waits for      the end of either of the two processes
unblocked by   that end
on cancel      with `segue join` (also by SIGKILL) all that runs below here ends, by pid, and the folder goes

Ray's processes see to their own ends in part only, and cannot be told to end with somebody: they are not ours.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from segue.cluster.processes import end_with_parent


def beside(parent: int, folder: Path, command: Sequence[str]) -> list[str]:
    """The command that runs `command` for as long as the process `parent`, its parent, does; `folder` goes with that."""
    return [sys.executable, "-m", "segue.cluster.hosts.ray_node", str(parent), str(folder), *command]


def main() -> int:
    parent, folder, *command = sys.argv[1:]
    end_with_parent(int(parent), lambda: shutil.rmtree(folder, ignore_errors=True))
    code = subprocess.Popen(command).wait()
    while os.getppid() != int(parent):  # that was why it ended; the thread that sees to the rest ends this process
        signal.pause()
    if code < 0:  # end as it did: its parent says how
        with contextlib.suppress(OSError):
            os.kill(os.getpid(), -code)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
