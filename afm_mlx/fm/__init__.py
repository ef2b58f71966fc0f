"""The API of Apple's `apple-fm-sdk`, on this engine."""
