"""The database: tables, stores, migrations."""
