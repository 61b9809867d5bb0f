"""REST API: routers, middleware, dependencies, problem responses."""
