"""Whether the engine is paused, and which control calls still count: they carry epochs, and may come twice or too late. Pure."""

from __future__ import annotations

from segue.ports.engine import PauseMode


class Pauses:
    """`stale` counts pauses and resumes that came too late and were ignored."""

    def __init__(self) -> None:
        self.paused = False
        self.mode = PauseMode.ABORT
        self.stale = 0
        self._epoch = 0
        self._resumed = 0

    def counts(self, epoch: int) -> bool:
        """Whether a control of `epoch` is to be obeyed: none of a newer epoch has come, and it was not resumed."""
        if epoch < self._epoch or epoch <= self._resumed:
            self.stale += 1
            return False
        return True

    def pause(self, mode: PauseMode, epoch: int) -> bool:
        """Pause; a later epoch may turn FREEZE into ABORT. False for an epoch that has begun already."""
        if epoch <= self._epoch:
            return False
        self._epoch, self.mode, self.paused = epoch, mode, True
        return True

    def resume(self, epoch: int) -> None:
        self._epoch = self._resumed = epoch
        self.paused = False
