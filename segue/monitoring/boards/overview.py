"""The overview: does the run learn, who waits for whom, what is lost, and the scheduler."""

from __future__ import annotations

from segue.monitoring.panels import Dashboard, Panel, Query, Row
from segue.monitoring.query import increase, over, quantile, rate, select, share

_FIRING = 'alertstate="firing", alertname=~"Segue.+"'

_LEARNING = Row(
    "Learning",
    (
        Panel(
            "Reward",
            "Mean episode return of the last batch, by environment.",
            "number",
            (Query(over("max", "segue_reward_mean", "env"), "{{run}} {{env}}"),),
        ),
        Panel(
            "Staleness of trained tokens",
            "Age in versions of the trained tokens (median and p99) against the configured bound. Read 1.97 as 2: quantiles "
            "interpolate between bucket edges.",
            "versions",
            (
                Query(quantile(0.5, "segue_token_staleness_versions"), "{{run}} p50"),
                Query(quantile(0.99, "segue_token_staleness_versions"), "{{run}} p99"),
                Query(select("run:segue_token_staleness_versions:p99_5m"), "{{run}} p99 over 5 minutes"),
                Query(over("max", "segue_staleness_bound_versions"), "{{run}} bound"),
            ),
        ),
        Panel(
            "Trained tokens per second",
            "Sampled tokens that carried a gradient.",
            "tokens/s",
            (Query(rate("segue_trained_tokens_total"), "{{run}}"),),
        ),
        Panel(
            "Learner steps",
            "Batches trained so far.",
            "count",
            (Query(over("max", "segue_learner_steps_total"), "{{run}}"),),
            "stat",
        ),
        Panel(
            "Firing alerts",
            "Alerts of monitoring/prometheus/alerts.yml that fire now; docs/runbook.md says what to do.",
            "count",
            (Query(f"{over('sum', 'ALERTS', 'alertname', where=_FIRING)} or vector(0)", "{{run}} {{alertname}}"),),
            "stat",
        ),
        Panel(
            "Targets down",
            "Processes that do not answer: they died, or their host cannot be reached. A clean end withdraws its target.",
            "count",
            (Query('count(up{job="segue", run=~"$run"} == 0) or vector(0)', "down"),),
            "stat",
        ),
    ),
)

_PUBLISHED = over("max", "segue_policy_version", where='role="learner"')
_LOADED = over("max", "segue_policy_version", "rank", where='role="rollout"')

_WAITING = Row(
    "Who waits for whom",
    (
        Panel(
            "Idle time by role",
            "Share of the time in states named wait_. High for rollout and low for the learner: give the learner more; the "
            "reverse: give rollout more.",
            "ratio",
            (Query(select("role:segue_idle:ratio_rate5m"), "{{run}} {{role}}"),),
        ),
        Panel(
            "Time outside all named states",
            "Above 5 % something is not accounted for.",
            "ratio",
            (Query(select("role:segue_other:ratio_rate5m"), "{{run}} {{role}}"),),
        ),
        Panel(
            "Time that the states account for",
            "Seconds in all states over elapsed time (times slots), by another clock: 1, or the state clock errs.",
            "ratio",
            (
                Query(
                    share(
                        rate("segue_worker_state_seconds_total", "role", "rank"),
                        f"{over('sum', 'segue_worker_state', 'role', 'rank')}\n"
                        f"* {rate('segue_worker_elapsed_seconds_total', 'role', 'rank')}",
                    ),
                    "{{run}} {{role}}-{{rank}}",
                ),
            ),
        ),
        Panel(
            "Scheduler's time by state",
            "dispatch: handles messages; wait_capacity: groups may not begin, or nodes are full; wait_prompts: no task is ready.",
            "ratio",
            (Query(rate("segue_worker_state_seconds_total", "state", where='role="scheduler"'), "{{run}} {{state}}"),),
            stack=True,
        ),
        Panel(
            "Policy lag",
            "Newest published version minus the version each rollout node has loaded.",
            "versions",
            (Query(f"{_PUBLISHED}\n- on (run) group_right ()\n{_LOADED}", "{{run}} rollout-{{rank}}"),),
        ),
        Panel(
            "GPUs: idle by the state clock",
            "Share of the time in which the process that owns a GPU waited: what utilisation cannot tell.",
            "ratio",
            (Query(select("gpu:segue_idle:ratio_rate5m"), "{{run}} {{role}}-{{rank}} {{UUID}}"),),
            gpu=True,
        ),
        Panel(
            "GPUs: work by the hardware",
            "Activity of the tensor cores (DCGM); where that is missing, utilisation, which is weaker: a rank that waits in a "
            "collective looks busy.",
            "ratio",
            (
                Query(select("role:segue_gpu_tensor_active:avg"), "{{run}} {{role}} tensor cores"),
                Query(select("role:segue_gpu_utilization:avg"), "{{run}} {{role}} utilisation"),
            ),
            gpu=True,
        ),
    ),
)

