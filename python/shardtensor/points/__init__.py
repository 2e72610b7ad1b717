"""Points and graphs that are cut over ranks: neighbours, rows by global number, reductions to them, samples."""

from shardtensor.points._rows import Routes, index_add, scatter, segment_reduce, take
from shardtensor.points._sampling import farthest_points
from shardtensor.points._search import ball_query, knn, radius_search

__all__ = ["Routes", "ball_query", "farthest_points", "index_add", "knn", "radius_search", "scatter", "segment_reduce", "take"]
