"""Every metric of Segue, as data. No other module names a metric of its own; dashboards, rules and docs come from here.

Conventions (docs/metrics.md): prefix `segue_`, base units in the name, counters end in `_total`, moments are
`_timestamp_seconds`, closed label values, alert limits are bucket edges, depth and capacity are two metrics.
"""

from __future__ import annotations

from segue.metrics import vocabulary as words
from segue.metrics.metric import Label, Metric
from segue.metrics.metric import counter as _counter
from segue.metrics.metric import gauge as _gauge
from segue.metrics.metric import histogram as _histogram
from segue.metrics.metric import read as _read

ALL = words.ROLES
ASYNCIO = ("scheduler", "rollout", "envpool", "learner")

ENV = Label("env", None)
UUID = Label("UUID", None)
ON_GPU = ("learner", "rollout")
STATE = Label("state", words.STATES)
QUEUE = Label("queue", words.QUEUES)
QUEUE_OWNERS = tuple(words.QUEUES)
TIMED = Label("queue", words.TIMED_QUEUES)
FAILURE = Label("class", words.FAILURE_CLASSES)

SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
CALL_SECONDS = (*SHORT_SECONDS, 30.0, 60.0, 120.0, 300.0, 600.0)
LONG_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0)
AGES = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)
SPREADS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)


_PROCESS = (
    _gauge(
        "segue_build_info",
        "",
        ALL,
        "Always 1; its labels say what is running.",
        Label("version", None),
        Label("git_sha", None),
        Label("attempt", None),
    ),
    _counter(
        "segue_worker_state_seconds_total",
        "seconds",
        ALL,
        "Time spent in each state; sums to elapsed time (envpool: elapsed time times slots). States named wait_ are idle.",
        STATE,
    ),
    _counter(
        "segue_worker_elapsed_seconds_total",
        "seconds",
        ALL,
        "Time since the state clock began, by another clock and read with it: the states' seconds sum to it (times slots).",
    ),
    _gauge(
        "segue_worker_state", "", ALL, "One for the state the process is in now, else 0 (envpool: slots in each state).", STATE
    ),
    _gauge(
        "segue_worker_heartbeat_timestamp_seconds", "seconds", ALL, "Wall clock of the last sign of life; 0 before the first."
    ),
    _histogram("segue_event_loop_lag_seconds", "seconds", ASYNCIO, SHORT_SECONDS, "How late a timer of the event loop ran."),
    _gauge("segue_gpu_assignment_info", "", ON_GPU, "Always 1; says which process owns a GPU.", UUID),
    _read(
        "segue_gpu_utilization_ratio",
        "gauge",
        "ratio",
        ON_GPU,
        "Share of the driver's last sample period in which a kernel ran, by NVML; near 1 also while one only waits for others.",
        UUID,
    ),
    _read("segue_gpu_memory_used_bytes", "gauge", "bytes", ON_GPU, "Memory of the GPU in use, by any process, by NVML.", UUID),
    _read("segue_gpu_memory_size_bytes", "gauge", "bytes", ON_GPU, "Memory of the GPU, by NVML.", UUID),
    _read(
        "segue_process_cpu_seconds_total",
        "counter",
        "seconds",
        ASYNCIO,
        "CPU seconds of this process, user and system; its children's are not among them.",
    ),
    _read("segue_process_resident_memory_bytes", "gauge", "bytes", ASYNCIO, "Resident memory of this process."),
    _read(
        "segue_process_starts",
        "gauge",
        "starts",
        ASYNCIO,
        "Which start of this process in this attempt of the run it is: 1, and one more for each death before it.",
    ),
    _read(
        "segue_process_restarts_total",
        "counter",
        "starts",
        ASYNCIO,
        "Starts of this process after the first, by what took the one before it; kept from process to process.",
        Label("reason", words.RESTART_REASONS),
    ),
    _counter(
        "segue_metric_writes_total",
        "writes",
        ALL,
        "Values written to this process's metrics, and changes of its state clock: what measuring costs, counted.",
    ),
    _counter(
        "segue_scrape_cpu_seconds_total", "seconds", ALL, "CPU seconds that answering scrapes took, by its threads' own clocks."
    ),
    _counter("segue_log_messages_total", "messages", ALL, "Log records written, by level.", Label("level", words.LOG_LEVELS)),
    _counter(
        "segue_messages_received_total", "messages", ASYNCIO, "Calls that arrived from other processes, repetitions included."
    ),
    _counter(
        "segue_messages_refused_total",
        "messages",
        ASYNCIO,
        "Messages or parts of them that were refused: of an old attempt or session, repeated, out of order, unexpected, corrupt.",
        Label("reason", words.REFUSAL_REASONS),
    ),
    _counter(
        "segue_rpc_failures_total",
        "calls",
        ASYNCIO,
        "Calls to other processes that brought no answer in time, no answer at all, or an error.",
        Label("reason", words.RPC_FAILURES),
    ),
)

