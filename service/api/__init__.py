"""HTTP surface: routers, schemas, dependencies and error handlers."""
