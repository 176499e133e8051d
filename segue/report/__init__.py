"""What a run says of itself: one line per step, the summary at its end, and the table that shows it."""

from segue.report.console import step_text
from segue.report.facts import EpisodeCounts, EvalResult, RunFacts, WeightSyncFigures
from segue.report.steps import step_line
from segue.report.summary import build_summary
from segue.report.table import print_summary, summary_table

__all__ = [
    "EpisodeCounts",
    "EvalResult",
    "RunFacts",
    "WeightSyncFigures",
    "build_summary",
    "print_summary",
    "step_line",
    "step_text",
    "summary_table",
]
