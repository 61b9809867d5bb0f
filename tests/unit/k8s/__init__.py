"""The chart in k8s/: what it renders is valid, keeps our policies and fits each other."""
