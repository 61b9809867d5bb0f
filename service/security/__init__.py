"""Who may do what: principals, keys, tokens, sessions, and the rules over them."""
