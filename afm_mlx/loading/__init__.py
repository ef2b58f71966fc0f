"""From a path, a hub id or a name to a model that is ready to run: AFM's, and those of mlx-lm's zoo."""
