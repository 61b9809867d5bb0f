"""Control plane of Shardloom: REST API, reconciler, dashboard, SDK and CLI."""
