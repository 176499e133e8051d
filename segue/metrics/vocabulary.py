"""The closed sets of label values: roles, their states, and every reason, cause, phase and stage that is counted.

A label value is never an episode, request, prompt, pid or step. States named `wait_…` are idle; all others are work.
"""

from __future__ import annotations

from segue.episode import DropReason, FailureClass, Outcome, State

ROLES = ("scheduler", "rollout", "envpool", "learner", "weightsync")

OTHER = "other"
"""The state of every role in which none of the named ones holds; it should stay below 5 % of the time."""

STATES: dict[str, tuple[str, ...]] = {
    "scheduler": ("dispatch", "wait_capacity", "wait_prompts", OTHER),
    "rollout": ("wait_weights", "generate", "wait_env", "wait_admission", OTHER),
    "envpool": ("step", "reset", "respawn", "wait_action", OTHER),
    "learner": ("wait_batch", "compute", "optimizer", "wait_publish", "checkpoint", OTHER),
    "weightsync": ("stage", "transfer", "load", "wait_version", OTHER),
}

STATE_MEANINGS: dict[str, dict[str, str]] = {
    "scheduler": {
        "dispatch": "handles messages and timers",
        "wait_capacity": "nothing to do: groups may not begin yet (ages, queue, episodes at once), or all nodes are at work",
        "wait_prompts": "nothing to do: groups could begin, but the task stream has no task ready",
    },
    "rollout": {
        "wait_weights": "paused for an update, or before the first weights",
        "generate": "the engine prefills or decodes",
        "wait_env": "every episode waits for its environment",
        "wait_admission": "no episode to work on",
    },
    "envpool": {
        "step": "runs an environment's step",
        "reset": "makes an environment and resets or restores it",
        "respawn": "the slot's worker process starts, at the beginning of a run too",
        "wait_action": "waits for an action, or holds no environment",
    },
    "learner": {
        "wait_batch": "waits for a batch",
        "compute": "forward and backward passes",
        "optimizer": "clips gradients and steps the optimizer",
        "wait_publish": "copies weights aside for the broadcast",
        "checkpoint": "writes a checkpoint",
    },
    "weightsync": {
        "stage": "receives weights while the engine generates",
        "transfer": "a transfer runs: waits for its receivers, then sends weights",
        "load": "puts them into the paused engine",
        "wait_version": "no transfer runs",
    },
}
"""What each named state means; `OTHER` is what is none of them."""

ROLLOUT_PRECEDENCE = ("wait_weights", "generate", "wait_env", "wait_admission")
"""A rollout node runs many episodes at once: its state is the first of these that any of them is in."""


def is_idle(state: str) -> bool:
    """Whether time spent in `state` is waiting, in any role."""
    return state.startswith("wait_")


EPISODE_STATES = tuple(str(state) for state in State)
OUTCOMES = tuple(str(outcome) for outcome in Outcome)
DROP_REASONS = tuple(str(reason) for reason in DropReason)
FAILURE_CLASSES = tuple(str(failure) for failure in FailureClass)

DROP_STAGES = ("rollout", "queue")
"""Where a dropped episode was: `rollout` never finished, `queue` finished and was never trained."""

PAUSE_REASONS = ("update", "slice", "migration")
MIGRATION_REASONS = ("node_lost", "fenced", "failed", "parked")
FENCE_REASONS = ("silent", "update_deadline", "load_failed", "replaced")
REFUSAL_REASONS = ("stale_attempt", "stale_session", "duplicate", "gap", "unexpected", "corrupt")

NECESSARY_PREFILL = ("first", "turn", "block")
REPEATED_PREFILL = ("weight_update", "migration", "preemption", "eviction")
PREFILL_CAUSES = NECESSARY_PREFILL + REPEATED_PREFILL

QUEUES: dict[str, tuple[str, ...]] = {
    "scheduler": ("pending", "ready", "batches"),
    "rollout": ("engine", "outbox"),
    "envpool": ("requests",),
    "learner": ("prefetch",),
}
"""scheduler: episodes waiting for a lease, finished groups waiting for a batch, batches not yet committed. rollout: requests
waiting for an engine slot, events waiting for an exchange. envpool: calls waiting for a worker. learner: batches to train."""

TIMED_QUEUES: dict[str, tuple[str, ...]] = {"scheduler": ("ready",), "envpool": ("requests",)}
"""Those whose items' waits are observed."""

UPDATE_INFLIGHT = ("recompute", "keep", "turn", "episode")
COALESCE_REASONS = ("reprefill", "busy")
"""Why a version never went to the nodes before the next one came: held back by `update.policy = "budget"`, or another update
ran."""

SYNC_PHASES = ("gather", "transfer", "stage", "drain", "pause", "load", "probe", "resume")
LEARNER_PHASES = (
    "wait_batch",
    "prepare",
    "proximal",
    "forward_backward",
    "forward",
    "backward",
    "optimizer",
    "report",
    "publish",
    "checkpoint",
)
"""`forward` and `backward` are parts of `forward_backward` (the rest of it: losses, and what diagnostics need). `report`: the
step is told to the scheduler, which acknowledges it, and a sampled trajectory is written."""
ENGINE_PHASES = ("prefill", "forward", "sample", "book", "hand_over", "load", "score")
"""Of the embedded engine. `prefill`: contexts are computed. A decode step is `forward`, `sample` and `book` (on the event loop:
who decodes, noise, tokens to their requests). `hand_over`: thread and event loop wait for each other, at each step and prefill.
`load`, `score`: inside an update's pause."""
MASK_REASONS = ("age",)
ENV_FAILURE_REASONS = ("error", "timeout", "worker_died", "worker_killed", "restore", "seed", "capacity", "unknown", "refused")
"""Groups of the pool's own finer reasons (`envpool.commands.Reason`), which its status has one by one."""
ENV_KILL_REASONS = ("start_timeout", "create_timeout", "reset_timeout", "step_timeout", "close_timeout", "lost")
"""Why an env pool killed a worker; `lost` makes sure of one that died of itself."""
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
RESTART_REASONS = ("died", "silent", "engine", "host_lost")
"""Why a process was started in the place of one before it. `silent`: it did not answer for `cluster.silence_seconds`;
`engine`: the inference engine in it failed; `host_lost`: Ray had given up its host; `died`: else."""
RPC_FAILURES = ("timeout", "lost", "error")
DISCARD_REASONS = ("fenced", "dropped", "failed", "stopped", "unread")
