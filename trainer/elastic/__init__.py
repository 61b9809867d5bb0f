"""Replica groups as failure domains: the worker side, and the coordinator."""