_QUEUES = (
    _gauge("segue_queue_depth", "items", QUEUE_OWNERS, "Items in a queue now.", QUEUE),
    _gauge("segue_queue_capacity", "items", ("scheduler",), "Items a queue may hold; 0 where it is not bounded in items.", QUEUE),
    _gauge("segue_queue_bytes", "bytes", ("scheduler",), "Bytes a queue holds in memory.", QUEUE),
    _histogram(
        "segue_queue_wait_seconds", "seconds", tuple(words.TIMED_QUEUES), LONG_SECONDS, "Time an item spent in a queue.", TIMED
    ),
    _counter("segue_queue_spilled_bytes_total", "bytes", ("scheduler",), "Bytes of the trajectory queue written to disk."),
)

_EPISODES = (
    _counter("segue_episodes_admitted_total", "episodes", ("scheduler",), "Training episodes admitted.", ENV),
    _gauge("segue_episodes_in_flight", "episodes", ("scheduler",), "Training episodes under a lease now.", ENV),
    _gauge(
        "segue_episodes_state",
        "episodes",
        ("scheduler",),
        "Training episodes in each state; the sum is what was admitted.",
        Label("state", words.EPISODE_STATES),
    ),
    _counter(
        "segue_episodes_finished_total",
        "episodes",
        ("scheduler",),
        "Training episodes that came to an end of their own, by outcome.",
        ENV,
        Label("outcome", words.OUTCOMES),
    ),
    _counter(
        "segue_episodes_dropped_total",
        "episodes",
        ("scheduler",),
        "Training episodes dropped, by reason; stage rollout: never finished, queue: finished and never trained.",
        Label("reason", words.DROP_REASONS),
        Label("stage", words.DROP_STAGES),
    ),
    _counter(
        "segue_dropped_tokens_total",
        "tokens",
        ("scheduler",),
        "Sampled tokens in the logs of dropped training episodes, by reason.",
        Label("reason", words.DROP_REASONS),
    ),
    _counter(
        "segue_episodes_failed_total", "episodes", ("scheduler",), "Training episodes given up after their retries.", FAILURE
    ),
    _counter("segue_episode_retries_total", "attempts", ("scheduler",), "Further attempts granted after a failure.", FAILURE),
    _counter("segue_episodes_trained_total", "episodes", ("scheduler",), "Episodes whose batch the learner acknowledged."),
    _counter(
        "segue_episodes_paused_total",
        "episodes",
        ("scheduler",),
        "Requests that ended before their turn did.",
        Label("reason", words.PAUSE_REASONS),
    ),
    _counter("segue_episodes_resumed_total", "episodes", ("scheduler",), "Paused requests that went on."),
    _counter(
        "segue_episodes_migrated_total",
        "episodes",
        ("scheduler",),
        "Episodes that went on at another node, by why they left.",
        Label("reason", words.MIGRATION_REASONS),
    ),
    _histogram("segue_episode_duration_seconds", "seconds", ("scheduler",), LONG_SECONDS, "Wall time of finished episodes.", ENV),
    _histogram(
        "segue_group_completion_cv",
        "",
        ("scheduler",),
        SPREADS,
        "Coefficient of variation of the durations inside a group: its stragglers.",
        ENV,
    ),
    _counter("segue_groups_finished_total", "groups", ("scheduler",), "Groups whose members all ended.", ENV),
    _counter("segue_groups_zero_variance_total", "groups", ("scheduler",), "Finished groups whose rewards are all equal.", ENV),
    _counter(
        "segue_eval_episodes_total",
        "episodes",
        ("scheduler",),
        "Evaluation episodes, by how they ended; they are in no other count.",
        Label("result", ("finished", "failed")),
    ),
    _counter(
        "segue_lease_expiries_total", "leases", ("scheduler",), "Leases that ended because nothing was heard of their node."
    ),
    _counter(
        "segue_nodes_fenced_total",
        "nodes",
        ("scheduler",),
        "Sessions of rollout nodes that were ended, by why.",
        Label("reason", words.FENCE_REASONS),
    ),
    _counter("segue_tasks_quarantined_total", "tasks", ("scheduler",), "Tasks set aside because they kept failing.", ENV),
    _counter("segue_journal_records_total", "records", ("scheduler",), "Records appended to the journal."),
)

