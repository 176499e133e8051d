"""The rollout nodes: what their engines do, what interrupts them, what is computed twice."""

from __future__ import annotations

from segue.monitoring.panels import Dashboard, Panel, Query, Row
from segue.monitoring.query import RUNS, WINDOW, increase, over, quantile, rate, select, share

_ROLE = 'role="rollout"'

_TIME = Row(
    "Time",
    (
        Panel(
            "What each node does",
            "One row per node and state: 1 while the node is in it.",
            "number",
            (Query(over("max", "segue_worker_state", "rank", "state", where=_ROLE), "{{run}} rollout-{{rank}} {{state}}"),),
            "state-timeline",
        ),
        Panel(
            "Time by state",
            "Shares of the nodes' time. A node runs many episodes at once: its state is the first of wait_weights, generate, "
            "wait_env, wait_admission that any of them is in.",
            "ratio",
            (
                Query(
                    f"{rate('segue_worker_state_seconds_total', 'state', where=_ROLE)}\n/ on (run) group_left ()\n"
                    f"({rate('segue_worker_state_seconds_total', where=_ROLE)} > 0)",
                    "{{run}} {{state}}",
                ),
            ),
            stack=True,
        ),
        Panel(
            "The embedded engine's time",
            "Seconds per second of each phase; a decode step is forward, sample, book and hand_over. 0 with other engines.",
            "number",
            (Query(rate("segue_engine_seconds_total", "phase"), "{{run}} {{phase}}"),),
            stack=True,
        ),
        Panel(
            "Idle time by node",
            "A node that waits more than the others gets too little work, or is slow to load weights.",
            "ratio",
            (Query(select("rank:segue_idle:ratio_rate5m", _ROLE), "{{run}} rollout-{{rank}}"),),
        ),
    ),
)

_TOKENS = Row(
    "Tokens",
    (
        Panel("Decoded tokens per second", "Tokens sampled.", "tokens/s", (Query(rate("segue_decode_tokens_total"), "{{run}}"),)),
        Panel(
            "Slowest nodes",
            "The five nodes that sample least.",
            "tokens/s",
            (
                Query(
                    f"bottomk(5, sum by (run, rank) (rate(segue_decode_tokens_total{{{RUNS}}}[{WINDOW}])))",
                    "{{run}} rollout-{{rank}}",
                ),
            ),
        ),
        Panel(
            "Prefill by cause",
            "Context tokens computed. first, turn and block are necessary; the others repeat work.",
            "tokens/s",
            (Query(rate("segue_prefill_tokens_total", "cause"), "{{run}} {{cause}}"),),
            stack=True,
        ),
        Panel(
            "Prefill seconds by cause",
            "Engine seconds per second that these tokens took.",
            "number",
            (Query(rate("segue_prefill_seconds_total", "cause"), "{{run}} {{cause}}"),),
            stack=True,
        ),
        Panel(
            "Re-prefill",
            "Context tokens computed again, of all; and the share of the nodes' time that weight updates cost in re-prefill, as "
            "the scheduler sees it when it decides (update.policy).",
            "ratio",
            (
                Query(select("run:segue_reprefill:ratio_rate5m"), "{{run}} of tokens, 5 minutes"),
                Query(over("max", "segue_reprefill_share_ratio"), "{{run}} of time"),
            ),
        ),
        Panel(
            "Hits of the KV cache",
            "Context tokens found in the cache, of all context tokens.",
            "ratio",
            (
                Query(
                    share(
                        rate("segue_cached_tokens_total"),
                        f"({rate('segue_cached_tokens_total')} + {rate('segue_engine_prefill_tokens_total')})",
                    ),
                    "{{run}}",
                ),
            ),
        ),
        Panel(
            "Preemptions and evictions",
            "Requests that lost their slot, cached contexts dropped to make room: too little KV memory for so many episodes.",
            "count",
            (
                Query(increase("segue_engine_preemptions_total", "rank"), "{{run}} rollout-{{rank}} preemptions"),
                Query(increase("segue_engine_evictions_total", "rank"), "{{run}} rollout-{{rank}} evictions"),
            ),
        ),
        Panel(
            "Tokens thrown away",
            "Sampled, and never accepted by the scheduler.",
            "tokens/s",
            (Query(rate("segue_discarded_tokens_total", "reason"), "{{run}} {{reason}}"),),
        ),
        Panel(
            "Time to sample an action",
            "From submission to last token, waits for a slot included.",
            "seconds",
            (
                Query(quantile(0.5, "segue_turn_generate_seconds"), "{{run}} p50"),
                Query(quantile(0.95, "segue_turn_generate_seconds"), "{{run}} p95"),
                Query(quantile(0.99, "segue_turn_generate_seconds"), "{{run}} p99"),
            ),
        ),
    ),
)

