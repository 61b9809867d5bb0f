"""A two-tower recommender: a model of your own for `deploy/examples/movielens-module.yaml`.

    shardloom run deploy/examples/movielens-module.yaml --code deploy/examples/code \
        --set data.path=/absolute/path/to/prepared
"""

from two_towers.model import TwoTowers

__all__ = ["TwoTowers"]
