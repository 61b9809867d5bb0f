"""A two-tower recommender: a model of your own for `examples/movielens-module.yaml`.

    shardloom run examples/movielens-module.yaml --code examples/code \
        --set data.path=/absolute/path/to/prepared
"""

from two_towers.model import TwoTowers

__all__ = ["TwoTowers"]
