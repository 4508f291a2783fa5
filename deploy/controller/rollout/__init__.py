"""The rollout of a change: units, and the state machine that replaces one by another. Pure."""
