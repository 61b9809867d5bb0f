"""Who may do what: credentials, roles, keys, sealed secrets."""