_EPISODES = Row(
    "Episodes",
    (
        Panel(
            "Episodes by state",
            "Training episodes; the sum is what was admitted.",
            "count",
            (Query(over("sum", "segue_episodes_state", "state"), "{{run}} {{state}}"),),
            stack=True,
        ),
        Panel(
            "Episodes admitted, finished and trained",
            "Per second; finished ones by outcome.",
            "per second",
            (
                Query(rate("segue_episodes_admitted_total", "env"), "{{run}} {{env}} admitted"),
                Query(rate("segue_episodes_finished_total", "env", "outcome"), "{{run}} {{env}} {{outcome}}"),
                Query(rate("segue_episodes_trained_total"), "{{run}} trained"),
            ),
        ),
        Panel(
            "Episodes dropped, by reason",
            "Episodes that never train, and the share that was dropped for its age over 5 minutes.",
            "per second",
            (
                Query(rate("segue_episodes_dropped_total", "reason", "stage"), "{{run}} {{reason}} ({{stage}})"),
                Query(select("run:segue_stale_drop:ratio_rate5m"), "{{run}} stale over admitted"),
            ),
        ),
        Panel(
            "Tokens of dropped episodes",
            "Sampled tokens that no batch will hold, by reason.",
            "tokens/s",
            (Query(rate("segue_dropped_tokens_total", "reason"), "{{run}} {{reason}}"),),
        ),
        Panel(
            "Duration of episodes",
            "Wall time of finished episodes: the long tail.",
            "seconds",
            (
                Query(quantile(0.5, "segue_episode_duration_seconds", "env"), "{{run}} {{env}} p50"),
                Query(quantile(0.95, "segue_episode_duration_seconds", "env"), "{{run}} {{env}} p95"),
                Query(quantile(0.99, "segue_episode_duration_seconds", "env"), "{{run}} {{env}} p99"),
            ),
        ),
        Panel(
            "Stragglers inside a group",
            "Coefficient of variation of the durations inside a group: above 1 some members take far longer than others.",
            "number",
            (
                Query(quantile(0.5, "segue_group_completion_cv", "env"), "{{run}} {{env}} p50"),
                Query(quantile(0.95, "segue_group_completion_cv", "env"), "{{run}} {{env}} p95"),
            ),
        ),
        Panel(
            "Failures and retries",
            "Further attempts after a failure, episodes given up, tasks set aside because they kept failing.",
            "count",
            (
                Query(increase("segue_episode_retries_total", "class"), "{{run}} retries: {{class}}"),
                Query(increase("segue_episodes_failed_total", "class"), "{{run}} given up: {{class}}"),
                Query(increase("segue_tasks_quarantined_total", "env"), "{{run}} {{env}} quarantined"),
            ),
        ),
        Panel(
            "Groups finished, and without a learning signal",
            "Groups whose rewards are all equal teach nothing under group baselines.",
            "per second",
            (
                Query(rate("segue_groups_finished_total", "env"), "{{run}} {{env}} finished"),
                Query(rate("segue_groups_zero_variance_total", "env"), "{{run}} {{env}} without variance"),
            ),
        ),
        Panel(
            "Evaluation episodes",
            "They are in no other count.",
            "count",
            (Query(over("sum", "segue_eval_episodes_total", "result"), "{{run}} {{result}}"),),
        ),
    ),
)

