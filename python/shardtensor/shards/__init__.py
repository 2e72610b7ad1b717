"""Several pieces per rank: LocalShardsWrapper, and ShardTensors whose piece is one."""