_EPISODES = Row(
    "Episodes",
    (
        Panel(
            "Episodes and requests at once",
            "Episodes under a lease, episode loops of the nodes, requests in an engine slot.",
            "count",
            (
                Query(over("sum", "segue_episodes_in_flight", "env"), "{{run}} {{env}} leased"),
                Query(over("sum", "segue_episodes_running"), "{{run}} loops"),
                Query(over("sum", "segue_requests_running"), "{{run}} in a slot"),
            ),
        ),
        Panel(
            "Queues of the nodes",
            "engine: requests that wait for a slot; outbox: events that wait for the next exchange with the scheduler.",
            "count",
            (Query(over("sum", "segue_queue_depth", "rank", "queue", where=_ROLE), "{{run}} rollout-{{rank}} {{queue}}"),),
        ),
        Panel(
            "Exchanges with the scheduler",
            "From sending to reply.",
            "seconds",
            (
                Query(quantile(0.5, "segue_exchange_seconds"), "{{run}} p50"),
                Query(quantile(0.99, "segue_exchange_seconds"), "{{run}} p99"),
            ),
        ),
        Panel(
            "Paused, resumed, migrated",
            "Requests that ended before their turn did, those that went on, episodes that went on at another node.",
            "per second",
            (
                Query(rate("segue_episodes_paused_total", "reason"), "{{run}} paused: {{reason}}"),
                Query(rate("segue_episodes_resumed_total"), "{{run}} resumed"),
                Query(rate("segue_episodes_migrated_total", "reason"), "{{run}} migrated: {{reason}}"),
            ),
        ),
        Panel(
            "Pauses for new weights",
            "Time in which an engine generated nothing because it was paused.",
            "seconds",
            (
                Query(quantile(0.5, "segue_rollout_pause_seconds", "reason"), "{{run}} {{reason}} p50"),
                Query(quantile(0.95, "segue_rollout_pause_seconds", "reason"), "{{run}} {{reason}} p95"),
            ),
        ),
        Panel(
            "Leases and nodes lost",
            "Leases that ended for want of news, as scheduler and nodes count them; sessions of nodes that were ended.",
            "count",
            (
                Query(increase("segue_lease_expiries_total"), "{{run}} expired"),
                Query(increase("segue_leases_lost_total"), "{{run}} given up by nodes"),
                Query(increase("segue_nodes_fenced_total", "reason"), "{{run}} fenced: {{reason}}"),
            ),
        ),
        Panel(
            "Probe after a load",
            "Largest |learner − engine| log-probability of the probe that every engine scores after every load: does it run what "
            "was published?",
            "nats",
            (
                Query(over("max", "segue_weight_probe_gap_nats", "rank"), "{{run}} rollout-{{rank}} last"),
                Query(over("max", "segue_weight_probe_gap_max_nats"), "{{run}} largest"),
            ),
        ),
    ),
)

_GPUS = Row(
    "GPUs",
    (
        Panel(
            "Utilisation",
            "By NVML: a kernel ran. It says nothing about whether it was useful.",
            "ratio",
            (
                Query(
                    over("max", "segue_gpu_utilization_ratio", "rank", "UUID", where=_ROLE), "{{run}} rollout-{{rank}} {{UUID}}"
                ),
            ),
            gpu=True,
        ),
        Panel(
            "Memory",
            "Bytes in use by any process, and bytes there are, by NVML.",
            "bytes",
            (
                Query(over("max", "segue_gpu_memory_used_bytes", "rank", "UUID", where=_ROLE), "{{run}} {{UUID}} used"),
                Query(over("max", "segue_gpu_memory_size_bytes", "rank", "UUID", where=_ROLE), "{{run}} {{UUID}} size"),
            ),
            gpu=True,
        ),
        Panel(
            "Which process has which GPU",
            "By UUID, as DCGM and nvidia-smi -L name it.",
            "count",
            (Query(over("max", "segue_gpu_assignment_info", "role", "rank", "node", "UUID"), "{{role}}-{{rank}}"),),
            "table",
            gpu=True,
        ),
    ),
)

ROLLOUT = Dashboard(
    "rollout", "Segue: rollout", "What the engines do, and what interrupts them.", (_TIME, _TOKENS, _EPISODES, _GPUS)
)