_ROLLOUT = (
    _counter(
        "segue_prefill_tokens_total",
        "tokens",
        ("rollout",),
        "Context tokens computed, by cause; weight_update, migration, preemption and eviction are repeats.",
        Label("cause", words.PREFILL_CAUSES),
    ),
    _counter(
        "segue_prefill_seconds_total",
        "seconds",
        ("rollout",),
        "Engine seconds that these tokens took, at the node's measured prefill speed; sums to the engine's prefill seconds.",
        Label("cause", words.PREFILL_CAUSES),
    ),
    _counter("segue_engine_prefill_tokens_total", "tokens", ("rollout",), "Context tokens computed, as the engine counts them."),
    _counter("segue_cached_tokens_total", "tokens", ("rollout",), "Context tokens found in the KV cache."),
    _counter("segue_decode_tokens_total", "tokens", ("rollout",), "Tokens sampled."),
    _counter(
        "segue_discarded_tokens_total",
        "tokens",
        ("rollout",),
        "Sampled tokens thrown away before the scheduler accepted them.",
        Label("reason", words.DISCARD_REASONS),
    ),
    _counter(
        "segue_engine_preemptions_total",
        "requests",
        ("rollout",),
        "Requests that lost their slot to others and were filled again.",
    ),
    _counter("segue_engine_evictions_total", "sequences", ("rollout",), "Cached contexts that were dropped to make room."),
    _counter(
        "segue_engine_seconds_total",
        "seconds",
        ("rollout",),
        "What the embedded engine's time went into; 0 with other engines. A decode step: forward + sample + book + hand_over.",
        Label("phase", words.ENGINE_PHASES),
    ),
    _histogram(
        "segue_exchange_seconds", "seconds", ("rollout",), CALL_SECONDS, "Exchanges with the scheduler, from sending to reply."
    ),
    _gauge("segue_requests_running", "requests", ("rollout",), "Requests in an engine slot now."),
    _gauge("segue_episodes_running", "episodes", ("rollout",), "Episode loops of this node, those waiting included."),
    _histogram(
        "segue_turn_generate_seconds",
        "seconds",
        ("rollout",),
        CALL_SECONDS,
        "Time to sample one action: its requests to the engine from submission to last token, waits for a slot included.",
    ),
    _histogram(
        "segue_rollout_pause_seconds",
        "seconds",
        ("rollout",),
        CALL_SECONDS,
        "Time the engine generated nothing because it was paused.",
        Label("reason", ("update",)),
    ),
    _counter(
        "segue_leases_lost_total",
        "leases",
        ("rollout",),
        "Leases this node gave up because its own clock ended them or it was fenced.",
    ),
)

_ENVPOOL = (
    _histogram("segue_env_step_seconds", "seconds", ("envpool",), CALL_SECONDS, "Latency of environment steps.", ENV),
    _histogram("segue_env_reset_seconds", "seconds", ("envpool",), CALL_SECONDS, "Latency of create and reset, or restore.", ENV),
    _counter(
        "segue_env_timeouts_total",
        "calls",
        ("envpool",),
        "Calls whose deadline passed; their worker was killed.",
        ENV,
    ),
    _counter("segue_env_crashes_total", "workers", ("envpool",), "Workers that died of themselves.", ENV),
    _counter("segue_env_respawns_total", "workers", ("envpool",), "Workers started in place of dead ones.", ENV),
    _counter("segue_env_failures_total", "calls", ("envpool",), "Calls answered with a failure, by class.", ENV, FAILURE),
    _counter(
        "segue_env_failure_reasons_total",
        "calls",
        ("envpool",),
        "The same failures, by reason.",
        ENV,
        Label("reason", words.ENV_FAILURE_REASONS),
    ),
    _counter(
        "segue_env_kills_total",
        "workers",
        ("envpool",),
        "Workers killed by the pool, by the deadline that passed; lost: they had died already.",
        ENV,
        Label("reason", words.ENV_KILL_REASONS),
    ),
)

