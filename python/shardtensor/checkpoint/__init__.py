"""ShardTensors in torch.distributed.checkpoint. What torch works out from placements alone is mended in patches/checkpoints.py."""
