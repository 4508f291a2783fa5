"""What people and the planner read: metrics, figures for the registry, a log line a request."""
