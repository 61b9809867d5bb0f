"""Authentication and authorization: credentials, roles, keys, secrets."""
