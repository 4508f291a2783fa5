"""What clients meet: the gRPC server, who may call, and which unit's router gets a request."""
