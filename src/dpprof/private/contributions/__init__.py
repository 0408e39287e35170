"""What each use of a parameter contributes to a sample's gradient: norms and sums."""