_QUEUES = Row(
    "Queues",
    (
        Panel(
            "Items in the queues",
            "pending: episodes waiting for a lease; ready: finished groups; batches: those not yet in a checkpoint.",
            "count",
            (Query(over("sum", "segue_queue_depth", "role", "queue"), "{{run}} {{role}} {{queue}}"),),
        ),
        Panel(
            "Filling of the bounded queues",
            "Items over what the queue may hold. Full means that no group may begin.",
            "ratio",
            (
                Query(
                    share(
                        over("max", "segue_queue_depth", "queue", where='role="scheduler"'),
                        over("max", "segue_queue_capacity", "queue"),
                    ),
                    "{{run}} {{queue}}",
                ),
            ),
        ),
        Panel(
            "Bytes in the queues",
            "In memory; what does not fit goes to disk.",
            "bytes",
            (
                Query(over("sum", "segue_queue_bytes", "queue"), "{{run}} {{queue}}"),
                Query(over("sum", "segue_queue_spilled_bytes_total"), "{{run}} spilled to disk so far"),
            ),
        ),
        Panel(
            "Wait in a queue",
            "p95 of the time an item waited: age that waiting adds.",
            "seconds",
            (Query(quantile(0.95, "segue_queue_wait_seconds", "role", "queue"), "{{run}} {{role}} {{queue}}"),),
        ),
    ),
)

_PROCESSES = Row(
    "Processes",
    (
        Panel(
            "What runs",
            "Version, commit and attempt of every process.",
            "count",
            (Query(over("max", "segue_build_info", "role", "rank", "node", "version", "git_sha", "attempt"), "{{role}}"),),
            "table",
        ),
        Panel(
            "Starts",
            "How often each process was started in this attempt: a step up is a death that the run survived; its log says why.",
            "count",
            (Query(over("max", "segue_process_starts", "role", "rank"), "{{run}} {{role}}-{{rank}}"),),
        ),
        Panel(
            "Starts in the place of another",
            "What took the process before: it died, was silent, its engine failed, or its host was lost.",
            "count",
            (Query(over("sum", "segue_process_restarts_total", "role", "reason"), "{{run}} {{role}} {{reason}}"),),
        ),
        Panel(
            "Age of the last sign of life",
            "Its loop beats once a second; over a minute an alert fires.",
            "seconds",
            (
                Query(
                    f"time() - {over('min', 'segue_worker_heartbeat_timestamp_seconds', 'role', 'rank')}",
                    "{{run}} {{role}}-{{rank}}",
                ),
            ),
        ),
        Panel(
            "Lag of the event loops",
            "p99 of how late a timer ran: above 0.1 s Python itself is the bottleneck.",
            "seconds",
            (Query(quantile(0.99, "segue_event_loop_lag_seconds", "role", "rank"), "{{run}} {{role}}-{{rank}}"),),
        ),
        Panel(
            "Processor cores in use",
            "CPU seconds per second of each role's processes, without their children (environments).",
            "cores",
            (Query(rate("segue_process_cpu_seconds_total", "role"), "{{run}} {{role}}"),),
        ),
        Panel(
            "Memory",
            "Resident bytes of each process.",
            "bytes",
            (Query(over("max", "segue_process_resident_memory_bytes", "role", "rank"), "{{run}} {{role}}-{{rank}}"),),
        ),
        Panel(
            "Log messages",
            "Warnings and worse, per second.",
            "per second",
            (
                Query(
                    rate("segue_log_messages_total", "role", "level", where='level=~"warning|error|critical"'),
                    "{{run}} {{role}} {{level}}",
                ),
            ),
        ),
        Panel(
            "Messages",
            "Calls that arrived, and records the journal wrote, per second.",
            "per second",
            (
                Query(rate("segue_messages_received_total", "role"), "{{run}} {{role}}"),
                Query(rate("segue_journal_records_total"), "{{run}} journal"),
            ),
        ),
        Panel(
            "Messages refused, calls that failed",
            "Refused: of an old attempt or session, repeated, out of order. A few after a death are right; many are not.",
            "count",
            (
                Query(increase("segue_messages_refused_total", "role", "reason"), "{{run}} {{role}} refused: {{reason}}"),
                Query(increase("segue_rpc_failures_total", "role", "reason"), "{{run}} {{role}} failed: {{reason}}"),
            ),
        ),
        Panel(
            "What measuring costs",
            "CPU seconds of answering scrapes over those of the process, and values written per second (docs/monitoring.md).",
            "number",
            (
                Query(
                    share(rate("segue_scrape_cpu_seconds_total", "role"), rate("segue_process_cpu_seconds_total", "role")),
                    "{{run}} {{role}} scrapes, share",
                ),
                Query(rate("segue_metric_writes_total", "role"), "{{run}} {{role}} writes per second"),
            ),
        ),
    ),
)

OVERVIEW = Dashboard(
    "overview",
    "Segue: overview",
    "Does it learn, who waits for whom, what is lost.",
    (_LEARNING, _WAITING, _EPISODES, _QUEUES, _PROCESSES),
)
