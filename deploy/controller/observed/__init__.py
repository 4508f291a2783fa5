"""What a pass of the operator sees of one cluster: its objects, pods and fleet. Pure."""
