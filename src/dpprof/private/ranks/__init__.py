"""What several ranks do together, by DDP and by FSDP2."""
