"""Several pieces to a rank: LocalShardsWrapper, and ShardTensors whose piece is one."""
