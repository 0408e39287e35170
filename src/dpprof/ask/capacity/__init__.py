"""How large a batch of one method fits."""
