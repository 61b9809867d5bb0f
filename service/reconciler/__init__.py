"""The control loop: observe, decide, store, act."""
