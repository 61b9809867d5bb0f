"""The reconciler: observe live jobs, decide, store, act."""
