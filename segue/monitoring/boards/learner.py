"""The learner: where a step's time goes, whether training is stable, what it refuses."""

from __future__ import annotations

from segue.monitoring.panels import Dashboard, Panel, Query, Row
from segue.monitoring.query import RUNS, WINDOW, mean, over, quantile, rate, share

_ROLE = 'role="learner"'

_WHOLE_PHASES = 'phase!~"forward|backward"'

_STEPS = Row(
    "Steps",
    (
        Panel(
            "A step by phase",
            "Mean seconds of each phase of a learner step; forward and backward are inside forward_backward.",
            "seconds",
            (Query(mean("segue_learner_step_seconds", "phase", where=_WHOLE_PHASES), "{{run}} {{phase}}"),),
            stack=True,
        ),
        Panel(
            "Slow phases",
            "p95 of each phase.",
            "seconds",
            (Query(quantile(0.95, "segue_learner_step_seconds", "phase"), "{{run}} {{phase}}"),),
        ),
        Panel(
            "Time by state",
            "Seconds per second, over all ranks.",
            "number",
            (Query(rate("segue_worker_state_seconds_total", "state", where=_ROLE), "{{run}} {{state}}"),),
            stack=True,
        ),
        Panel(
            "Tokens per second",
            "Trained ones, and those kept out of the loss.",
            "tokens/s",
            (
                Query(rate("segue_trained_tokens_total"), "{{run}} trained"),
                Query(rate("segue_masked_tokens_total", "reason"), "{{run}} masked: {{reason}}"),
            ),
        ),
        Panel(
            "Batches fetched ahead",
            "Batches that wait to be trained; 0 most of the time means that the learner starves.",
            "count",
            (Query(over("max", "segue_queue_depth", "rank", where=f'{_ROLE}, queue="prefetch"'), "{{run}} learner-{{rank}}"),),
        ),
        Panel(
            "Steps per minute",
            "Batches trained.",
            "number",
            (Query(f"60 * {rate('segue_learner_steps_total')}", "{{run}}"),),
        ),
    ),
)

_STABILITY = Row(
    "Stability",
    (
        Panel(
            "Effective sample size",
            "Over tokens, from unclamped weights. Near 1: on-policy; low: a few tokens carry the batch.",
            "ratio",
            (Query(over("max", "segue_ess_ratio"), "{{run}}"),),
        ),
        Panel(
            "Clipped and kept tokens",
            "Share of tokens whose ratio was clipped, and share of sampled tokens that survived the masks.",
            "ratio",
            (
                Query(over("max", "segue_clipped_tokens_ratio"), "{{run}} clipped"),
                Query(over("max", "segue_kept_tokens_ratio"), "{{run}} kept"),
            ),
        ),
        Panel(
            "Entropy",
            "Mean entropy of the policy at sampled tokens. A fast fall without a gain in reward is a collapse.",
            "nats",
            (Query(over("max", "segue_entropy_nats"), "{{run}}"),),
        ),
        Panel("Gradient norm", "Global norm before clipping.", "number", (Query(over("max", "segue_grad_norm"), "{{run}}"),)),
        Panel(
            "Reward and its spread",
            "Mean return of the last batch, and the mean over groups of its standard deviation.",
            "number",
            (
                Query(over("max", "segue_reward_mean", "env"), "{{run}} {{env}} mean"),
                Query(over("max", "segue_reward_std", "env"), "{{run}} {{env}} spread in a group"),
            ),
        ),
        Panel(
            "Groups without a learning signal",
            "Share of finished groups whose rewards are all equal.",
            "ratio",
            (
                Query(
                    share(rate("segue_groups_zero_variance_total", "env"), rate("segue_groups_finished_total", "env")),
                    "{{run}} {{env}}",
                ),
            ),
        ),
        Panel(
            "Gap of log-probabilities",
            "|learner − engine| in nats where both used the same weights: numerics, or a wrong weight.",
            "nats",
            (
                Query(over("max", "segue_logprob_gap_abs_mean_nats"), "{{run}} mean"),
                Query(over("max", "segue_logprob_gap_abs_max_nats"), "{{run}} max"),
            ),
        ),
        Panel(
            "Ages of trained tokens",
            "Tokens per second in each bucket of age.",
            "versions",
            (Query(f"sum by (le) (rate(segue_token_staleness_versions_bucket{{{RUNS}}}[{WINDOW}]))", "{{le}}"),),
            "heatmap",
        ),
        Panel(
            "Memory of the GPUs",
            "Bytes in use by any process, by NVML.",
            "bytes",
            (
                Query(
                    over("max", "segue_gpu_memory_used_bytes", "rank", "UUID", where=_ROLE), "{{run}} learner-{{rank}} {{UUID}}"
                ),
            ),
            gpu=True,
        ),
    ),
)

LEARNER = Dashboard(
    "learner", "Segue: learner", "Where a step's time goes, and whether training is stable.", (_STEPS, _STABILITY)
)
