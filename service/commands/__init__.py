"""The commands of the CLI, one module per family; `service.cli` puts them together."""
