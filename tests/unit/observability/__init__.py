"""Alerts, dashboards and runbooks: they fit each other and the metrics that there are."""
