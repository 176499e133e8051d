"""Prometheus and Grafana for Segue, made from the catalogue: rules, alerts and dashboards as data, and the files they become.

`segue dashboards` writes `monitoring/`, `segue monitor RUN` starts a Prometheus for one run (docs/monitoring.md).
"""