_LEARNER = (
    _histogram(
        "segue_learner_step_seconds",
        "seconds",
        ("learner",),
        CALL_SECONDS,
        "Duration of each phase of a learner step.",
        Label("phase", words.LEARNER_PHASES),
    ),
    _counter("segue_learner_steps_total", "steps", ("learner",), "Batches trained."),
    _counter("segue_trained_tokens_total", "tokens", ("learner",), "Sampled tokens that carried a gradient."),
    _counter(
        "segue_masked_tokens_total",
        "tokens",
        ("learner",),
        "Sampled tokens kept out of the loss.",
        Label("reason", words.MASK_REASONS),
    ),
    _histogram("segue_token_staleness_versions", "versions", ("learner",), AGES, "Age in steps of every trained token."),
    _gauge("segue_staleness_bound_versions", "versions", ("learner",), "The configured staleness.max_age."),
    _gauge("segue_ess_ratio", "ratio", ("learner",), "Effective sample size over tokens, from unclamped weights."),
    _gauge("segue_clipped_tokens_ratio", "ratio", ("learner",), "Share of tokens whose ratio was clipped."),
    _gauge("segue_kept_tokens_ratio", "ratio", ("learner",), "Share of sampled tokens that survived the masks."),
    _gauge("segue_logprob_gap_abs_mean_nats", "nats", ("learner",), "Mean |learner − engine| log-probability at equal version."),
    _gauge(
        "segue_logprob_gap_abs_max_nats", "nats", ("learner",), "Largest |learner − engine| log-probability at equal version."
    ),
    _gauge("segue_entropy_nats", "nats", ("learner",), "Mean entropy of the policy at sampled tokens."),
    _gauge("segue_grad_norm", "", ("learner",), "Global gradient norm before clipping."),
    _gauge("segue_reward_mean", "reward", ("learner",), "Mean episode return of the last batch.", ENV),
    _gauge("segue_reward_std", "reward", ("learner",), "Mean over groups of the standard deviation of returns.", ENV),
)

_WEIGHTS = (
    _counter(
        "segue_weight_updates_total",
        "updates",
        ("scheduler",),
        "Weight updates of nodes that had weights, by how requests in flight crossed; first loads are not among them.",
        Label("inflight", words.UPDATE_INFLIGHT),
    ),
    _counter(
        "segue_weight_updates_coalesced_total",
        "updates",
        ("scheduler",),
        "Published versions that never went to the nodes, because the next one took their place.",
        Label("reason", words.COALESCE_REASONS),
    ),
    _gauge(
        "segue_reprefill_share_ratio",
        "ratio",
        ("scheduler",),
        "Share of the nodes' time over update.reprefill_window that went into contexts whose KV weight updates had dropped.",
    ),
    _histogram(
        "segue_weight_sync_seconds",
        "seconds",
        ("weightsync",),
        CALL_SECONDS,
        "Duration of each phase of an update; sender: gather, transfer; receiver: stage, drain, pause (load + probe + resume).",
        Label("phase", words.SYNC_PHASES),
    ),
    _gauge(
        "segue_weight_sync_started_timestamp_seconds",
        "seconds",
        ("weightsync",),
        "Wall clock when the running transfer began; 0 when none runs.",
    ),
    _counter("segue_weight_sync_bytes_total", "bytes", ("weightsync",), "Bytes of weights sent or received."),
    _counter(
        "segue_weight_sync_failures_total",
        "transfers",
        ("weightsync",),
        "Transfers and loads that did not complete, by where they stopped; probe: the engine did not run what was published.",
        Label("phase", words.SYNC_PHASES),
    ),
    _gauge(
        "segue_weight_probe_gap_nats",
        "nats",
        ("rollout",),
        "Largest |learner − engine| log-probability of the probe after the last load; 0 before the first.",
    ),
    _gauge("segue_weight_probe_gap_max_nats", "nats", ("rollout",), "The largest of these since the process started."),
    _gauge("segue_policy_version", "versions", ("learner", "rollout"), "Newest version published (learner) or loaded (rollout)."),
    _gauge(
        "segue_policy_update_timestamp_seconds",
        "seconds",
        ("learner", "rollout"),
        "Wall clock of the last publish (learner) or load (rollout); 0 before the first.",
    ),
)

CATALOGUE: dict[str, Metric] = {
    metric.name: metric for metric in (*_PROCESS, *_QUEUES, *_EPISODES, *_ROLLOUT, *_ENVPOOL, *_LEARNER, *_WEIGHTS)
}


def exported_by(role: str) -> tuple[Metric, ...]:
    """The metrics of one role, in the catalogue's order."""
    assert role in words.ROLES, role
    return tuple(metric for metric in CATALOGUE.values() if role in metric.roles)
