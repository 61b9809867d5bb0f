"""Trained models as files that serve without Shardloom's service (`python -m trainer.export`)."""
