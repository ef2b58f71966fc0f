"""Task masks from data: scores of feed-forward channels, the groups that are kept, and recovery."""
