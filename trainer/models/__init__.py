"""TorchRec models that a job spec can name."""
