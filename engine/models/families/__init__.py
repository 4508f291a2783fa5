"""What each model family adds to the common decoder: a file each, and one table by name."""
