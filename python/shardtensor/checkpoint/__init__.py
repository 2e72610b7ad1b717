"""ShardTensors in torch.distributed.checkpoint. patches/checkpoints.py corrects what torch derives from placements alone."""
