"""physicsnemo.domain_parallel.shard_utils: halos and rings for handlers that work on pieces."""
